"""The parts of layers have every matrix of the tensor table, and planners name no kind."""

from __future__ import annotations

from math import prod

import pytest

from megarl.models.counts import num_expert_parameters
from megarl.models.families import FAMILIES
from megarl.models.layers import KINDS, layers_of
from megarl.models.mapping import num_row_axes
from megarl.models.tensor_part import size_of
from megarl.models.tensor_table import dimension_sizes, weights_of
from tests.families import example_architecture


@pytest.mark.parametrize("name", FAMILIES)
def test_every_matrix_of_the_table_is_in_a_part_of_its_layer_once(name: str) -> None:
    architecture = example_architecture(name)
    held: list[list[int]] = [[] for _ in range(architecture.num_hidden_layers)]
    for weight in weights_of(architecture, "lm"):
        blocks = [tensor.block for tensor in weight.tensors]
        axes = num_row_axes(weight.cut)
        if weight.layer is not None and len(blocks[0]) > axes:
            held[weight.layer].append(sum(map(prod, blocks)))

    for layer, elements in zip(layers_of(architecture), held, strict=True):
        matrices = [matrix for part in layer for matrix in part.matrices]
        every = [each.outputs * each.inputs for each in matrices for _ in range(each.num_experts or 1)]
        assert sorted(every) == sorted(elements)

    of_experts = (
        each.outputs * each.inputs * each.num_experts
        for layer in layers_of(architecture)
        for part in layer
        for each in part.matrices
    )
    # Biases of experts are no matrices.
    assert sum(of_experts) <= num_expert_parameters(architecture)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_sizes_of_every_kind_are_letters_of_the_table(name: str) -> None:
    sizes = dimension_sizes(example_architecture(name))
    for kind in KINDS:
        axes = (*kind.of_pair, kind.recurrence, kind.cached, kind.cached_at_least, kind.state)
        assert all(size_of(each, sizes) >= 0 for each in (*axes, kind.summed, kind.gathered))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_mixes_tokens_before_its_feed_forward(name: str) -> None:
    architecture = example_architecture(name)
    for number, layer in enumerate(layers_of(architecture)):
        mixer, feed_forward = (part.kind for part in layer)
        assert bool(mixer.of_pair) != bool(mixer.recurrence != "0")
        assert (mixer.recurrence != "0") == (number in architecture.delta_layers)
        assert feed_forward.routes_tokens == (number in architecture.sparse_layers)
