"""Low-rank adapters on Megatron's linear layers, with a pair of matrices for each Hugging Face projection.

A layer keeps its type and the name of its weight. Its adapters are a submodule, and a forward hook adds their
output. The tensor table (models/adapters.py) names the matrices and determines how they are sharded:

- If the layer shards its outputs, A is replicated and B has the rank's outputs.
- If it shards its inputs, A has the rank's inputs and B is replicated.
- If it is replicated, as the down projections of latent attention, so are A and B.

Tensor-parallel ranks therefore exchange the product with A, which has `rank` numbers per token.

Letters: T tokens of this rank (with sequence parallelism, its part of them), r rank of the adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megarl.models.adapters import parameter_names
from megarl.models.architecture import Architecture
from megarl.models.mapping import Cut
from megarl.models.tensor_table import Head, Weight, weights_of
from megarl.weights.shard_layout import ShardLayout, held_weights, shard_shapes, shard_view


class AdapterSwitch:
    """Turns the adapters of a model off, which makes it the model that it was trained from.

    Weights that train in full next to adapters are then replaced by copies of their first values, which are
    in memory, or offloaded, with the parameters. The other weights are frozen and need no copies.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._originals: list[tuple[torch.nn.Parameter, Tensor]] = []

    @property
    def originals(self) -> list[Tensor]:
        return [original for _, original in self._originals]

    def keep(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Copy the present values of parameters."""
        self._originals = [(parameter, parameter.detach().clone()) for parameter in parameters]

    @contextlib.contextmanager
    def off(self) -> Generator[None]:
        """Run the model without its adapters within the block. Gradients and the optimizer do not change."""
        trained = [parameter.data for parameter, _ in self._originals]
        self.is_on = False
        for parameter, original in self._originals:
            parameter.data = original
        try:
            yield
        finally:
            self.is_on = True
            for (parameter, _), data in zip(self._originals, trained, strict=True):
                parameter.data = data


class ProjectionAdapter(torch.nn.Module):
    """The adapter of one projection: `a` (r, inputs) and `b` (outputs, r) of this rank."""

    def __init__(self, a_shape: Sequence[int], b_shape: Sequence[int], weight: Tensor) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(weight.new_empty(tuple(a_shape)))
        self.b = torch.nn.Parameter(weight.new_empty(tuple(b_shape)))


class LinearAdapters(torch.nn.Module):
    """The adapters of one of Megatron's linear layers.

    Args:
        weight: Its row in the tensor table.
        shapes: The shapes of this rank's parameters, by Megatron's names.
        layout: What the rank holds.
        scale: The factor of the product.
    """

    def __init__(
        self,
        linear: Any,
        weight: Weight,
        shapes: Mapping[str, tuple[int, ...]],
        layout: ShardLayout,
        scale: float,
    ) -> None:
        super().__init__()
        self._scale = scale
        self._shards_inputs = weight.cut is Cut.row
        self._is_replicated = weight.cut is Cut.replicated
        self._is_expert = weight.expert is not None
        self._size = layout.cut_of(weight)[0]
        # The layers of experts exchange nothing: their token dispatcher does.
        self._is_sequence_parallel = self._size > 1 and not self._is_expert and linear.sequence_parallel
        self._group: dist.ProcessGroup | None = None if self._is_replicated else linear.tp_group

        # The outputs of fused projections alternate by query group.
        self._num_groups = shard_view(weight, layout)[0] if weight.cut is Cut.qkv else 1
        self._parts: list[tuple[str | None, int]] = []  # (adapter, outputs of this rank) of each projection

        for tensor in weight.tensors:
            a, b = parameter_names(weight.megatron_name, tensor.name)
            outputs = tensor.shape[0] // (1 if self._shards_inputs or self._is_replicated else self._size)
            if a not in shapes:
                self._parts.append((None, outputs))
                continue
            name = a.split(".")[-2]
            adapter = ProjectionAdapter(shapes[a], shapes[b], linear.weight.detach())
            self._mark(adapter, linear.weight)
            self.add_module(name, adapter)
            self._parts.append((name, outputs))

    def _mark(self, adapter: ProjectionAdapter, weight: torch.nn.Parameter) -> None:
        """Set the attributes from which Megatron knows how gradients are summed, and counted in the norm."""
        sharded = adapter.a if self._shards_inputs else adapter.b
        for parameter in (adapter.a, adapter.b):
            parameter.allreduce = getattr(weight, "allreduce", True)  # pyrefly: ignore[missing-attribute]
            if parameter is sharded and not self._is_replicated:
                dim = int(self._shards_inputs)
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
            else:
                # Each rank has the gradient of its own tokens.
                parameter.sequence_parallel = self._is_sequence_parallel  # pyrefly: ignore[missing-attribute]

    def forward(self, hidden: Tensor) -> Tensor:
        """Map the layer's inputs (T, ..., inputs) to what is added to its outputs (T, ..., outputs)."""
        adapters = [getattr(self, name) for name, _ in self._parts if name is not None]
        # The projections of a layer have the same inputs, so one product with all A is enough.
        a = torch.cat([adapter.a for adapter in adapters]) if len(adapters) > 1 else adapters[0].a
        if self._is_expert and self._size > 1:
            return self._of_expert(hidden, a, adapters)

        low = self._exchange(F.linear(hidden, a) * self._scale)
        return self._joined(low, [adapter.b for adapter in adapters])

    def _of_expert(self, hidden: Tensor, a: Tensor, adapters: Sequence[ProjectionAdapter]) -> Tensor:
        """Run adapters of an expert whose matrices are sharded.

        The dispatcher gives all tokens to each rank, sums the outputs, and sums the gradients of the inputs.
        The gradients of replicated matrices are therefore summed here.
        """
        b = [adapter.b for adapter in adapters]
        if self._shards_inputs:
            b = [copy_to_tensor_model_parallel_region(each, group=self._group) for each in b]
        else:
            a = copy_to_tensor_model_parallel_region(a, group=self._group)
        return self._joined(F.linear(hidden, a) * self._scale, b)

    def _exchange(self, low: Tensor) -> Tensor:
        """Complete the product with A: sum it, or gather it, over the ranks that share the layer."""
        if self._size == 1 or self._is_replicated:
            return low
        if self._shards_inputs:
            if self._is_sequence_parallel:
                return reduce_scatter_to_sequence_parallel_region(low, group=self._group)
            return reduce_from_tensor_model_parallel_region(low, group=self._group)
        if self._is_sequence_parallel:
            return gather_from_sequence_parallel_region(low, group=self._group)
        return copy_to_tensor_model_parallel_region(low, group=self._group)

    def _joined(self, low: Tensor, b: Sequence[Tensor]) -> Tensor:
        """Multiply each projection's part of `low` with its B, and join the outputs in the layer's order."""
        products = (F.linear(part, each) for part, each in zip(low.chunk(len(b), -1), b, strict=True))
        outputs = [
            # A projection without an adapter adds nothing.
            next(products) if name is not None else low.new_zeros(*low.shape[:-1], size)
            for name, size in self._parts
        ]
        if len(outputs) == 1:
            return outputs[0]

        # The outputs of the layer are ordered by group: its queries, keys and values come together.
        by_group = [output.unflatten(-1, (self._num_groups, -1)) for output in outputs]
        return torch.cat(by_group, -1).flatten(-2)


def add_adapters(
    model: Any, architecture: Architecture, layout: ShardLayout, head: Head, switch: AdapterSwitch
) -> None:
    """Add the adapters of a chunk. Their values are not set yet.

    Args:
        model: A ModelChunk.
        layout: What the rank holds.
        switch: Turns the adapters off.
    """
    assert architecture.lora is not None
    shapes = shard_shapes(architecture, layout, head)
    weights = {weight.megatron_name: weight for weight in held_weights(architecture, layout, head)}

    for path, linear in list(model.named_modules()):
        weight = weights.get(model.canonical(f"{path}.weight"))
        if weight is None or not any(
            parameter_names(weight.megatron_name, tensor.name)[0] in shapes for tensor in weight.tensors
        ):
            continue
        linear.lora = LinearAdapters(linear, weight, shapes, layout, architecture.lora.scale)
        # before the norm of the layer's output, which norms.py computes in a hook too
        linear.register_forward_hook(_adding(switch), prepend=True)

    if model.pre_process:
        model.embedding.register_forward_hook(_with_gradient)


def _adding(switch: AdapterSwitch) -> Callable[..., tuple[Tensor, Any]]:
    """Return a hook that adds the output of a layer's adapters to the layer's own."""

    def add(linear: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        if not switch.is_on:
            return outputs
        output, bias = outputs
        return output + linear.lora(inputs[0]), bias

    return add


def _with_gradient(module: torch.nn.Module, inputs: Any, hidden: Tensor) -> Tensor:
    """Let the gradient reach recomputed layers.

    A recomputed layer has no gradient at all unless one of its inputs requires one, and the embedding is
    frozen. The gradients of its adapters would silently be zero.
    """
    return hidden.requires_grad_() if torch.is_grad_enabled() and hidden.is_leaf else hidden


def freeze_untrained(model: Any, architecture: Architecture, head: Head) -> None:
    """Freeze everything that the tensor table does not train, before Megatron allocates gradients."""
    trained = {weight.megatron_name for weight in weights_of(architecture, head) if weight.trains}
    for name, parameter in model.canonical_parameters():
        if name not in trained:
            parameter.requires_grad_(False)
