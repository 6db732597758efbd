"""The work of a rank: matrix products, attention, and calls between ranks, as a dry run counts them. Pure.

Linear layers and the blocks that consist of them have forward and backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import fsum
from typing import NamedTuple

from megarl.config.schema import DType, ParallelConfig, RunConfig

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
        axis: The axis of the layout, a key of `AXES`.
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


def dtype_of(config: RunConfig) -> str:
    """Return the dtype of weights and activations; `auto` counts as a GPU's."""
    return "float32" if config.model.dtype is DType.float32 else "bfloat16"


def dtype_bytes(dtype: str) -> int:
    return _DTYPE_BYTES[dtype]


class RankGroup(NamedTuple):
    """Ranks with equal distances between their numbers."""

    num_ranks: int
    stride: int = 1


# The ranks that take part in calls over an axis, in Megatron's order: tensor ranks vary fastest, then
# context, data and pipeline ranks. For experts, expert-tensor ranks of a stage vary fastest, then expert
# ranks.
AXES: dict[str, Callable[[ParallelConfig], RankGroup]] = {
    "tensor": lambda parallel: RankGroup(parallel.tensor_parallel_size, 1),
    "context": lambda parallel: RankGroup(parallel.context_parallel_size, parallel.tensor_parallel_size),
    # All copies of a parameter, including those of context-parallel ranks.
    "data": lambda parallel: RankGroup(parallel.num_copies, parallel.tensor_parallel_size),
    "stage": lambda parallel: RankGroup(parallel.stage_size, 1),
    "stages": lambda parallel: RankGroup(parallel.pipeline_parallel_size, parallel.stage_size),
    # Neighboring stages.
    "pipeline": lambda parallel: RankGroup(min(2, parallel.pipeline_parallel_size), parallel.stage_size),
    # The first and the last stage, which have a tied embedding.
    "embedding": lambda parallel: RankGroup(
        min(2, parallel.pipeline_parallel_size), parallel.stage_size * (parallel.pipeline_parallel_size - 1)
    ),
    "expert": lambda parallel: RankGroup(parallel.expert_parallel_size, parallel.expert_tensor_parallel_size),
    "expert_tensor": lambda parallel: RankGroup(parallel.expert_tensor_parallel_size, 1),
    # All ranks that have a layer's experts once.
    "expert_stage": lambda parallel: RankGroup(
        parallel.expert_parallel_size * parallel.expert_tensor_parallel_size, 1
    ),
    "expert_data": lambda parallel: RankGroup(
        parallel.expert_data_parallel_size,
        parallel.expert_parallel_size * parallel.expert_tensor_parallel_size,
    ),
    "all": lambda parallel: RankGroup(parallel.world_size, 1),
}


def call(
    parallel: ParallelConfig, kind: str, axis: str, elements: float, dtype: str, calls: float = 1
) -> Counts:
    """Return the counts of calls; nothing if a rank is alone on the axis.

    Args:
        kind: The kind, such as all_reduce.
        axis: A key of `AXES`.
        elements: The elements of the larger of a rank's input and output, in one call.
    """
    group = AXES[axis](parallel)
    if group.num_ranks == 1 or not calls:
        return NOTHING
    nbytes = calls * elements * dtype_bytes(dtype)
    return Counts(collectives=(CollectiveCount(kind, axis, *group, dtype, calls, nbytes),))


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
