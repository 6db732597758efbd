"""Test the file of a snapshot. What it contains is tested in tests/unit/engine/test_snapshot.py."""

from __future__ import annotations

from megarl.checkpoints.snapshot_file import write_snapshot
from megarl.machine.memory_files import MemoryFiles


def test_a_snapshot_of_a_repeated_step_differs_from_the_earlier_one() -> None:
    """Its copy on another node is therefore made again."""
    files = MemoryFiles()
    headers = []
    for _ in range(2):
        write_snapshot(files.path("rank"), 3, [], b"record")
        headers.append(files.complete()["rank"])
    assert headers[0] != headers[1]
    assert headers[0].nbytes == headers[1].nbytes
