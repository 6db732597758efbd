"""The types of what a rank does: matrix products, attention and collectives, as a dry run counts them."""

from __future__ import annotations

from collections.abc import Iterable
from math import fsum
from typing import NamedTuple

_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8}


class Product(NamedTuple):
    """Matrix products of one shape on a rank, (rows, inner) @ (inner, columns).

    Attributes:
        rows: The rows of the result. The number is an average where shares of tokens are uneven.
        inner: The size of the dimension that is summed over.
        times: The number of such products.
    """

    rows: float
    inner: float
    columns: float
    times: float = 1

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.inner * self.columns * self.times


class CollectiveCount(NamedTuple):
    """Calls of one kind over one axis.

    Attributes:
        kind: The kind, such as all_reduce. A point-to-point message is `send` or `recv`.
        axis: The axis of the layout, a key of `AXES` in collectives.py.
        num_ranks: The number of ranks that take part.
        stride: The distance between the numbers of neighboring ranks.
        nbytes: The sum over the calls of the larger of a rank's input and output, in bytes.
    """

    kind: str
    axis: str
    num_ranks: int
    stride: int
    dtype: str
    calls: float
    nbytes: float


class Counts(NamedTuple):
    """The work of a rank.

    Attributes:
        attention_flops: The operations of attention over all pairs of a query and a key, as a dry run counts
            them: without regard to causal masks and windows.
        masked_attention_flops: The part of them that the masks leave, which is what kernels compute, except
            that they work in blocks.
    """

    products: tuple[Product, ...] = ()
    attention_flops: float = 0
    masked_attention_flops: float = 0
    collectives: tuple[CollectiveCount, ...] = ()

    @property
    def flops(self) -> float:
        """The operations of products and attention, as a dry run counts them."""
        return fsum(product.flops for product in self.products) + self.attention_flops

    def times(self, number: float) -> Counts:
        """Return the counts of a number of repetitions."""
        if number == 1:
            return self
        return Counts(
            tuple(each._replace(times=each.times * number) for each in self.products),
            self.attention_flops * number,
            self.masked_attention_flops * number,
            tuple(
                each._replace(calls=each.calls * number, nbytes=each.nbytes * number)
                for each in self.collectives
            ),
        )


NOTHING = Counts()


def product(rows: float, inner: float, columns: float, times: float = 1) -> Counts:
    """Return the counts of matrix products of one shape."""
    return Counts((Product(rows, inner, columns, times),))


def total(parts: Iterable[Counts]) -> Counts:
    """Return the sum. Products of one shape are joined, and so are calls of one kind over one axis."""
    times: dict[tuple[float, float, float], float] = {}
    calls: dict[tuple[str, str, int, int, str], tuple[float, float]] = {}
    attention = 0.0
    masked = 0.0

    for part in parts:
        for rows, inner, columns, repeated in part.products:
            shape = (rows, inner, columns)
            times[shape] = times.get(shape, 0) + repeated
        for each in part.collectives:
            call = (each.kind, each.axis, each.num_ranks, each.stride, each.dtype)
            number, nbytes = calls.get(call, (0, 0))
            calls[call] = number + each.calls, nbytes + each.nbytes
        attention += part.attention_flops
        masked += part.masked_attention_flops

    return Counts(
        tuple(Product(*shape, number) for shape, number in times.items()),
        attention,
        masked,
        tuple(CollectiveCount(*call, *numbers) for call, numbers in calls.items()),
    )


def dtype_bytes(dtype: str) -> int:
    return _DTYPE_BYTES[dtype]
