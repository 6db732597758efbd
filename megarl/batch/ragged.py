"""Rows of tokens without padding: one buffer of values, and for each row where it begins in it and how long
it is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megarl.batch.arrays import same
from megarl.batch.memory import new_values

# of a block: what is in between of several operations on it stays in a core's cache
_CACHED_ELEMENTS = 1 << 17


@dataclass(frozen=True, eq=False)
class RaggedTensor:
    """B rows of so many values each. Picking, repeating and reordering rows gives another view of the same
    values; rows may share them.

    In place of a tensor (B, R) it has its `shape`, where R is the longest row, its `dtype`, and blocks of its
    rows by `x[rows]`. Values that came from another process are memory that others read too: only a column
    made by `empty` may be written, by `x[rows] = block`.
    """

    values: Tensor  # (N,)
    starts: Tensor  # (B,) int64, on the host: the row's first value
    lengths: Tensor  # (B,) int64, on the host
    padding: int = 0  # what padded views have beside a row's values
    on_left: bool = False  # where they have it

    # ---- construction

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[Sequence[int] | np.ndarray],
        dtype: torch.dtype,
        padding: int = 0,
        on_left: bool = False,
    ) -> RaggedTensor:
        """From the values of each row."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        values = new_values(int(lengths.sum()), dtype, lengths.device)
        # Write straight into the buffer; the empty array stands in where there are no rows.
        np.concatenate(
            [np.empty(0, np.bool_), *(np.asarray(row) for row in rows)], out=values.numpy(), casting="unsafe"
        )

        return cls.packed_rows(values, lengths, padding, on_left)

    @classmethod
    def of_slots(cls, x: Tensor) -> RaggedTensor:
        """From x (B, R), rows of R values each, which share memory with x."""
        return cls.packed_rows(x.reshape(-1), torch.full((x.shape[0],), x.shape[1]))

    @classmethod
    def from_padded(cls, x: Tensor, lengths: Tensor, padding: int = 0, on_left: bool = False) -> RaggedTensor:
        """From x (B, R), the first `lengths` (B,) values of each row, or the last. Raises ValueError where a
        row has not so many."""
        lengths = lengths.to("cpu", torch.int64)
        if x.ndim != 2 or len(x) != len(lengths) or (len(x) and int(lengths.max()) > x.shape[1]):
            longest = int(lengths.max()) if len(lengths) else 0
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} does not hold {len(lengths)} rows of up to {longest} "
                f"tokens"
            )

        # A mask picks the values row by row, so they are packed already.
        column = torch.arange(x.shape[1], device=x.device)
        ends = lengths.to(x.device)[:, None]
        mask = column >= x.shape[1] - ends if on_left else column < ends

        return cls.packed_rows(x[mask], lengths, padding, on_left)

    @classmethod
    def constant(cls, value: float, lengths: Tensor, dtype: torch.dtype) -> RaggedTensor:
        """The same value everywhere: all rows share the values of the longest."""
        longest = int(lengths.max()) if len(lengths) else 0
        return cls(torch.full((longest,), value, dtype=dtype), torch.zeros_like(lengths), lengths)

    @classmethod
    def empty(cls, like: RaggedTensor, dtype: torch.dtype) -> RaggedTensor:
        """Rows of the same lengths, to be written."""
        return cls.packed_rows(new_values(like.num_tokens, dtype, like.device), like.lengths)

    @classmethod
    def packed_rows(
        cls, values: Tensor, lengths: Tensor, padding: int = 0, on_left: bool = False
    ) -> RaggedTensor:
        """From the values (N,) of all rows, one behind the other, and the rows' lengths (B,) int64."""
        return cls(values, lengths.cumsum(0) - lengths, lengths, padding, on_left)

    # ---- what it is

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(B, R), as it would be padded."""
        return len(self), int(self.lengths.max()) if len(self) else 0

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def is_packed(self) -> bool:
        """Whether the values of all rows stand one behind the other, in the order of rows."""
        return bool((self.starts[1:] == (self.starts + self.lengths)[:-1]).all())

    def __eq__(self, other: object) -> bool:
        """Equal in rows, dtype and how it is padded; NaN equals NaN."""
        if not isinstance(other, RaggedTensor):
            return False
        alike = (self.padding, self.on_left, self.dtype) == (other.padding, other.on_left, other.dtype)
        return alike and torch.equal(self.lengths, other.lengths) and same(self.flat(), other.flat())

    def __repr__(self) -> str:
        return f"{self.num_tokens} {self.dtype} in {len(self)} rows of up to {self.shape[1]}"

    # ---- its rows

    def each(self) -> Iterator[Tensor]:
        """The values of one row after the other, which share memory with it."""
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            yield self.values[start : start + length]

    def select(self, rows: slice | Tensor) -> RaggedTensor:
        """Those rows, which share memory with it."""
        return RaggedTensor(self.values, self.starts[rows], self.lengths[rows], self.padding, self.on_left)

    def flat(self) -> Tensor:
        """(num_tokens,): the values of all rows in their order; a copy unless they stand so."""
        if self.is_packed:
            first = int(self.starts[0]) if len(self) else 0
            return self.values[first : first + self.num_tokens]
        return _joined(list(self.each()))

    def packed(self) -> RaggedTensor:
        """The same rows over the values that they need and no others; what rows share they go on sharing."""
        # Visit the rows in the order in which their values lie.
        starts = self.starts.numpy()
        order = np.argsort(starts, kind="stable")
        begins = starts[order]
        ends = np.maximum.accumulate(begins + self.lengths.numpy()[order])
        # Rows that overlap or touch form a run, which is copied as a whole so that they keep sharing.
        is_first = np.ones(len(begins), dtype=bool)  # of the rows that lie within each other or side by side
        is_first[1:] = begins[1:] > ends[:-1]
        run_begins = begins[is_first]
        run_ends = ends[np.append(np.flatnonzero(is_first)[1:] - 1, len(ends) - 1)] if len(ends) else ends
        runs = [
            self.values[begin:end] for begin, end in zip(run_begins.tolist(), run_ends.tolist(), strict=True)
        ]
        # Each run moves left by the gaps before it, and its rows move along.
        shifts = run_begins - (np.cumsum(run_ends - run_begins) - (run_ends - run_begins))
        moved = np.empty_like(starts)
        moved[order] = begins - shifts[np.cumsum(is_first) - 1]
        values = runs[0] if len(runs) == 1 else _joined(runs) if runs else self.values[:0]

        return replace(self, values=values, starts=torch.from_numpy(moved))

    @staticmethod
    def gather(parts: Sequence[RaggedTensor], order: Sequence[int]) -> RaggedTensor:
        """Of the rows of all parts, counted through, those of `order`, packed: their values are copied
        once."""
        rows = [row for part in parts for row in part.each()]
        values = _joined([rows[place] for place in order])
        lengths = torch.cat([part.lengths for part in parts])[torch.tensor(order)]
        return RaggedTensor.packed_rows(values, lengths, parts[0].padding, parts[0].on_left)

    @staticmethod
    def concat(parts: Sequence[RaggedTensor]) -> RaggedTensor:
        """The rows of all parts in order, of columns that are padded alike."""
        # Pack first, or values that no row needs would be copied too.
        packed = [part.packed() for part in parts]
        offsets = np.cumsum([0, *(len(part.values) for part in packed)]).tolist()
        return replace(
            packed[0],
            values=_joined([part.values for part in packed]),
            starts=torch.cat([part.starts + offset for part, offset in zip(packed, offsets, strict=False)]),
            lengths=torch.cat([part.lengths for part in packed]),
        )

    def to(self, device: torch.device | str) -> RaggedTensor:
        return replace(self, values=self.values.to(device))

    # ---- blocks

    def blocks(self) -> Iterator[slice]:
        """All rows in order, so many at a time that a chain of operations on their tokens runs at the speed
        of the cache."""
        ends = self.lengths.cumsum(0).tolist()
        start = 0

        while start < len(self):
            # Take the rows that fit the cache, and at least one, however long.
            room = (ends[start - 1] if start else 0) + _CACHED_ELEMENTS
            stop = max(start + 1, bisect_right(ends, room, lo=start))
            yield slice(start, stop)
            start = stop

    def blocks_of_like_length(self) -> Iterator[Tensor]:
        """Numbers (b,) of all rows, in blocks that fit the cache as padded tensors do: rows of about one
        length, so that little of it is padding."""
        order = torch.argsort(self.lengths, stable=True)
        lengths = self.lengths[order].tolist()
        start = 0

        while start < len(order):
            stop = start + 1
            # In ascending order, the next row is the longest and sets the padded width of the block.
            while stop < len(order) and lengths[stop] * (stop + 1 - start) <= _CACHED_ELEMENTS:
                stop += 1
            yield order[start:stop]
            start = stop

    @property
    def num_rows_of_block(self) -> int:
        """So many rows fit the cache, padded to the longest of all."""
        return max(1, _CACHED_ELEMENTS // max(self.shape[1], 1))

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """(b, r): a copy of those rows, padded to the longest of them."""
        return self.select(rows).padded()

    def __setitem__(self, rows: slice | Tensor, block: Tensor) -> None:
        """Writes them from such a block."""
        for target, source in zip(self.select(rows).each(), block, strict=True):
            target.copy_(source[: len(target)])

    def padded(self, width: int | None = None) -> Tensor:
        """(B, R): a copy, padded to the longest row or to `width`."""
        # pad_sequence refuses an empty list, so a batch without rows starts from this block.
        block = self.values.new_full((0, 0), self.padding)
        if len(self):
            side = "left" if self.on_left else "right"
            block = pad_sequence(
                list(self.each()), batch_first=True, padding_value=self.padding, padding_side=side
            )

        missing = 0 if width is None else width - block.shape[1]
        if missing == 0:
            return block
        return torch.nn.functional.pad(
            block, (missing, 0) if self.on_left else (0, missing), value=self.padding
        )


Column = Tensor | RaggedTensor  # (B, ...)


def _joined(parts: list[Tensor]) -> Tensor:
    """One behind the other, copied. parts: (n,) each, of one dtype, at least one."""
    joined = new_values(sum(part.numel() for part in parts), parts[0].dtype, parts[0].device)
    return torch.cat(parts, out=joined)


def padded(column: Column) -> Tensor:
    """(B, R)."""
    return column.padded() if isinstance(column, RaggedTensor) else column
