"""Data loaders for training and validation.

Training uses an endless, shuffled, resumable iterator over a data set, validation a single ordered pass.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from megarl.batch.data_proto import DataProto
from megarl.config.rules.data import too_few_rows
from megarl.config.schema import DataConfig, PreferenceDataConfig, SFTDataConfig
from megarl.data.files import DataError
from megarl.data.tables import RowIdentity

_log = logging.getLogger(__name__)
EPOCHS = "epochs"


class RowSource(Protocol):
    """A data set whose rows can be batched.

    `uids` identify each use of a row. `identity` covers all rows in order.
    """

    @property
    def identity(self) -> RowIdentity: ...

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto: ...


class TrainingRows(RowSource, Protocol):
    """A RowSource that also provides the file of each row, and how many rows `overlong=filter` skipped."""

    @property
    def row_files(self) -> Sequence[str]: ...

    @property
    def num_filtered(self) -> int: ...


# The number of rows of a contiguous part of a data set, and its weight in the mixture relative to the others.
type Share = tuple[int, float]


def parts_of(files: Sequence[str], weights: Sequence[float], row_files: Sequence[str]) -> list[Share]:
    """Return one part per file, or none if there are no weights.

    Args:
        row_files: The file of each row of the data set, in order.

    Raises:
        DataError: No row of a file is left.
    """
    if not weights:
        return []
    # Filtering may have removed rows of a file, so count the remaining ones.
    parts = [(row_files.count(file), weight) for file, weight in zip(files, weights, strict=True)]

    if empty := [file for file, (num_rows, _) in zip(files, parts, strict=True) if num_rows == 0]:
        raise DataError(
            f"{empty[0]}: none of its rows is left, so it cannot have a weight; remove it from "
            f"data.train_files, and its weight"
        )

    return parts


class RowLoader(ABC):
    """Yields `batch_size` rows at a time, forever. Subclasses decide their order.

    The uid of a row identifies this use of it: a row that occurs twice in one batch counts as two prompts.

    Attributes:
        order: Its name in errors and in the state.
        reads_scores: Whether it depends on scores, by `update`.
    """

    order = EPOCHS
    reads_scores = False

    def __init__(self, dataset: RowSource, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self._dataset = dataset
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[DataProto]:
        return self

    def __next__(self) -> DataProto:
        return self.take(self._batch_size)

    @abstractmethod
    def take(self, num_wanted: int) -> DataProto:
        """Return the next `num_wanted` rows. A step may need some in addition to its batch."""

    def update(self, scores: Mapping[str, Sequence[float]]) -> None:
        """Adapt the order to the scores of a step's samples, by the uid of their row.

        Only orders with `reads_scores` have this method.
        """
        raise NotImplementedError

    def check_uids(self, uids: Iterable[str]) -> None:
        """Raise ValueError for a uid that is not of a row of this loader.

        Only orders with `reads_scores` have this method.
        """
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return metrics of the order."""
        return {}

    @property
    @abstractmethod
    def num_served(self) -> int:
        """The number of rows served since the beginning of the data."""

    # ---- for checkpoints

    @property
    @abstractmethod
    def position(self) -> Any:
        """The place in the order before the next row, for `state_at`."""

    @abstractmethod
    def state_at(self, position: Any, num_rows: int = 0) -> dict[str, Any]:
        """Return the state of a loader that has served `num_rows` rows since it had `position`."""

    def state_dict(self) -> dict[str, Any]:
        return self.state_at(self.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the row after the last one served. The batch size may differ.

        Raises:
            ValueError: The rows, or what decides their order, differ; or the state lacks one of them.
        """
        # Checkpoints of epochs do not contain the name of their order.
        if (before := state.get("order", EPOCHS)) != self.order:
            raise ValueError(
                f"cannot resume the data: the checkpoint was written with the curriculum {before}, this run "
                f"has {self.order}; use the same data.curriculum, or start without resuming"
            )
        if missing := sorted({"num_served", *self._identity()} - state.keys()):
            raise ValueError(
                f"cannot resume the data: the checkpoint does not contain {', '.join(missing)}; it is "
                "damaged or from another version, so start without resuming, or with the version that wrote "
                "it"
            )

        state = self._with_known_rows(state)
        for name, now in self._identity().items():
            if state[name] != now:
                raise ValueError(
                    f"cannot resume the data: the checkpoint was written with {name}={state[name]}, this run "
                    f"has {now}; use the same data files, data.train_weights, data.seed and data.shuffle, or "
                    "start without resuming"
                )
        self._restore(state)

    @abstractmethod
    def _restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same rows and the same order."""

    def _identity(self) -> dict[str, Any]:
        """Return what decides the rows and their order."""
        return {"num_rows": len(self._dataset), "rows": self._dataset.identity.rows}

    def _chat_state(self) -> dict[str, Any]:
        """Return what the tokens of the rows depend on, which may differ when a run resumes."""
        _, tokens, chat_time = self._dataset.identity
        return {"tokens": tokens, "chat_time": chat_time}

    def _with_known_rows(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Compare the tokens of the rows with the saved ones.

        Returns the state with the fingerprint of the rows themselves. Different tokens for the same rows
        cause a warning and do not prevent resuming.

        Checkpoints of older versions contain the fingerprint of the tokens as `rows`.
        """
        rows, tokens, _ = self._dataset.identity
        # The rows are compared by their own content, so different tokens only cause a warning.
        if "tokens" in state:
            if None not in (tokens, state["tokens"]) and state["tokens"] != tokens:
                _log.warning(
                    "the rows of the data are those of the checkpoint, but their tokens differ: the "
                    "tokenizer, its chat template or transformers has changed since then"
                )
            return state

        if tokens is None:
            _log.warning(
                "the checkpoint is from a version that identified rows by their tokens, which change with "
                "the date because the chat template writes it: whether the data files are the same cannot "
                "be verified"
            )

        return {**state, "rows": rows} if tokens in (None, state["rows"]) else state


class BatchLoader(RowLoader):
    """Serves the rows in epochs.

    Each epoch contains every row once. A batch may span the end of an epoch, so no row is dropped and all
    batches are full.

    With `parts`, each part has its own epochs, and the next row comes from the part that is furthest below
    its weight, so any sequence of rows approximates the weights as closely as whole rows allow.

    The order of an epoch depends only on the seed and the epoch, and the order of parts only on the weights,
    so the position is the number of rows served from each part. The uid of a row is `epoch-row`.
    """

    def __init__(
        self, dataset: RowSource, batch_size: int, *, shuffle: bool, seed: int, parts: Sequence[Share] = ()
    ) -> None:
        super().__init__(dataset, batch_size)
        self._shuffle = shuffle
        self._seed = seed
        self._parts = list(parts) or [(len(dataset), 1.0)]
        self._starts = [0, *accumulate(num_rows for num_rows, _ in self._parts)]
        self._num_served = [0] * len(self._parts)
        self._orders: dict[int, tuple[int, list[int]]] = {}  # part -> its epoch, and the order of that epoch

    @property
    def epoch(self) -> int:
        """The number of complete passes over all rows."""
        return min(
            served // num_rows for served, (num_rows, _) in zip(self._num_served, self._parts, strict=True)
        )

    def take(self, num_wanted: int) -> DataProto:
        indices: list[int] = []
        uids: list[str] = []

        for _ in range(num_wanted):
            epoch, index = self._serve(self._num_served)
            indices.append(index)
            # The epoch keeps the uid unique when the row is served again.
            uids.append(f"{epoch}-{index}")

        return self._dataset.batch(indices, uids)

    def upcoming(self, num_rows: int) -> list[int]:
        """Return the distinct rows among the next `num_rows`, in ascending order, without serving them."""
        served = list(self._num_served)
        found: set[int] = set()
        for _ in range(num_rows):
            found.add(self._serve(served)[1])
            if len(found) == len(self._dataset):
                break
        return sorted(found)

    def _serve(self, num_served: list[int]) -> tuple[int, int]:
        """Return the epoch and the number of the next row, and count it in `num_served`."""
        # The part that is furthest below its weight provides the next row.
        number = self._furthest_behind(num_served)
        # Each part has its own epochs, because a small one repeats sooner than a large one.
        epoch, place = divmod(num_served[number], self._parts[number][0])
        num_served[number] += 1
        return epoch, self._starts[number] + self._order(number, epoch)[place]

    def _furthest_behind(self, num_served: Sequence[int]) -> int:
        """Return the part whose next row is due first.

        The rows of a part with weight w are due at (1/2)/w, (3/2)/w, ... Ties go to the first part.
        """
        due = [(served + 0.5) / weight for served, (_, weight) in zip(num_served, self._parts, strict=True)]
        return due.index(min(due))

    def _order(self, number: int, epoch: int) -> list[int]:
        """Return the order of the rows of a part, numbered from 0."""
        if self._orders.get(number, (None,))[0] != epoch:
            order = epoch_order(self._parts[number][0], [self._seed, epoch, number], self._shuffle)
            self._orders[number] = epoch, order
        return self._orders[number][1]

    @property
    def num_served(self) -> int:
        return sum(self._num_served)

    @property
    def position(self) -> tuple[int, ...]:
        return tuple(self._num_served)

    def state_at(self, position: Sequence[int], num_rows: int = 0) -> dict[str, Any]:
        served = list(position)
        for _ in range(num_rows):
            served[self._furthest_behind(served)] += 1
        return {"num_served": served, **self._identity(), **self._chat_state()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        # Orders follow from seed, epoch and part, so the counts suffice to restore the position.
        self._num_served = list(state["num_served"])

    def _identity(self) -> dict[str, Any]:
        return {
            **super()._identity(),
            "parts": [list(part) for part in self._parts],
            "shuffle": self._shuffle,
            "seed": self._seed,
        }


def epoch_order(num_rows: int, seed: Sequence[int], shuffle: bool) -> list[int]:
    """Return the order of the rows of an epoch."""
    order = np.random.default_rng(seed).permutation(num_rows) if shuffle else np.arange(num_rows)
    return order.tolist()


def train_loader(
    dataset: TrainingRows,
    data: DataConfig | SFTDataConfig | PreferenceDataConfig,
    rows_per_step: int,
    key: str,
) -> BatchLoader:
    """Build the loader of a run's training data.

    Args:
        key: The configuration key of `rows_per_step`, for errors.

    Raises:
        DataError: A step has more rows than the data set, or no row of a file is left.
    """
    if problem := too_few_rows(rows_per_step, len(dataset), key):
        raise DataError(problem)
    parts = parts_of(data.train_files, data.train_weights, dataset.row_files)
    return BatchLoader(dataset, rows_per_step, shuffle=data.shuffle, seed=data.seed, parts=parts)


def one_pass(dataset: RowSource, batch_size: int) -> Iterator[DataProto]:
    """Yield every row once, in order; the last batch may be smaller. The uid of a row is its number."""
    for start in range(0, len(dataset), batch_size):
        indices = range(start, min(start + batch_size, len(dataset)))
        yield dataset.batch(indices, [str(index) for index in indices])
