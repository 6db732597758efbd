"""MoE models: two ranks of a small layout, and ranks of published models with few layers against the plan.

tests/soak/test_rehearsed_memory.py covers all layers, with the recomputation of the runs in configs/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megarl.config.roles import model_roles
from megarl.config.schema import Layers, ParallelConfig, PPOConfig, Recompute
from megarl.config.shipped import CONFIGS_DIR
from megarl.models.families import read_architecture
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.ranks import hangs, rounded_sums
from megarl.rehearse.dry_run.record import PhaseRecord, RankRecord, predicted_memory
from tests.unit.rehearse.dry_run.memory_cases import beyond_bounds
from tests.unit.rehearse.dry_run.runs import TINY, TOKENS, ppo, requests, save_config

pytestmark = pytest.mark.usefixtures("forked_rehearsals")

EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SMALL = ParallelConfig(
    tensor_parallel_size=2,
    data_parallel_size=2,
    sequence_parallel=True,
    expert_parallel_size=2,
    expert_tensor_parallel_size=1,
)
LATENT = replace(
    SMALL, tensor_parallel_size=4, context_parallel_size=2, data_parallel_size=4, expert_parallel_size=8
)
LARGE = replace(SMALL, tensor_parallel_size=4, data_parallel_size=8, expert_parallel_size=32)
MICRO_BATCHES = 2
LAYERS = 2
HIDDEN = 64


def published(name: str) -> dict[str, Any]:
    values = json.loads((CONFIGS_DIR / "models" / name / "config.json").read_text())
    return {key: value for key, value in values.items() if key != "auto_map"}  # code of the folder


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PPOConfig]:
    root = tmp_path_factory.mktemp("models")
    large, latent = (
        save_config(root / name, published(name) | {"num_hidden_layers": LAYERS})
        for name in ("Qwen3-30B-A3B", "Moonlight-16B-A3B-Instruct")
    )

    # The tower, whose features are added to the first three layers.
    images = published("Qwen3-VL-30B-A3B-Instruct")
    images["text_config"]["num_hidden_layers"] = 4
    images["vision_config"] |= {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
    (root / "images").mkdir()
    (root / "images" / "config.json").write_text(json.dumps(images))

    # Latent attention in a ring of context-parallel ranks, and with shared prompts.
    run = ppo(
        latent,
        LATENT,
        prompt=1024,
        response=7168,
        max_tokens=4096,
        recompute=Recompute.full,
        layers=Layers.transformer_engine,
    )
    return {
        "latent": replace(run, rollout=replace(run.rollout, n=2)),
        "small": ppo(save_config(root / "small", TINY | EXPERTS), SMALL),
        "large": ppo(large, LARGE, prompt=8192, response=1024, max_tokens=18432),
        "images": ppo(str(root / "images"), LARGE, prompt=1024, response=128, max_tokens=2304),
    }


@pytest.fixture(scope="module")
def records(configs: dict[str, PPOConfig]) -> dict[str, list[RankRecord]]:
    ranks = {"small": [0, 1], "large": [0], "latent": [0], "images": [0]}
    found = list(rehearse_ranks((each for name in ranks for each in requests(configs[name], ranks[name])), 1))
    return {name: [found.pop(0) for _ in some] for name, some in ranks.items()}


def phases(records: list[RankRecord], name: str) -> Iterator[PhaseRecord]:
    for record in records:
        yield next(phase for phase in record.phases if phase.name == name)


def test_no_mistake_is_found(records: dict[str, list[RankRecord]]) -> None:
    for ranks in records.values():
        assert [record.error for record in ranks] == [None] * len(ranks)
        assert hangs(ranks) == []
        assert rounded_sums(ranks) == []


def test_tokens_go_to_experts_and_come_back(records: dict[str, list[RankRecord]]) -> None:
    """A rank has half of 512 tokens, each of which goes to two experts.

    With even routes, half of those 512 go to each rank, with their weights, and return. With uneven routes,
    expert 0 has 128 tokens, twice its share, and 384 are left for seven others.
    """
    sent = TOKENS // 2 * 2
    for name, numbers in (("score", (256, 256)), ("score, uneven", (293, 219))):
        for phase in phases(records["small"], name):
            calls = [call for call in phase.collectives if call.kind == "all_to_all"]
            assert len(calls) == MICRO_BATCHES * LAYERS * 3
            out = [call.sent for call in calls if call.dtype == "bfloat16"][::2]
            assert set(out) == {tuple(number * HIDDEN for number in numbers)}
            assert {call.sent for call in calls if call.dtype == "float32"} == {numbers}
            assert sum(numbers) == sent


@pytest.mark.parametrize(
    ("name", "worst_cases"),
    [("large", ["uneven"]), ("latent", ["shared prompt", "uneven"]), ("images", ["uneven"])],
)
def test_the_plan_of_memory_is_near_and_never_below(
    name: str, worst_cases: list[str], records: dict[str, list[RankRecord]], configs: dict[str, PPOConfig]
) -> None:
    """The plan assumes that prompts consist of images, and is further above where they have one each."""
    config = configs[name]
    (role,) = [role for role in model_roles(config) if role.name == "actor"]
    plan = predicted_memory(config, role, read_architecture(config.model.path), 0)
    (record,) = records[name]
    passes = {phase.name for phase in record.phases if ", " in phase.name}
    assert passes == {f"{each}, {case}" for each in ("score", "train") for case in worst_cases}
    assert passes < plan.peaks.keys()
    assert beyond_bounds(record, plan, is_near=name != "images") == []
