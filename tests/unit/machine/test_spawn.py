"""Processes that inherit nothing from the one that starts them, not even its environment variables, wherever
a program could look for them."""

import os
import re
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path

import pytest

from megarl.machine.spawn import BareContext, FreshContext

PARTS = ("hun", "ter2", "xyz")  # parts of the secret, which the searching program must not contain itself


def times_in_memory() -> int:
    """Count the places in this process's memory where the three parts are adjacent."""
    first, second, third = (part.encode() for part in PARTS)
    count = 0

    # Compute all counts in one pass, because reading memory creates new copies that would be counted in turn.
    regions = Path("/proc/self/maps").read_text().splitlines()
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in regions:
            begin, end, rights = re.match(r"(\w+)-(\w+) (\S+)", line).groups()
            if rights.startswith("rw"):
                memory.seek(int(begin, 16))
                text = memory.read(int(end, 16) - int(begin, 16))
                place = text.find(first)
                while place >= 0:
                    count += text[place + 3 : place + 7] == second and text[place + 7 : place + 10] == third
                    place = text.find(first, place + 1)

    return count


def look(answer: Connection) -> None:
    kernels = Path("/proc/self/environ").read_text().strip("\0").split("\0")
    answer.send((times_in_memory(), sorted(os.environ), sorted(kernels)))


def looked(context: SpawnContext) -> tuple[int, list[str], list[str]]:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=look, args=(there,))
    process.start()
    there.close()  # ensures that a failing process ends the wait
    found = here.recv()
    process.join()

    return found


def test_a_bare_process_has_the_variables_that_it_is_given_and_finds_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_SECRET", "".join(PARTS))
    count, names, _ = looked(FreshContext())
    assert count >= 1  # the search works
    assert "MY_SECRET" in names
    count, names, kernels = looked(BareContext({"NAMED": "it's $HOME", "PATH": "/usr/bin"}))
    assert count == 0
    # The others are set by the shell, by Python itself, and by the package of the tests when it is imported.
    assert set(names) <= {"NAMED", "PATH", "PWD", "LC_CTYPE", "OMP_NUM_THREADS"}
    assert not any(each.startswith("OMP_NUM_THREADS=") for each in kernels)
    assert {"NAMED=it's $HOME", "PATH=/usr/bin"} <= set(kernels)


def test_a_bare_context_changes_no_other_process_and_leaves_no_file() -> None:
    bare = BareContext({})
    looked(bare)
    assert "PATH" in looked(FreshContext())[1]
    folder = bare.launcher.parent
    assert sys.executable in bare.launcher.read_text()
    del bare
    assert not folder.exists()
