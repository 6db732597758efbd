"""Batches for a training loop: an endless, shuffled, resumable walk through a data set, and one straight pass for validation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from megarl.batch.data_proto import DataProto


class RowSource(Protocol):
    """A data set whose rows can be made into a batch; `uids` name this visit to each row. fingerprint: of all rows, in order."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto: ...


class BatchLoader:
    """Serves `batch_size` rows at a time, for ever. Each epoch serves every row once; a batch may run across the end of an epoch,
    so no row is dropped and all batches are full.

    The order of an epoch is a function of seed and epoch alone, so the whole state is the number of rows served. The uid of a
    row is `epoch-row`: a row that comes twice in one batch (a small data set) counts as two prompts.
    """

    def __init__(self, dataset: RowSource, batch_size: int, *, shuffle: bool, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._num_served = 0

    @property
    def epoch(self) -> int:
        """Whole passes that were served."""
        return self._num_served // len(self._dataset)

    def __iter__(self) -> Iterator[DataProto]:
        return self

    def __next__(self) -> DataProto:
        return self.take(self._batch_size)

    def take(self, num_wanted: int) -> DataProto:
        """The next `num_wanted` rows, which a step may need beside its batch."""
        num_rows = len(self._dataset)
        indices: list[int] = []
        uids: list[str] = []
        while len(indices) < num_wanted:
            epoch, start = divmod(self._num_served + len(indices), num_rows)
            part = self._order(epoch)[start : start + num_wanted - len(indices)]
            indices += part
            uids += [f"{epoch}-{index}" for index in part]
        self._num_served += num_wanted
        return self._dataset.batch(indices, uids)

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._dataset)))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._dataset)).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"num_served": self._num_served, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the row after the last one served; the batch size may be another.

        Raises ValueError where the rows, the seed or `shuffle` differ: the order would not be the one that was begun.
        """
        for name, now in self._identity().items():
            if state[name] != now:
                raise ValueError(
                    f"cannot resume the data: the checkpoint was written with {name}={state[name]}, this run has {now}; "
                    "use the same data files, data.seed and data.shuffle, or start without resuming"
                )
        self._num_served = state["num_served"]

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": len(self._dataset), "rows": self._dataset.fingerprint, "shuffle": self._shuffle, "seed": self._seed}


def one_pass(dataset: RowSource, batch_size: int) -> Iterator[DataProto]:
    """Every row once, in order; the last batch may be smaller. The uid of a row is its number."""
    for start in range(0, len(dataset), batch_size):
        indices = range(start, min(start + batch_size, len(dataset)))
        yield dataset.batch(indices, [str(index) for index in indices])
