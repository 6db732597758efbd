"""Test files in memory that one thread lists while another one creates them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from megarl.machine.memory_files import HEADER_BYTES, Header, MemoryFiles


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_files_are_listed_while_others_are_created(frequent_switches: None) -> None:
    files = MemoryFiles()
    header = Header(7, HEADER_BYTES, 3)
    errors: list[Exception] = []
    done = threading.Event()

    def list_them() -> None:
        try:
            while not done.is_set():
                files.complete()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=list_them)
    thread.start()
    for number in range(200):
        files.write(f"file-{number}", 0, header.encode())
    done.set()
    thread.join()
    assert errors == []
    assert files.complete() == {f"file-{number}": header for number in range(200)}
