"""Forward and backward passes of sharded linear layers on one rank, with their calls and adapters. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from megarl.models.architecture import Architecture
from megarl.models.mapping import EXPERT, MEGATRON_LAYER
from megarl.models.tensor_table import dimension_sizes, entry_size, rows_of
from megarl.step_time.collectives import call
from megarl.step_time.counts import total
from megarl.step_time.work import IDLE, Edge, PassCounts, joined, linear

_ADAPTER = ".lora."  # in the names of adapters, between the linear layer's and the projection's


class Adapters(NamedTuple):
    """The adapters of a linear layer.

    Attributes:
        outputs: The outputs of each adapted projection, on all ranks.
    """

    rank: int
    outputs: tuple[int, ...]


class Linears(NamedTuple):
    """The linear layers of a model.

    Attributes:
        is_frozen: Whether only their adapters train.
        adapters: The adapters of each layer, by its name in the tensor table without the layer's number.
    """

    is_frozen: bool
    adapters: Mapping[str, Adapters]

    def column_parallel(self, name: str, edge: Edge, columns: int) -> PassCounts:
        """Return the work of a layer whose outputs are sharded.

        Args:
            edge: The inputs.
            columns: The outputs of this rank.
        """
        trains = not self.is_frozen
        whole = joined((edge.entered(trains=trains), linear(edge.tokens, edge.width, columns, trains=trains)))
        adapters = self.adapters.get(name)
        if adapters is None:
            return whole

        # The product with A is made from the rank's own tokens, and then gathered.
        rank = adapters.rank
        low = edge._replace(width=rank * len(adapters.outputs))
        shards = edge.parallel.tensor_parallel_size
        products = (linear(edge.tokens, rank, outputs // shards) for outputs in adapters.outputs)
        return joined(
            (whole, linear(edge.own_tokens, edge.width, low.width), low.entered(trains=False), *products)
        )

    def row_parallel(self, name: str, inner: int, edge: Edge) -> PassCounts:
        """Return the work of a layer whose inputs are sharded.

        Args:
            inner: The inputs of this rank.
            edge: The outputs.
        """
        whole = joined((linear(edge.tokens, inner, edge.width, trains=not self.is_frozen), edge.left()))
        adapters = self.adapters.get(name)
        if adapters is None:
            return whole

        rank = adapters.rank
        return joined(
            (
                whole,
                linear(edge.tokens, inner, rank),
                edge._replace(width=rank).left(),
                linear(edge.own_tokens, rank, edge.width),
            )
        )

    def replicated(self, name: str, edge: Edge, columns: int) -> PassCounts:
        """Return the work of a layer that every rank has, which it applies to its own tokens.

        Args:
            edge: The inputs.
        """
        whole = linear(edge.own_tokens, edge.width, columns, trains=not self.is_frozen)
        adapters = self.adapters.get(name)
        if adapters is None:
            return whole
        rank = adapters.rank
        products = (linear(edge.own_tokens, edge.width, rank), linear(edge.own_tokens, rank, columns))
        return joined((whole, *products))

    def of_experts(
        self, name: str, rows: float, inner: int, columns: int, shards: int, times: int
    ) -> PassCounts:
        """Return the products of the layers of a rank's experts, for which the dispatcher moves tokens.

        Args:
            rows: The tokens of each.
            inner: The inputs of this rank.
            columns: The outputs of this rank.
            shards: The number of ranks that share the outputs of each layer.
            times: The number of such layers.
        """
        base = linear(rows, inner, columns, trains=not self.is_frozen, times=times)
        adapters = self.adapters.get(name)
        if adapters is None:
            return base

        rank = adapters.rank
        return joined(
            (
                base,
                linear(rows, inner, rank * len(adapters.outputs), times=times),
                *(linear(rows, rank, outputs // shards, times=times) for outputs in adapters.outputs),
            )
        )

    def replicated_of_experts(self, edge: Edge, times: int) -> PassCounts:
        """Return the calls that sum the gradients of the matrices of adapters that sharded experts share.

        These are A of the layer with sharded outputs, and B of the one with sharded inputs.
        """
        inputs, outputs = (self.adapters.get(f"{EXPERT}linear_{which}") for which in ("fc1", "fc2"))
        numbers = [inputs.rank * len(inputs.outputs)] if inputs else []
        numbers += [outputs.rank] if outputs else []
        summed = (
            call(edge.parallel, "all_reduce", "expert_tensor", number * edge.width, edge.dtype, times)
            for number in numbers
        )
        return PassCounts(backward=total(summed))


@lru_cache(maxsize=64)
def linears_of(architecture: Architecture) -> Linears:
    """Return the linear layers of a model."""
    lora = architecture.lora
    if lora is None:
        return Linears(is_frozen=False, adapters={})
    sizes = dimension_sizes(architecture)
    found: dict[str, tuple[int, ...]] = {}

    # B of each adapter has the outputs of its projection.
    for row in rows_of(architecture, "lm"):
        if _ADAPTER in row.megatron and row.megatron.endswith(".b"):
            name = row.megatron.partition(_ADAPTER)[0].removeprefix(MEGATRON_LAYER)
            outputs = entry_size(row.tensors[0], sizes, row.place) // lora.rank
            found[name] = (*found.get(name, ()), outputs)

    adapters = {name: Adapters(lora.rank, outputs) for name, outputs in found.items()}
    return Linears(is_frozen=True, adapters=adapters)


def mlp_work(linears: Linears, name: str, edge: Edge, size: int) -> PassCounts:
    """Return the work of a gated MLP; nothing if its size is 0.

    Args:
        name: The name of the MLP in the tensor table.
        edge: The hidden states.
        size: The outputs of the gate on all ranks.
    """
    held = size // edge.parallel.tensor_parallel_size
    if not held:
        return IDLE
    return joined(
        (
            linears.column_parallel(f"{name}.linear_fc1", edge, 2 * held),  # gate and up
            linears.row_parallel(f"{name}.linear_fc2", held, edge),
        )
    )
