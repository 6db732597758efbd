"""Ragged tensors: rows of tokens without padding.

They are stored as one buffer of values with the start and length of each row. Memory of large buffers is kept
for the next ones.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megarl.batch.arrays import same
from megarl.machine.errors import counted

# Elements per block, so that the intermediate results of operations on a block stay in a core's cache.
_CACHED_ELEMENTS = 1 << 17
_LARGE_BYTES = 1 << 22  # numpy requests huge pages, and memory is kept, from this size on
_MOST_SPARE = 1.25  # a piece may be at most this many times larger than the request


@dataclass(frozen=True, eq=False)
class RaggedTensor:
    """A ragged tensor with B rows.

    Selecting, repeating and reordering rows returns another view of the same values, so rows may share
    values.

    Like a tensor (B, R), it has a `shape`, where R is the length of the longest row, a `dtype`, and
    `x[rows]`, which returns a padded block of rows. Values received from another process are shared with
    other readers: only a column created by `empty` may be written, by `x[rows] = block`.
    """

    values: Tensor  # (N,)
    starts: Tensor  # (B,) int64, on the host: index of the row's first value
    lengths: Tensor  # (B,) int64, on the host
    padding: int = 0  # padding value of padded views
    on_left: bool = False  # whether padded views are padded on the left

    # ---- construction

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[Sequence[int] | np.ndarray],
        dtype: torch.dtype,
        padding: int = 0,
        on_left: bool = False,
    ) -> RaggedTensor:
        """Build from the values of each row."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        values = new_values(int(lengths.sum()), dtype, lengths.device)
        # Write directly into the buffer. The empty array covers the case without rows.
        np.concatenate(
            [np.empty(0, np.bool_), *(np.asarray(row) for row in rows)], out=values.numpy(), casting="unsafe"
        )

        return cls.packed_rows(values, lengths, padding, on_left)

    @classmethod
    def of_slots(cls, x: Tensor) -> RaggedTensor:
        """View x (B, R) as rows of R values each, which share its memory."""
        return cls.packed_rows(x.reshape(-1), torch.full((x.shape[0],), x.shape[1]))

    @classmethod
    def from_padded(cls, x: Tensor, lengths: Tensor, padding: int = 0, on_left: bool = False) -> RaggedTensor:
        """Build from the first `lengths` (B,) values of each row of x (B, R), or from the last ones.

        Raises:
            ValueError: A row has fewer values.
        """
        lengths = lengths.to("cpu", torch.int64)
        if x.ndim != 2 or len(x) != len(lengths) or (len(x) and int(lengths.max()) > x.shape[1]):
            longest = int(lengths.max()) if len(lengths) else 0
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} does not contain {counted(len(lengths), 'row')} of up "
                f"to {counted(longest, 'token')}"
            )

        # A mask selects the values row by row, so the result is packed.
        column = torch.arange(x.shape[1], device=x.device)
        ends = lengths.to(x.device)[:, None]
        mask = column >= x.shape[1] - ends if on_left else column < ends

        return cls.packed_rows(x[mask], lengths, padding, on_left)

    @classmethod
    def constant(cls, value: float, lengths: Tensor, dtype: torch.dtype) -> RaggedTensor:
        """Build rows with the same value everywhere. All rows share the values of the longest one."""
        longest = int(lengths.max()) if len(lengths) else 0
        return cls(torch.full((longest,), value, dtype=dtype), torch.zeros_like(lengths), lengths)

    @classmethod
    def empty(cls, like: RaggedTensor, dtype: torch.dtype) -> RaggedTensor:
        """Build uninitialized rows of the same lengths."""
        return cls.packed_rows(new_values(like.num_tokens, dtype, like.device), like.lengths)

    @classmethod
    def packed_rows(
        cls, values: Tensor, lengths: Tensor, padding: int = 0, on_left: bool = False
    ) -> RaggedTensor:
        """Build from the concatenated values (N,) of all rows and the rows' lengths (B,) int64."""
        return cls(values, lengths.cumsum(0) - lengths, lengths, padding, on_left)

    # ---- properties

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """The shape after padding, (B, R)."""
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
        """Whether the values of all rows are adjacent and in row order."""
        return bool((self.starts[1:] == (self.starts + self.lengths)[:-1]).all())

    def __eq__(self, other: object) -> bool:
        """Compare rows, dtype and padding; NaN equals NaN."""
        if not isinstance(other, RaggedTensor):
            return False
        is_same = (self.padding, self.on_left, self.dtype) == (other.padding, other.on_left, other.dtype)
        return is_same and torch.equal(self.lengths, other.lengths) and same(self.flat(), other.flat())

    def __repr__(self) -> str:
        return f"{self.num_tokens} {self.dtype} in {counted(len(self), 'row')} of up to {self.shape[1]}"

    # ---- rows

    def each(self) -> Iterator[Tensor]:
        """Yield the values of each row, as views."""
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            yield self.values[start : start + length]

    def select(self, rows: slice | Tensor) -> RaggedTensor:
        """Return the selected rows, as views of the same values."""
        return RaggedTensor(self.values, self.starts[rows], self.lengths[rows], self.padding, self.on_left)

    def ends(self, num_values: int) -> RaggedTensor:
        """Return the last values of each row, at most `num_values`, as views of the same values."""
        lengths = self.lengths.clamp(max=num_values)
        return replace(self, starts=self.starts + self.lengths - lengths, lengths=lengths)

    def flat(self) -> Tensor:
        """Return the values of all rows in order, (num_tokens,).

        This is a view if the rows are packed, else a copy.
        """
        if self.is_packed:
            first = int(self.starts[0]) if len(self) else 0
            return self.values[first : first + self.num_tokens]
        return _joined(list(self.each()))

    def packed(self) -> RaggedTensor:
        """Return the same rows over only the values that they use. Values shared by rows remain shared."""
        # Visit the rows in the order of their values.
        starts = self.starts.numpy()
        order = np.argsort(starts, kind="stable")
        begins = starts[order]
        ends = np.maximum.accumulate(begins + self.lengths.numpy()[order])
        # Rows that overlap or touch form a run, which is copied as a whole, so that shared values stay
        # shared.
        is_first = np.ones(len(begins), dtype=bool)  # whether a row is the first of its run
        is_first[1:] = begins[1:] > ends[:-1]
        run_begins = begins[is_first]
        run_ends = ends[np.append(np.flatnonzero(is_first)[1:] - 1, len(ends) - 1)] if len(ends) else ends
        runs = [
            self.values[begin:end] for begin, end in zip(run_begins.tolist(), run_ends.tolist(), strict=True)
        ]
        # Each run moves left by the gaps before it, together with its rows.
        shifts = run_begins - (np.cumsum(run_ends - run_begins) - (run_ends - run_begins))
        moved = np.empty_like(starts)
        moved[order] = begins - shifts[np.cumsum(is_first) - 1]
        values = runs[0] if len(runs) == 1 else _joined(runs) if runs else self.values[:0]

        return replace(self, values=values, starts=torch.from_numpy(moved))

    @staticmethod
    def gather(parts: Sequence[RaggedTensor], order: Sequence[int]) -> RaggedTensor:
        """Return the rows `order` of the concatenation of all parts, packed. Their values are copied once."""
        rows = [row for part in parts for row in part.each()]
        values = _joined([rows[place] for place in order])
        lengths = torch.cat([part.lengths for part in parts])[torch.tensor(order)]
        return RaggedTensor.packed_rows(values, lengths, parts[0].padding, parts[0].on_left)

    @staticmethod
    def concat(parts: Sequence[RaggedTensor]) -> RaggedTensor:
        """Concatenate the rows of all parts, which must have the same padding."""
        # Pack first, so that unused values are not copied.
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
        """Yield all rows in order, in blocks.

        Blocks are small enough that a chain of operations on their tokens runs from the cache.
        """
        ends = self.lengths.cumsum(0).tolist()
        start = 0

        while start < len(self):
            # Take the rows that fit into the cache, and at least one, however long.
            room = (ends[start - 1] if start else 0) + _CACHED_ELEMENTS
            stop = max(start + 1, bisect_right(ends, room, lo=start))
            yield slice(start, stop)
            start = stop

    def blocks_of_like_length(self) -> Iterator[Tensor]:
        """Yield the numbers (b,) of all rows, in blocks of rows of similar length.

        The padded tensors of a block fit into the cache, and contain little padding.
        """
        order = torch.argsort(self.lengths, stable=True)
        lengths = self.lengths[order].tolist()
        start = 0

        while start < len(order):
            stop = start + 1
            # Lengths are ascending, so the next row determines the padded width of the block.
            while stop < len(order) and lengths[stop] * (stop + 1 - start) <= _CACHED_ELEMENTS:
                stop += 1
            yield order[start:stop]
            start = stop

    @property
    def num_rows_of_block(self) -> int:
        """The number of rows that fit into the cache when padded to the longest row."""
        return max(1, _CACHED_ELEMENTS // max(self.shape[1], 1))

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Return a copy of the selected rows, padded to the longest of them, (b, r)."""
        return self.select(rows).padded()

    def __setitem__(self, rows: slice | Tensor, block: Tensor) -> None:
        """Write the selected rows from a padded block."""
        for target, source in zip(self.select(rows).each(), block, strict=True):
            target.copy_(source[: len(target)])

    def padded(self, width: int | None = None) -> Tensor:
        """Return a copy padded to the longest row or to `width`, (B, R)."""
        # pad_sequence does not accept an empty list, so a batch without rows starts from this block.
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
    """Concatenate a copy of the parts: (n,) each, of the same dtype, at least one."""
    joined = new_values(sum(part.numel() for part in parts), parts[0].dtype, parts[0].device)
    return torch.cat(parts, out=joined)


def padded(column: Column) -> Tensor:
    """Return the column as a padded tensor, (B, R)."""
    return column.padded() if isinstance(column, RaggedTensor) else column


# ---- memory of large buffers


class KeptMemory:
    """A cache of large memory blocks of this process.

    Released blocks are kept for later requests, because the page faults of the first write to new memory take
    longer than the write itself.

    Lent and kept memory together never exceed the most that was lent at one time.
    """

    def __init__(self) -> None:
        # Appended by any thread at any time, without a lock.
        self._given_back: deque[np.ndarray] = deque()
        self._kept: list[np.ndarray] = []  # most recently returned blocks last
        self._num_lent = self._most_lent = 0  # bytes
        self._lock = threading.Lock()

    @property
    def num_kept(self) -> int:
        """The size of the kept memory in bytes."""
        with self._lock:
            self._take_back()
            return sum(map(len, self._kept))

    def lend(self, size: int) -> np.ndarray:
        """Return an uninitialized array, (size,) uint8.

        Its memory is returned when the array and all tensors over it are gone. Other arrays over it do not
        count.
        """
        with self._lock:
            self._take_back()
            whole = self._fitting(size)
            self._num_lent += len(whole)
            self._most_lent = max(self._most_lent, self._num_lent)
            # Drop the oldest blocks, so that lent and kept memory stay within the most that was ever lent.
            while self._kept and self._num_lent + sum(map(len, self._kept)) > self._most_lent:
                del self._kept[0]

        lent = whole[:size]
        # The finalizer may run in any thread at any time, so it only appends and takes no lock.
        weakref.finalize(lent, self._given_back.append, whole).atexit = False
        return lent

    def _take_back(self) -> None:
        while self._given_back:
            whole = self._given_back.popleft()
            self._num_lent -= len(whole)
            self._kept.append(whole)

    def _fitting(self, size: int) -> np.ndarray:
        # A much larger block would waste memory.
        fits = [place for place, whole in enumerate(self._kept) if size <= len(whole) <= _MOST_SPARE * size]
        if fits:
            return self._kept.pop(min(fits, key=lambda place: len(self._kept[place])))
        # Round up, because the next step's columns may be a little longer. Untouched pages take no memory.
        step = 1 << max(0, size.bit_length() - 4)
        return np.empty(-(-size // step) * step, np.uint8)


_memory = KeptMemory()


def new_values(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor, (count,).

    Large tensors on the host use KeptMemory, which is allocated by numpy, because numpy requests huge pages
    and torch does not.
    """
    if device.type != "cpu" or count * dtype.itemsize < _LARGE_BYTES:
        return torch.empty(count, dtype=dtype, device=device)
    return torch.from_numpy(_memory.lend(count * dtype.itemsize)).view(dtype)
