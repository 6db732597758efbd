"""Batches for a training loop: an endless, shuffled, resumable walk through a data set, and one straight pass
for validation."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from megarl.batch.data_proto import DataProto
from megarl.config.rules.data import too_few_rows
from megarl.config.schema import DataConfig, SFTDataConfig
from megarl.data.files import DataError
from megarl.data.tables import RowIdentity

_log = logging.getLogger(__name__)


class RowSource(Protocol):
    """A data set whose rows can be made into a batch; `uids` name this visit to each row. identity: of all
    rows, in order."""

    @property
    def identity(self) -> RowIdentity: ...

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto: ...


class TrainingRows(RowSource, Protocol):
    """Also says of which file each row is."""

    @property
    def row_files(self) -> Sequence[str]: ...


class Share(NamedTuple):
    """Rows of a data set that follow each other, and their share of what is served, relative to the other
    parts'."""

    num_rows: int
    weight: float


def parts_of(files: Sequence[str], weights: Sequence[float], row_files: Sequence[str]) -> list[Share]:
    """A part for each file; without weights, none. `row_files`: the file of each row of a data set, in order.

    Raises DataError for a file of which no row is left.
    """
    if not weights:
        return []
    # Filtering may have removed rows of a file, so those that are left are counted.
    parts = [Share(row_files.count(file), weight) for file, weight in zip(files, weights, strict=True)]

    if empty := [file for file, part in zip(files, parts, strict=True) if part.num_rows == 0]:
        raise DataError(
            f"{empty[0]}: no row is left of it, so it can have no share; leave it out of data.train_files "
            f"and its weight"
        )

    return parts


class BatchLoader:
    """Serves `batch_size` rows at a time, for ever. Each epoch serves every row once; a batch may run across
    the end of an epoch, so no row is dropped and all batches are full.

    With `parts` each of them has epochs of its own, and the next row is one of the part that is furthest
    behind its share, so any stretch of rows is as near to the shares as whole rows can be.

    The order of an epoch is a function of seed and epoch alone, and the order of parts one of the weights, so
    the whole state is the number of rows served of each part. The uid of a row is `epoch-row`: a row that
    comes twice in one batch (a small data set) counts as two prompts.
    """

    def __init__(
        self, dataset: RowSource, batch_size: int, *, shuffle: bool, seed: int, parts: Sequence[Share] = ()
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._parts = list(parts) or [Share(len(dataset), 1.0)]
        self._starts = [0, *accumulate(part.num_rows for part in self._parts)]
        self._num_served = [0] * len(self._parts)
        self._orders: dict[int, tuple[int, list[int]]] = {}  # of each part: its epoch, and that epoch's order

    @property
    def epoch(self) -> int:
        """Whole passes over all rows that were served."""
        return min(
            served // part.num_rows for served, part in zip(self._num_served, self._parts, strict=True)
        )

    def __iter__(self) -> Iterator[DataProto]:
        return self

    def __next__(self) -> DataProto:
        return self.take(self._batch_size)

    def take(self, num_wanted: int) -> DataProto:
        """The next `num_wanted` rows, which a step may need beside its batch."""
        indices: list[int] = []
        uids: list[str] = []

        for _ in range(num_wanted):
            # The part that is furthest behind its share serves the next row.
            number = self._furthest_behind(self._num_served)
            # Each part has epochs of its own, because a small one repeats sooner than a large one.
            epoch, place = divmod(self._num_served[number], self._parts[number].num_rows)
            index = self._starts[number] + self._order(number, epoch)[place]
            indices.append(index)
            # The epoch keeps the uid unique when the row is served again.
            uids.append(f"{epoch}-{index}")
            self._num_served[number] += 1

        return self._dataset.batch(indices, uids)

    def _furthest_behind(self, num_served: Sequence[int]) -> int:
        """The part whose next row is due first, where the rows of weight w are due at (1/2)/w, (3/2)/w, ...
        The first of equals."""
        due = [(served + 0.5) / part.weight for served, part in zip(num_served, self._parts, strict=True)]
        return due.index(min(due))

    def _order(self, number: int, epoch: int) -> list[int]:
        """Of the rows of a part, which are numbered from 0."""
        if self._orders.get(number, (None,))[0] != epoch:
            num_rows = self._parts[number].num_rows
            chance = np.random.default_rng([self._seed, epoch, number])
            order = chance.permutation(num_rows) if self._shuffle else np.arange(num_rows)
            self._orders[number] = epoch, order.tolist()
        return self._orders[number][1]

    @property
    def num_served(self) -> int:
        """Rows, since the beginning of the data."""
        return sum(self._num_served)

    def state_dict(self) -> dict[str, Any]:
        _, tokens, chat_time = self._dataset.identity
        return {
            "num_served": list(self._num_served),
            **self._identity(),
            "tokens": tokens,
            "chat_time": chat_time,
        }

    def behind(self, state: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
        """The state of one that had `state`, and has served `num_rows` since."""
        served = list(state["num_served"])
        for _ in range(num_rows):
            served[self._furthest_behind(served)] += 1
        return {**state, "num_served": served}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the row after the last one served; the batch size may be another.

        Raises ValueError where the rows, the weights, the seed or `shuffle` differ: the order would not be
        the one that was begun; also where the state lacks one of them.
        """
        if missing := sorted({"num_served", *self._identity()} - state.keys()):
            raise ValueError(
                f"cannot resume the data: the checkpoint does not say {', '.join(missing)}; it is damaged "
                f"or of another version, so start "
                "without resuming, or with the version that wrote it"
            )

        state = self._with_known_rows(state)
        for name, now in self._identity().items():
            if state[name] != now:
                raise ValueError(
                    f"cannot resume the data: the checkpoint was written with {name}={state[name]}, this "
                    f"run has {now}; "
                    "use the same data files, data.train_weights, data.seed and data.shuffle, or start "
                    "without resuming"
                )

        # Orders follow from seed, epoch and part, so the counts alone restore the position.
        self._num_served = list(state["num_served"])

    def _with_known_rows(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Compares the tokens of the rows, which may be others for the same rows: that is said, and no reason
        not to resume.

        Checkpoints of versions that knew rows by their tokens alone have these as `rows`. The state that is
        returned has the rows' own.
        """
        rows, tokens, _ = self._dataset.identity
        # The rows are compared by their own content, so other tokens deserve only a warning.
        if "tokens" in state:
            if None not in (tokens, state["tokens"]) and state["tokens"] != tokens:
                _log.warning(
                    "the rows of the data are those of the checkpoint, but they become other tokens: the "
                    "tokenizer, its chat template or "
                    "transformers has changed since"
                )
            return state

        if tokens is None:
            _log.warning(
                "the checkpoint is of a version that knew rows by their tokens, which the chat template "
                "changes with the date: whether "
                "the data files are the same cannot be compared"
            )

        return {**state, "rows": rows} if tokens in (None, state["rows"]) else state

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": len(self._dataset),
            "rows": self._dataset.identity.rows,
            "parts": [list(part) for part in self._parts],
            "shuffle": self._shuffle,
            "seed": self._seed,
        }


def train_loader(
    dataset: TrainingRows, data: DataConfig | SFTDataConfig, rows_per_step: int, key: str
) -> BatchLoader:
    """Of a run's training data. `key`: that of rows_per_step.

    Raises DataError for steps of more rows than there are, and as `parts_of`.
    """
    if problem := too_few_rows(rows_per_step, len(dataset), key):
        raise DataError(problem)
    parts = parts_of(data.train_files, data.train_weights, dataset.row_files)
    return BatchLoader(dataset, rows_per_step, shuffle=data.shuffle, seed=data.seed, parts=parts)


def one_pass(dataset: RowSource, batch_size: int) -> Iterator[DataProto]:
    """Every row once, in order; the last batch may be smaller. The uid of a row is its number."""
    for start in range(0, len(dataset), batch_size):
        indices = range(start, min(start + batch_size, len(dataset)))
        yield dataset.batch(indices, [str(index) for index in indices])
