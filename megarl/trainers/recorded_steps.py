"""The last steps of a run with their inputs, so that they can be trained again."""

from __future__ import annotations

import pickle
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

Metrics = Mapping[str, float]


class RecordedStep[T]:
    """A step that can be trained again.

    Args:
        number: Its number.
        train: Trains it. Each call with the same inputs starts from the same state of the driver.
        inputs: Its samples, and what else it starts from.
    """

    def __init__(self, number: int, train: Callable[[T], Metrics], inputs: T) -> None:
        self.number = number
        self._train = train
        self._inputs: T | None = inputs
        self._file: IO[bytes] | None = None

    def train(self) -> Metrics:
        return self._train(self._read())

    def move_to_file(self, folder: Path) -> None:
        """Move the inputs from memory to an unnamed file, which is removed with this object."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (open as long as this object)
            pickle.dump(self._inputs, self._file, protocol=pickle.HIGHEST_PROTOCOL)
            self._inputs = None

    def _read(self) -> Any:
        if self._file is None:
            return self._inputs
        self._file.seek(0)
        return pickle.load(self._file)  # written by this process


class RecordedSteps:
    """Steps in order. Those that a snapshot contains are in files, because only a checkpoint precedes them.

    Args:
        folder: The folder of these files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: deque[RecordedStep[Any]] = deque()
        self._last_dropped = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: RecordedStep[Any]) -> None:
        self._steps.append(step)

    def after(self, number: int) -> list[RecordedStep[Any]]:
        return [step for step in self._steps if step.number > number]

    def reach_back_to(self, number: int) -> bool:
        """Return whether all steps after `number` are recorded."""
        return self._last_dropped <= number

    def settle(self, snapshot: int | None, checkpoint: int | None) -> None:
        """Drop the steps that the checkpoint contains, and move those that the snapshot contains to files.

        Args:
            snapshot: The newest complete snapshot. Without a checkpoint, the steps before it are dropped.
            checkpoint: The newest checkpoint, at most as new as the last step.
        """
        if snapshot is None:
            return
        covered = snapshot if checkpoint is None else min(snapshot, checkpoint)
        while self._steps and self._steps[0].number <= covered:
            self._last_dropped = self._steps.popleft().number
        for step in self._steps:
            if step.number <= snapshot:
                step.move_to_file(self._folder)
