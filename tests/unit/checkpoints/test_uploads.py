"""Test the copies of checkpoints in the background, with a destination that the test holds up."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megarl.checkpoints.object_storage import Uploads
from megarl.machine.errors import CheckpointError


class HeldStorage:
    """Copies nothing before `allow`. The names in `failing` fail."""

    url = "s3://bucket/run"

    def __init__(self) -> None:
        self.is_closed = False
        self.copied: list[str] = []
        self.failing: set[str] = set()
        self.begun = threading.Semaphore(0)
        self.allow = threading.Semaphore(0)

    def close(self) -> None:
        self.is_closed = True

    def upload(self, checkpoint: Path) -> int:
        self.begun.release()
        assert self.allow.acquire(timeout=60)
        if checkpoint.name in self.failing:
            raise CheckpointError(f"{checkpoint.name}: no space")
        self.copied.append(checkpoint.name)
        return 2**20


def test_checkpoints_are_in_use_until_they_are_copied_and_only_the_newest_waits() -> None:
    said: list[str] = []
    storage = HeldStorage()
    uploads = Uploads(storage, said.append)
    first, second, third = (Path(f"step_{number}") for number in (1, 2, 3))
    uploads.add(first)
    assert storage.begun.acquire(timeout=60)
    assert uploads.in_use == {first}
    uploads.add(second)
    assert uploads.in_use == {first, second}
    uploads.add(third)
    assert uploads.in_use == {first, third}
    assert said == ["step_2 is not copied to s3://bucket/run, which is slower than the saves"]

    storage.allow.release(2)
    uploads.finish()
    assert storage.copied == ["step_1", "step_3"]
    assert uploads.in_use == set()
    assert [line.split(" in ")[0] for line in said[1:]] == [
        "step_1: 1.0 MiB copied to s3://bucket/run",
        "step_3: 1.0 MiB copied to s3://bucket/run",
    ]
    uploads.close()
    assert storage.is_closed


def test_a_copy_that_fails_ends_the_run_only_if_it_is_the_last_one() -> None:
    said: list[str] = []
    storage = HeldStorage()
    storage.failing = {"step_1", "step_3"}
    storage.allow.release(3)
    uploads = Uploads(storage, said.append)
    for number in (1, 2):
        uploads.add(Path(f"step_{number}"))
        assert storage.begun.acquire(timeout=60)
    uploads.finish()
    assert said[0] == "step_1 could not be copied: step_1: no space"

    uploads.add(Path("step_3"))
    with pytest.raises(
        CheckpointError, match=r"no space. The checkpoint itself is complete; the same command"
    ):
        uploads.finish()
    uploads.close()
