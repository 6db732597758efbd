"""DataProto, the batch exchanged between the driver and the workers.

It contains tensors, rows of tokens, object arrays and meta information.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDict

from megarl.batch.arrays import (
    TensorArray,
    array_to_private_tensor,
    array_to_tensor,
    merge_equal,
    object_array,
    row_index,
    tensor_to_array,
)
from megarl.batch.ragged import Column, RaggedTensor
from megarl.batch.serialization import decode, encode
from megarl.batch.token_rows import PaddedView, token_rows
from megarl.machine.errors import counted
from megarl.machine.files import write_whole


class DataProtoItem(NamedTuple):
    """One row of a batch: tensors without their leading dimension, rows of tokens without padding."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass(eq=False)
class DataProto:
    """A batch of B rows.

    `tensors` returns all tensors by key, with rows of tokens padded to (B, R); `columns` returns them as they
    are stored. Token columns are always stored as rows of tokens: padded ones are converted when the batch is
    created (see token_rows).

    Operations return a new DataProto that may share memory with the old one, except `pop`, `rename`,
    `reorder` and `to`, which change the batch in place (and return the removed columns, or the batch). A
    process receives its own copy of a batch, except for the values of rows of tokens, which are never
    written.

    Attributes:
        batch: Tensors (B, ...).
        ragged: Rows of tokens, without padding.
        non_tensor_batch: Object arrays (B,).
        meta_info: Information about the whole batch.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    ragged: dict[str, RaggedTensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

        # Users may pass padded token columns; the batch stores rows of tokens only.
        columns = self.columns
        if (rows := token_rows(columns)) is not columns:
            self._keep(rows, len(self))

    # ---- construction

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Column] | None = None,
        non_tensors: Mapping[str, np.ndarray | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Build a batch from columns.

        Raises:
            ValueError: Two columns have different leading dimensions, or a key names both a tensor and an
                array; the message names the keys.
        """
        tensors = dict(tensors or {})
        arrays = {key: object_array(rows) for key, rows in (non_tensors or {}).items()}
        num_rows = _check_rows(
            {**_leading_sizes(tensors), **{key: len(rows) for key, rows in arrays.items()}}
        )

        if both := tensors.keys() & arrays.keys():
            raise ValueError(
                f"DataProto: {sorted(both)} are given both as tensors and as arrays; use each key once"
            )

        return cls._of(tensors, arrays, dict(meta_info or {}), num_rows)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None
    ) -> DataProto:
        """Build a batch, sorting the values by type: tensors, and numpy arrays and lists."""
        tensors = {
            key: value for key, value in data.items() if isinstance(value, (torch.Tensor, RaggedTensor))
        }
        others = {key: value for key, value in data.items() if key not in tensors}

        for key, value in others.items():
            if not isinstance(value, (np.ndarray, list)):
                raise ValueError(
                    f"DataProto: {key!r} is a {type(value).__name__}; rows must be a tensor, numpy array or "
                    f"list"
                )

        return cls.from_dict(tensors, others, meta_info)

    def check_consistency(self) -> None:
        """Check that all tensors and arrays have the same number of rows.

        Raises:
            ValueError: Names the key and both lengths.
        """
        for key, rows in self.non_tensor_batch.items():
            if not isinstance(rows, np.ndarray) or rows.dtype != object or rows.ndim != 1:
                raise ValueError(
                    f"DataProto: non_tensor_batch[{key!r}] must be a one-dimensional object array; "
                    f"from_dict converts lists"
                )
        _check_rows(
            {
                **_leading_sizes(self.columns),
                **{key: len(rows) for key, rows in self.non_tensor_batch.items()},
            }
        )

    @property
    def _dense(self) -> dict[str, torch.Tensor]:
        return {} if self.batch is None else cast(dict[str, torch.Tensor], dict(self.batch.items()))

    @property
    def columns(self) -> dict[str, Column]:
        """Tensors and rows of tokens by name, as stored, in a new dict."""
        return {**self._dense, **self.ragged}

    @property
    def tensors(self) -> PaddedView:
        """All tensors by name, with rows of tokens padded: see PaddedView."""
        return PaddedView(self.columns)

    def __len__(self) -> int:
        """Return B, even after all columns were removed; 0 for a batch created with meta information only."""
        if self.batch is not None:
            return self.batch.batch_size[0]
        lengths = [*map(len, self.ragged.values()), *map(len, self.non_tensor_batch.values())]
        return lengths[0] if lengths else 0

    def __repr__(self) -> str:
        tensors = {key: f"{tuple(value.shape)} {value.dtype}" for key, value in self.columns.items()}
        return (
            f"DataProto(rows={len(self)}, tensors={tensors}, arrays={sorted(self.non_tensor_batch)}, "
            f"meta_info={sorted(self.meta_info)})"
        )

    # ---- rows

    def __getitem__(self, index: int | slice | Sequence[int] | np.ndarray | torch.Tensor) -> Any:
        """Select rows.

        An int returns a DataProtoItem; a slice, or a list, array or tensor of ints or of B bools, returns a
        DataProto.
        """
        if isinstance(index, (int, np.integer)):
            row = int(row_index([index], len(self))[0])
            ragged = {
                key: next(value.select(slice(row, row + 1)).each()) for key, value in self.ragged.items()
            }
            tensors = {**{key: value[row] for key, value in self._dense.items()}, **ragged}
            return DataProtoItem(
                tensors, {key: rows[row] for key, rows in self.non_tensor_batch.items()}, self.meta_info
            )

        if isinstance(index, slice):
            # torch does not support negative steps, so use row numbers instead.
            return self._rows(range(*index.indices(len(self))) if (index.step or 1) < 0 else index)
        return self.select_idxs(index)

    def select_idxs(self, index: Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor) -> DataProto:
        """Select rows by number or by a mask of B bools.

        Numbers may repeat, and negative ones count from the end. The data is copied, except for rows of
        tokens.
        """
        return self._rows(row_index(index, len(self)))

    def _rows(self, index: slice | range | np.ndarray) -> DataProto:
        rows = index if isinstance(index, slice) else np.asarray(index, dtype=np.int64)
        places = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        return DataProto(
            None if self.batch is None else self.batch[places],
            {key: array[rows] for key, array in self.non_tensor_batch.items()},
            dict(self.meta_info),
            {key: column.select(places) for key, column in self.ragged.items()},
        )

    def reorder(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """Reorder the rows in place: row i becomes the old row indices[i].

        Raises:
            ValueError: `indices` is not a permutation of the rows.
        """
        order = row_index(indices, len(self))
        if not np.array_equal(np.sort(order), np.arange(len(self))):
            raise ValueError(
                f"reorder: the indices are not a permutation of {counted(len(self), 'row')}; select_idxs "
                "selects any rows"
            )

        ordered = self._rows(order)
        self.batch = ordered.batch
        self.non_tensor_batch = ordered.non_tensor_batch
        self.ragged = ordered.ragged

        return self

    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """Return a batch with B * times rows.

        With `interleave`, each row is repeated `times` times in a row; otherwise the whole batch is repeated.
        """
        rows = np.arange(len(self))
        return self._rows(np.repeat(rows, times) if interleave else np.tile(rows, times))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split the batch into equal parts, in order.

        Raises:
            ValueError: B is not a multiple of `chunks`.
        """
        if chunks < 1 or len(self) % chunks:
            raise ValueError(
                f"chunk: {counted(len(self), 'row')} cannot be split into {chunks} equal parts; pad with "
                f"pad_dataproto_to_divisor(batch, {chunks})"
            )

        size = len(self) // chunks
        return [self[part * size : (part + 1) * size] for part in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Split the batch into parts of `split_size` rows, in order. The last part may be smaller."""
        if split_size < 1:
            raise ValueError(f"split: split_size is {split_size}, it must be at least 1")
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """Concatenate the rows of all parts, in order.

        Raises:
            ValueError: Keys, row shapes, dtypes or meta information differ; the message names the key.
        """
        if not parts:
            raise ValueError("concat: there is nothing to concatenate")
        first = parts[0]
        # Compare each part with the first, so that the error can name the part.
        for number, part in enumerate(parts[1:], start=1):
            _check_same_columns(first, part, number)
        columns = [part.columns for part in parts]
        tensors = {key: _concat([column[key] for column in columns]) for key in columns[0]}
        arrays = {
            key: np.concatenate([part.non_tensor_batch[key] for part in parts])
            for key in first.non_tensor_batch
        }

        return DataProto._of(
            tensors,
            arrays,
            merge_equal([part.meta_info for part in parts], "concat: meta_info"),
            sum(map(len, parts)),
        )

    def make_iterator(
        self, mini_batch_size: int, epochs: int = 1, seed: int | None = None
    ) -> Iterator[DataProto]:
        """Yield mini-batches of equal size over `epochs` passes.

        With a seed, each pass has its own random order, which is reproducible.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(
                f"make_iterator: the batch has {counted(len(self), 'row')}, not a multiple of "
                f"mini_batch_size={mini_batch_size}"
            )
        return self._iterate(
            mini_batch_size, epochs, None if seed is None else torch.Generator().manual_seed(seed)
        )

    def _iterate(
        self, mini_batch_size: int, epochs: int, generator: torch.Generator | None
    ) -> Iterator[DataProto]:
        for _ in range(epochs):
            shuffled = (
                self
                if generator is None
                else self._rows(torch.randperm(len(self), generator=generator).numpy())
            )
            yield from shuffled.split(mini_batch_size)

    # ---- columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Return a batch with the named columns; None selects all of that kind.

        Raises:
            ValueError: A key does not exist.
        """
        chosen = DataProto._of(
            _pick(self.columns, batch_keys, "tensor"),
            _pick(self.non_tensor_batch, non_tensor_batch_keys, "array"),
            _pick(self.meta_info, meta_info_keys, "meta_info"),
            len(self),
        )
        return copy.deepcopy(chosen) if deepcopy else chosen

    def pop(
        self,
        batch_keys: Iterable[str] = (),
        non_tensor_batch_keys: Iterable[str] = (),
        meta_info_keys: Iterable[str] = (),
    ) -> DataProto:
        """Remove the named columns from this batch and return them.

        Raises:
            ValueError: A key does not exist. The batch is unchanged.
        """
        batch_keys = list(batch_keys)
        non_tensor_batch_keys = list(non_tensor_batch_keys)
        meta_info_keys = list(meta_info_keys)
        # select() raises for a missing key before anything is changed.
        popped = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        columns = {key: value for key, value in self.columns.items() if key not in batch_keys}
        # Read the number of rows first, because the columns that determine it may be removed.
        num_rows = len(self)
        for key in non_tensor_batch_keys:
            del self.non_tensor_batch[key]
        self._keep(columns, num_rows)
        for key in meta_info_keys:
            del self.meta_info[key]

        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Rename tensors in place.

        Raises:
            ValueError: A key does not exist, or a new name is in use.
        """
        old_keys = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new_keys = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old_keys) != len(new_keys):
            raise ValueError(f"rename: {len(old_keys)} old names and {len(new_keys)} new ones")
        columns = self.columns
        moved = _pick(columns, old_keys, "tensor")
        kept = {key: value for key, value in columns.items() if key not in moved}

        for old, new in zip(old_keys, new_keys, strict=True):
            if new in kept or new in self.non_tensor_batch:
                raise ValueError(f"rename: {old!r} cannot become {new!r}, which exists")
            kept[new] = moved[old]

        self._keep(kept, len(self))
        return self

    def _keep(self, columns: Mapping[str, Column], num_rows: int) -> None:
        kept = self._of(columns, self.non_tensor_batch, self.meta_info, num_rows)
        self.batch = kept.batch
        self.ragged = kept.ragged

    def take_in(self, other: DataProto) -> None:
        """Add the columns of `other`, which has the same rows, in place. Raises the errors of `union`."""
        joined = self.union(other)
        self.batch = joined.batch
        self.ragged = joined.ragged
        self.non_tensor_batch = joined.non_tensor_batch
        self.meta_info = joined.meta_info

    def union(self, *others: DataProto | DataProtoFuture) -> DataProto:
        """Return a new batch with the columns of all batches. All futures are awaited together.

        Raises:
            ValueError: A key has two different values, or the numbers of rows differ.
        """
        batches = [self, *_arrived(others)]
        # A batch with meta information only has no rows to compare.
        with_rows = [
            batch for batch in batches if batch.batch is not None or batch.ragged or batch.non_tensor_batch
        ]

        if len({len(batch) for batch in with_rows}) > 1:
            raise ValueError(
                f"union: the batches have {[len(batch) for batch in with_rows]} rows; they must have the "
                f"same number"
            )

        joined = DataProto.from_dict(
            merge_equal([batch.columns for batch in batches], "union: tensor"),
            merge_equal([batch.non_tensor_batch for batch in batches], "union: array"),
            merge_equal([batch.meta_info for batch in batches], "union: meta_info"),
        )
        return joined._with_rows(len(with_rows[0]) if with_rows else 0)

    def to(self, device: torch.device | str) -> DataProto:
        """Move the tensors, in place."""
        self.batch = None if self.batch is None else self.batch.to(device)
        self.ragged = {key: column.to(device) for key, column in self.ragged.items()}
        return self

    # ---- between processes and machines

    def to_bytes(self) -> bytes:
        """Serialize to safetensors and JSON with a checksum.

        Raises:
            SerializationError: A value cannot be stored; the message names it.
        """
        arrays = {key: rows.tolist() for key, rows in self.non_tensor_batch.items()}
        return encode(self.columns, arrays, self.meta_info, len(self))

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "bytes") -> DataProto:
        """Deserialize a batch. No code in the bytes is executed.

        Raises:
            SerializationError: The bytes are not a complete batch.
        """
        columns, arrays, meta_info, num_rows = decode(data, source)
        return cls.from_dict(columns, arrays, meta_info)._with_rows(num_rows)

    def save_to_disk(self, path: str | os.PathLike[str]) -> None:
        """Write to a temporary file and rename it, so that a reader finds a complete file or none."""
        write_whole(Path(path), self.to_bytes())

    @classmethod
    def load_from_disk(cls, path: str | os.PathLike[str]) -> DataProto:
        """Load a batch.

        Raises:
            SerializationError: The file is corrupt; the message names it.
        """
        return cls.from_bytes(Path(path).read_bytes(), str(path))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tensors as numpy arrays, which pickle protocol 5, and so Ray, transfers without a copy.

        They arrive on the host. Rows of tokens include only the values that they use, shared values once.
        """
        tensors = {key: tensor_to_array(value) for key, value in self._dense.items()}
        packed = {key: column.packed() for key, column in self.ragged.items()}
        # The values are transferred as an array; an empty placeholder replaces them in the column.
        ragged = {
            key: (tensor_to_array(column.values), replace(column, values=torch.empty(0)))
            for key, column in packed.items()
        }

        return _rebuild, (tensors, ragged, len(self), self.non_tensor_batch, self.meta_info)

    def _with_rows(self, num_rows: int) -> DataProto:
        """Set the number of rows of a batch without columns."""
        return (
            self if self.columns or self.non_tensor_batch else DataProto._of({}, {}, self.meta_info, num_rows)
        )

    @classmethod
    def _of(
        cls,
        columns: Mapping[str, Column],
        arrays: dict[str, np.ndarray],
        meta_info: dict[str, Any],
        num_rows: int,
    ) -> DataProto:
        """Build a batch from all columns.

        Without any column, an empty TensorDict stores the number of rows.
        """
        tensors = {key: value for key, value in columns.items() if isinstance(value, torch.Tensor)}
        ragged = {key: value for key, value in columns.items() if isinstance(value, RaggedTensor)}
        is_needed = tensors or (num_rows and not arrays and not ragged)

        return cls(
            TensorDict(tensors, batch_size=[num_rows]) if is_needed else None, arrays, meta_info, ragged
        )


def _concat(columns: Sequence[Column]) -> Column:
    """Concatenate columns of one kind, see _check_same_columns."""
    ragged = [column for column in columns if isinstance(column, RaggedTensor)]
    return (
        RaggedTensor.concat(ragged)
        if ragged
        else torch.cat([column for column in columns if isinstance(column, torch.Tensor)])
    )


def _arrived(others: Sequence[DataProto | DataProtoFuture]) -> list[DataProto]:
    """Wait for all futures. Futures of the same class are awaited together."""
    batches = {place: other for place, other in enumerate(others) if isinstance(other, DataProto)}
    futures = {place: other for place, other in enumerate(others) if isinstance(other, DataProtoFuture)}

    # Only the class of a future can wait for several futures at once.
    for kind in {type(future) for future in futures.values()}:
        places = [place for place, future in futures.items() if type(future) is kind]
        batches |= dict(zip(places, kind.gather([futures[place] for place in places]), strict=True))

    return [batches[place] for place in range(len(others))]


def _rebuild(
    arrays: dict[str, TensorArray],
    ragged: dict[str, tuple[TensorArray, RaggedTensor]],
    num_rows: int,
    non_tensor_batch: dict[str, np.ndarray],
    meta_info: dict[str, Any],
) -> DataProto:
    # Tensors may be written, so they get their own memory. Rows of tokens are never written.
    columns: dict[str, Column] = {key: array_to_private_tensor(packed) for key, packed in arrays.items()}
    columns |= {
        key: replace(column, values=array_to_tensor(packed)) for key, (packed, column) in ragged.items()
    }
    return DataProto._of(columns, non_tensor_batch, meta_info, num_rows)


def _leading_sizes(columns: Mapping[str, Column]) -> dict[str, int]:
    for key, column in columns.items():
        if isinstance(column, torch.Tensor) and column.ndim == 0:
            raise ValueError(
                f"DataProto: tensor {key!r} is a scalar and has no rows; put information about the whole "
                f"batch into meta_info"
            )
    return {key: len(column) for key, column in columns.items()}


def _check_rows(lengths: dict[str, int]) -> int:
    """Return the number of rows that all keys share."""
    first = next(iter(lengths), None)
    for key, length in lengths.items():
        assert first is not None
        if length != lengths[first]:
            raise ValueError(
                f"DataProto: {key!r} has {counted(length, 'row')} but {first!r} has {lengths[first]}; all "
                "leading dimensions must be equal"
            )

    return 0 if first is None else lengths[first]


def _pick(mapping: Mapping[str, Any], keys: Iterable[str] | None, kind: str) -> dict[str, Any]:
    if keys is None:
        return dict(mapping)
    keys = list(keys)
    if missing := [key for key in keys if key not in mapping]:
        raise ValueError(f"DataProto has no {kind} {missing}; it has {sorted(mapping)}")
    return {key: mapping[key] for key in keys}


def _check_same_columns(first: DataProto, part: DataProto, number: int) -> None:
    expected = first.columns
    found = part.columns

    if odd := (expected.keys() ^ found.keys()) | (
        first.non_tensor_batch.keys() ^ part.non_tensor_batch.keys()
    ):
        raise ValueError(f"concat: part 0 and part {number} do not both have {sorted(odd)}")

    for key, column in expected.items():
        if _kind(column) != _kind(found[key]):
            raise ValueError(
                f"concat: {key!r} has {_kind(column)} in part 0 and {_kind(found[key])} in part {number}; "
                f"convert them to the same shape first"
            )


def _kind(column: Column) -> str:
    if isinstance(column, torch.Tensor):
        return f"rows of {tuple(column.shape[1:])} {column.dtype}"
    return (
        f"rows of tokens {column.dtype}, padded with {column.padding} to the "
        f"{'left' if column.on_left else 'right'}"
    )


class DataProtoFuture(ABC):
    """A batch that a worker group is still computing. `DataProto.union` accepts it as a batch.

    Subclasses can wait for several futures at once, so that a failure in any of them is noticed immediately,
    and not only after the earlier ones have finished.
    """

    @abstractmethod
    def get(self, timeout: float | None = None) -> Any:
        """Wait for the batch.

        Args:
            timeout: In seconds. None: no limit.

        Raises:
            TimeoutError: The batch did not arrive in time.
            Exception: The exception of the call.
        """

    @classmethod
    @abstractmethod
    def gather(cls, futures: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Return the results in the order of `futures`, or raise the first failure of any of them."""
