"""The parts of layers have every matrix of the tensor table, and planners name no kind."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from megarl.models.counts import num_expert_parameters
from megarl.models.families import FAMILIES
from megarl.models.layers import (
    KINDS,
    has_dense_layers,
    kind_of,
    kinds_of,
    layers_of,
    reads_images,
    routing_layers,
    stores_layers_apart,
    window_of,
)
from megarl.models.mapping import FEED_FORWARD, MIXER, num_row_axes, size_of
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
        limits = (letter for _, letter in (*kind.shared_out, *kind.replicable))
        assert all(size_of(each, sizes) >= 0 for each in (*axes, *limits, kind.summed, kind.gathered))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_mixes_tokens_before_its_feed_forward(name: str) -> None:
    architecture = example_architecture(name)
    recurrent = (*architecture.delta_layers, *architecture.mamba_layers)
    for number, layer in enumerate(layers_of(architecture)):
        prefixes = [
            *([MIXER] if number not in architecture.layers_without_mixer else []),
            *([FEED_FORWARD] if number not in architecture.layers_without_feed_forward else []),
        ]
        assert prefixes
        assert [part.kind.prefix for part in layer] == prefixes
        for kind in (part.kind for part in layer if part.kind.prefix == MIXER):
            assert bool(kind.of_pair) != bool(kind.recurrence != "0")
            assert (kind.recurrence != "0") == (number in recurrent)
        for kind in (part.kind for part in layer if part.kind.prefix == FEED_FORWARD):
            assert kind.routes_tokens == (number in architecture.sparse_layers)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_a_model_has_the_limits_of_its_fields(name: str) -> None:
    """The numbers that ranks share out are those of the model's `config.json`."""
    architecture = example_architecture(name)
    sizes = dimension_sizes(architecture)
    shared = {
        field: sizes[letter]
        for kind in kinds_of(architecture)
        for field, letter in (*kind.shared_out, *kind.replicable)
    }

    expected = {
        "num_attention_heads": architecture.num_attention_heads,
        "num_key_value_heads": architecture.num_key_value_heads,
    }
    if len(architecture.sparse_layers) < architecture.num_hidden_layers:
        expected["intermediate_size"] = architecture.intermediate_size
    if architecture.delta_net is not None:
        expected["linear_num_key_heads"] = architecture.delta_net.num_key_heads
    if architecture.mamba is not None:
        expected["n_groups"] = architecture.mamba.num_groups
    assert shared == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_questions_about_a_whole_model(name: str) -> None:
    architecture = example_architecture(name)
    has_dense = len(architecture.sparse_layers) < architecture.num_hidden_layers
    assert has_dense_layers(architecture) == has_dense
    assert routing_layers(architecture) == architecture.sparse_layers
    assert reads_images(architecture) == (architecture.vision is not None)
    deepstack = () if architecture.vision is None else architecture.vision.deepstack_blocks
    assert architecture.num_image_layers == len(deepstack)
    has_states = architecture.delta_net is not None or architecture.mamba is not None
    assert stores_layers_apart(architecture) == (
        has_states or (architecture.experts is not None and has_dense)
    )
    most = 0 if architecture.indexer is None else architecture.indexer.topk
    windows = architecture.windows or (most,) * architecture.num_hidden_layers
    assert tuple(window_of(architecture, layer) for layer in range(len(windows))) == windows
    for layer in set(range(architecture.num_hidden_layers)) - {*architecture.layers_without_feed_forward}:
        stored = kind_of(architecture, layer, FEED_FORWARD).stored_norm
        assert stored.startswith("pre_mlp") == (layer in architecture.sparse_layers)


def test_one_layer_of_gated_delta_nets_is_stored_apart() -> None:
    """Megarl tells Megatron by a list which layers have one, with which it stacks no layers."""
    architecture = example_architecture("qwen3_5")
    assert architecture.delta_net is not None
    only = replace(architecture.delta_net, layers=tuple(range(architecture.num_hidden_layers)))
    assert stores_layers_apart(replace(architecture, delta_net=only))
