"""The counts of the time model equal those of dry runs, and calculations by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.batch_arithmetic import Row
from megarl.config.roles import model_roles
from megarl.config.schema import (
    LoRAConfig,
    ParallelConfig,
)
from megarl.config.validate import read_architectures
from megarl.plan.step_time.counts import CollectiveCount, Counts, Product, total
from megarl.plan.step_time.packed_batch import Rectangle, pack
from megarl.plan.step_time.role_time import scoring_counts
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.record import RankRequest
from tests.families import example_fields
from tests.unit.plan.step_time.comparison import EXACT, differences
from tests.unit.rehearse.dry_run.runs import TINY, ppo, save_config

EXPERT_PARALLEL = ParallelConfig(
    tensor_parallel_size=2,
    data_parallel_size=4,
    sequence_parallel=True,
    expert_parallel_size=2,
    expert_tensor_parallel_size=2,
)
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.usefixtures("forked_rehearsals")
def test_adapters_of_sharded_experts(tmp_path: Path) -> None:
    """Dry runs in tests/unit/rehearse/dry_run compare other kinds of layers and layouts."""
    config = ppo(save_config(tmp_path / "sparse", TINY | EXPERTS), EXPERT_PARALLEL)
    config = replace(config, actor=replace(config.actor, lora=LoRAConfig(rank=4)))
    request = RankRequest(config, "actor", 0, 2)
    (record,) = rehearse_ranks([request], 1)
    assert differences(request, record, EXACT) == []


@pytest.mark.usefixtures("forked_rehearsals")
def test_adapters_of_latent_attention(tmp_path: Path) -> None:
    config = ppo(save_config(tmp_path / "latent", example_fields("deepseek_v3")), EXPERT_PARALLEL)
    config = replace(config, actor=replace(config.actor, lora=LoRAConfig(rank=4)))
    request = RankRequest(config, "actor", 0, 2)
    (record,) = rehearse_ranks([request], 1)
    assert differences(request, record, EXACT) == []


@pytest.mark.usefixtures("forked_rehearsals")
@pytest.mark.parametrize("saved", [[], ["embed_tokens", "lm_head"]])
def test_saved_modules_of_a_model_with_adapters(saved: list[str], tmp_path: Path) -> None:
    """The first and the last pipeline stage, with the reduction of gradients and the optimizer step."""
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    config = ppo(save_config(tmp_path / "dense", TINY | {"tie_word_embeddings": False}), parallel)
    lora = LoRAConfig(rank=4, modules_to_save=saved)
    config = replace(config, actor=replace(config.actor, lora=lora))
    requests = [RankRequest(config, "actor", rank, 2) for rank in (0, parallel.stage_size)]
    for request, record in zip(requests, rehearse_ranks(requests, 1), strict=True):
        assert differences(request, record, EXACT) == []


def test_a_micro_batch_by_hand(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One row of 3 + 5 tokens of a model with two layers, on two tensor-parallel ranks.

    The last layer's MLP and the output layer have the 5 tokens that predict the response.
    """
    model = save_config(tmp_path_factory.mktemp("tiny") / "model", TINY)
    config = ppo(model, ParallelConfig(tensor_parallel_size=2))
    role = model_roles(config)[0]
    architecture = read_architectures(config)[0]["actor"]
    batch = pack(config, role, architecture, [Row(3, 5)])
    counts = scoring_counts(config, role, architecture, 0, batch)

    assert sorted(counts.products) == sorted(
        [
            Product(8, 64, (64 + 32 + 32) // 2, 2),  # queries, keys and values
            Product(8, 32, 64, 2),
            Product(8, 64, 96, 1),  # gate and up: 2 x 96 / 2
            Product(8, 48, 64, 1),
            Product(5, 64, 96, 1),
            Product(5, 48, 64, 1),
            Product(5, 64, 128, 1),  # 199 words, padded to 256
        ]
    )
    # Two layers with two heads of 16 on the rank, and 8 queries; a causal mask leaves 36 of 64 pairs.
    assert counts.attention_flops == 2 * 2 * 2 * 64 * (16 + 16)
    assert counts.masked_attention_flops == 2 * 2 * 2 * 36 * (16 + 16)
    # The embedding, and two sums in each layer; in the head one maximum and four sums for each token.
    assert sorted(counts.collectives) == [
        CollectiveCount("all_reduce", "tensor", 2, 1, "bfloat16", 5, (4 * 8 + 5) * 64 * 2),
        CollectiveCount("all_reduce", "tensor", 2, 1, "float32", 2, 5 * 5 * 4),
    ]


@pytest.mark.parametrize(
    ("rectangle", "window", "pairs"),
    [
        (Rectangle(4, 4), 0, 10),
        (Rectangle(2, 5), 0, 4 + 5),
        (Rectangle(4, 4), 2, 1 + 2 + 2 + 2),
        (Rectangle(3, 5), 4, 3 + 4 + 4),
        (Rectangle(2, 5), 2, 2 + 2),
        (Rectangle(3, 5, is_causal=False), 0, 15),
    ],
)
def test_pairs_that_a_mask_leaves(rectangle: Rectangle, window: int, pairs: int) -> None:
    assert rectangle.pairs(window) == pairs


def test_sums_join_equal_products_and_calls() -> None:
    call = CollectiveCount("all_reduce", "tensor", 2, 1, "float32", 1, 8)
    counts = Counts((Product(2, 3, 4),), 100, 60, (call,))
    assert counts.flops == 2 * 2 * 3 * 4 + 100
    twice = Counts((Product(2, 3, 4, 2),), 200, 120, (call._replace(calls=2, nbytes=16),))
    assert total((counts, counts)) == counts.times(2) == twice
