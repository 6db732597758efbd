"""Parameter counts against transformers, against the shapes of shards, and by hand."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture
from megarl.models.counts import (
    num_active_parameters,
    num_expert_parameters,
    num_parameters,
    padded_vocab_size,
)
from megarl.models.families import FAMILIES, read_architecture
from megarl.plan.placement.model_state import stage_parameters
from megarl.weights.shard_layout import layouts_of, shard_shapes
from tests.families import UNTIED_FAMILIES, is_kept, new_model

LAYOUTS = [
    ParallelConfig(),
    ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
    ParallelConfig(tensor_parallel_size=4, data_parallel_size=2),
    ParallelConfig(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2, data_parallel_size=2),
]
EXPERT_LAYOUTS = [
    ParallelConfig(data_parallel_size=4, expert_parallel_size=4),
    ParallelConfig(
        tensor_parallel_size=2, data_parallel_size=2, expert_parallel_size=2, expert_tensor_parallel_size=2
    ),
    ParallelConfig(
        tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2, expert_tensor_parallel_size=4
    ),
]


def written(folder: Path, fields: dict[str, Any]) -> Architecture:
    (folder / "config.json").write_text(json.dumps(fields))
    return read_architecture(str(folder))


def with_tied_embedding(model_type: str, tied: bool) -> dict[str, Any]:
    """Return the example of a family, whose embedding is tied on request if its class can do so."""
    return FAMILIES[model_type].example() | (
        {} if model_type in UNTIED_FAMILIES else {"tie_word_embeddings": tied}
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_has_as_many_parameters_as_in_transformers(
    tmp_path: Path, model_type: str, tied: bool
) -> None:
    architecture = written(tmp_path, with_tied_embedding(model_type, tied))
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(tmp_path)
        reference = new_model(config)
    # Selection biases are buffers in transformers, and tensors of a folder like parameters.
    biases = sum(
        value.numel() for name, value in reference.named_buffers() if name.endswith("correction_bias")
    )
    kept = sum(value.numel() for name, value in reference.named_parameters() if is_kept(name, config))
    expected = reference.num_parameters() + biases - kept
    assert num_parameters(architecture) == expected

    # A value head of (H) weights replaces an output layer of (V, H).
    output = 0 if architecture.tie_word_embeddings else reference.lm_head.weight.numel()
    with_value_head = expected - output + architecture.hidden_size
    assert num_parameters(architecture, with_value_head=True) == with_value_head

    # In memory, transformers keeps the experts of a layer in tensors of one module.
    of_experts = sum(value.numel() for name, value in reference.named_parameters() if ".experts." in name)
    assert num_expert_parameters(architecture) == of_experts


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_stage_counts_what_its_shards_hold(tmp_path: Path, model_type: str, tied: bool, head: Any) -> None:
    architecture = written(tmp_path, with_tied_embedding(model_type, tied))
    for parallel in [*LAYOUTS, *(EXPERT_LAYOUTS if architecture.experts else [])]:
        for rank, layout in enumerate(layouts_of(architecture, parallel)):
            stage = parallel.coordinate(rank).pp
            counted = stage_parameters(architecture, parallel, stage, with_value_head=head == "value")
            sizes = {name: prod(shape) for name, shape in shard_shapes(architecture, layout, head).items()}
            of_experts = sum(size for name, size in sizes.items() if ".local_experts." in name)
            assert counted.of_experts == of_experts
            assert counted.total == sum(sizes.values())


def test_a_stage_with_experts_by_hand(tmp_path: Path) -> None:
    """Qwen2-MoE, TP 2 x DP 2 with EP 2 x ETP 2, the first of two stages: layer 0 has experts, layer 1 is dense."""
    architecture = written(tmp_path, FAMILIES["qwen2_moe"].example() | {"mlp_only_layers": [1]})
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        data_parallel_size=2,
        expert_parallel_size=2,
        expert_tensor_parallel_size=2,
    )
    embedding = 256 // 2 * 64  # 199 rows, padded
    qkv = (8 + 2 * 4) * 8 * (64 + 1) // 2
    attention = qkv + 64 * 64 // 2 + 2 * 64
    router = 8 * 64
    shared = 3 * 48 * 64 // 2 + 64
    dense = 3 * 96 * 64 // 2
    counted = stage_parameters(architecture, parallel, 0, with_value_head=False)
    assert counted.dense == embedding + 2 * attention + router + shared + dense
    assert counted.of_experts == 8 // 2 * 3 * 32 * 64 // 2


def test_a_token_meets_the_chosen_experts_only(tmp_path: Path) -> None:
    """2 of 8 experts are selected; one has 3 x 32 x 64 parameters in each of 4 layers."""
    architecture = written(tmp_path, FAMILIES["qwen3_moe"].example())
    assert num_parameters(architecture) - num_active_parameters(architecture) == 6 * 4 * 3 * 32 * 64
    dense = written(tmp_path, FAMILIES["qwen3"].example())
    assert num_active_parameters(dense) == num_parameters(dense)


@pytest.mark.parametrize(
    ("vocab_size", "size", "padded"), [(199, 1, 256), (256, 2, 256), (257, 2, 512), (151936, 8, 152576)]
)
def test_the_vocabulary_is_padded_to_128_rows_of_each_rank(vocab_size: int, size: int, padded: int) -> None:
    assert padded_vocab_size(vocab_size, size) == padded
