"""Objects that stay alive are not visited by later collections, and garbage is still freed."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from megarl.machine.garbage import long_lived, without_collections


class Node:
    def __init__(self) -> None:
        self.itself = self  # a cycle, which only a collection frees


def test_an_object_of_the_block_is_exempt_from_collections() -> None:
    with long_lived():
        kept = Node()

    assert not any(entry is kept for entry in gc.get_objects())


def test_garbage_of_the_block_is_freed() -> None:
    with long_lived():
        freed = weakref.ref(Node())
        assert freed() is not None, "nothing is collected in the block"

    assert freed() is None


def test_a_cycle_created_later_is_still_freed() -> None:
    with long_lived():
        pass
    later = weakref.ref(Node())

    gc.collect()
    assert later() is None


def test_a_failure_in_the_block_enables_collections_again() -> None:
    with pytest.raises(ValueError, match="planted"), long_lived():
        raise ValueError("planted")
    assert gc.isenabled()


def test_a_process_that_disabled_collections_keeps_them_disabled() -> None:
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_command_collects_rarely() -> None:
    program = "import gc; from megarl.cli.main import main; main([]); print(gc.get_threshold()[0])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "50000"
