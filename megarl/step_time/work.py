"""Forward and backward passes of the parts that layers consist of: linear layers and blocks of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megarl.config.schema import ParallelConfig
from megarl.step_time.collectives import call
from megarl.step_time.counts import NOTHING, Counts, product, total


class PassCounts(NamedTuple):
    """The work of a part of a model.

    Attributes:
        backward: In a backward pass, without recomputation.
    """

    forward: Counts = NOTHING
    backward: Counts = NOTHING


IDLE = PassCounts()


def joined(parts: Iterable[PassCounts]) -> PassCounts:
    """Return the sum of the parts."""
    parts = list(parts)
    return PassCounts(total(part.forward for part in parts), total(part.backward for part in parts))


def linear(rows: float, inner: int, columns: int, *, trains: bool = True, times: float = 1) -> PassCounts:
    """Return the work of a linear layer. The backward pass of a frozen one has no weight gradient."""
    gradient = product(rows, columns, inner, times)
    if trains:
        gradient = total((gradient, product(columns, rows, inner, times)))
    return PassCounts(product(rows, inner, columns, times), gradient)


class Edge(NamedTuple):
    """The hidden states that a tensor-parallel block receives or returns.

    Attributes:
        tokens: The tokens of all tensor-parallel ranks.
        width: The elements of a hidden state.
    """

    parallel: ParallelConfig
    tokens: int
    width: int
    dtype: str

    @property
    def own_tokens(self) -> int:
        """The tokens of this rank between tensor-parallel blocks."""
        return self.tokens // (self.parallel.tensor_parallel_size if self.parallel.sequence_parallel else 1)

    def call(self, kind: str) -> Counts:
        return call(self.parallel, kind, "tensor", self.tokens * self.width, self.dtype)

    def entered(self, *, trains: bool = True) -> PassCounts:
        """Return the calls before a column-parallel layer.

        With sequence parallelism, its input is gathered, and gathered again for the gradient of its weights.
        """
        if not self.parallel.sequence_parallel:
            return PassCounts(NOTHING, self.call("all_reduce"))
        again = self.call("all_gather") if trains else NOTHING
        return PassCounts(self.call("all_gather"), total((again, self.call("reduce_scatter"))))

    def left(self) -> PassCounts:
        """Return the calls after a row-parallel layer."""
        if not self.parallel.sequence_parallel:
            return PassCounts(self.call("all_reduce"))
        return PassCounts(self.call("reduce_scatter"), self.call("all_gather"))
