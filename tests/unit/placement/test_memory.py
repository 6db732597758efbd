"""The memory that a placement predicts: counted by hand here, and against what real engines allocate in engine/test_memory_plan.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.architecture import Architecture
from megarl.config.schema import (
    ActorConfig,
    CriticConfig,
    DataConfig,
    DType,
    MicroBatchConfig,
    ModelConfig,
    OverBudget,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    Recompute,
    ReferenceConfig,
    RolloutConfig,
    TrainerConfig,
)
from megarl.placement.memory import DeviceMemory, budget_problems, plan_memory, stage_parameters
from megarl.placement.plan import plan_placement

QWEN_7B = Architecture(
    model_type="qwen2",
    num_hidden_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=152064,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    tie_word_embeddings=False,
    qkv_bias=True,
    qk_norm=False,
)
SIZE = 7_615_616_512  # as its model card says
EVERY_ROLE = dict.fromkeys(("actor", "reference", "critic"), QWEN_7B)


def config(strategy: PlacementStrategy, **placement: object) -> PPOConfig:
    """128 samples of 2048 tokens, written by two engines."""
    tokens = MicroBatchConfig(max_tokens=4096)
    return PPOConfig(
        model=ModelConfig(path="policy", dtype=DType.bfloat16),
        data=DataConfig(train_files=[]),
        actor=ActorConfig(parallel=ParallelConfig(tensor_parallel_size=4), micro_batch=tokens, recompute=Recompute.full),
        critic=CriticConfig(parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2), micro_batch=tokens),
        reference=ReferenceConfig(micro_batch=tokens),
        rollout=RolloutConfig(num_replicas=2, tensor_parallel_size=2),
        trainer=TrainerConfig(prompts_per_step=128),
        placement=PlacementConfig(strategy=strategy, **placement),  # type: ignore[arg-type]
    )


def memory(strategy: PlacementStrategy, **placement: object) -> list[DeviceMemory]:
    run = config(strategy, **placement)
    return plan_memory(run, plan_placement(run), EVERY_ROLE)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_the_whole_model(tied: bool) -> None:
    model = replace(QWEN_7B, tie_word_embeddings=tied)
    embedding = 152064 * 3584
    whole = ParallelConfig()
    assert stage_parameters(model, whole, 0, with_value_head=False) == SIZE - embedding * tied
    assert stage_parameters(model, whole, 0, with_value_head=True) == SIZE - embedding + 3584
    stages = ParallelConfig(pipeline_parallel_size=4)
    parts = [stage_parameters(model, stages, stage, with_value_head=False) for stage in range(4)]
    assert sum(parts) == SIZE  # tied: the last stage has a copy
    assert parts[0] == parts[1] + embedding
    cut = ParallelConfig(tensor_parallel_size=2)
    norms = 28 * 2 * 3584 + 3584
    assert stage_parameters(model, cut, 0, with_value_head=False) == (SIZE - embedding * tied - norms) // 2 + norms


def test_what_is_in_memory_in_each_phase_where_nobody_takes_turns() -> None:
    devices = memory(PlacementStrategy.stand_alone)
    assert [device.pool for device in devices] == ["actor"] * 4 + ["reference"] * 4 + ["critic"] * 4 + ["rollout"] * 4
    actor = devices[0].phases
    state = {phase: usages["actor"].parameters + usages["actor"].gradients + usages["actor"].optimizer for phase, usages in actor.items()}
    assert set(state.values()) == {state["gen"]}  # it stays, 2 + 4 + 12 bytes each
    assert state["gen"] == pytest.approx(18 * SIZE / 4, rel=1e-3)
    assert actor["gen"]["actor"].activations == 0
    assert actor["update_weights"]["actor"].buckets == 2 * 512 * 2**20
    engine = devices[-1].phases["gen"]["rollout"]
    assert engine.parameters == SIZE  # half of 2 bytes each
    assert engine.kv_cache == 64 * 2048 * (2 * 28 * 2 * 128 * 2)  # sequences x tokens x a token's keys and values of half the heads


def test_fully_collocated_roles_are_in_memory_only_in_their_phases() -> None:
    phases = memory(PlacementStrategy.fully_collocate)[0].phases
    resident = {phase: sorted(role for role, usage in usages.items() if usage.total) for phase, usages in phases.items()}
    assert resident == {
        "gen": ["rollout"],
        "reward": ["rollout"],
        "old_log_prob": ["actor"],
        "ref": ["actor", "reference"],
        "values": ["actor", "critic"],
        "update_critic": ["actor", "critic"],
        "update_actor": ["actor"],
        "update_weights": ["actor", "rollout"],
    }
    assert phases["update_critic"]["actor"].optimizer == 0
    assert phases["update_actor"]["actor"].optimizer == pytest.approx(12 * SIZE / 4, rel=1e-3)


def test_recompute_keeps_one_number_per_layer_and_token() -> None:
    run = config(PlacementStrategy.stand_alone)
    kept = replace(run, actor=replace(run.actor, recompute=Recompute.none))
    full, none = (
        plan_memory(each, plan_placement(each), EVERY_ROLE)[0].phases["update_actor"]["actor"].activations for each in (run, kept)
    )
    layer = (5 * 3584 + (2 * 3584 + 2 * 512 + 3 * 18944) // 4) * 2
    logits = 3 * 1024 * 152064 // 4 * 4
    assert none == 4096 * (28 * layer + 2 * 3584 * 2) + logits
    assert full == 4096 * (28 * 3584 * 2 + layer + 2 * 3584 * 2) + logits


def test_a_budget_names_the_device_the_phase_and_the_roles() -> None:
    over = config(PlacementStrategy.fully_collocate, device_memory_gb=32.0)
    devices = plan_memory(over, plan_placement(over), EVERY_ROLE)
    (problem,) = budget_problems(over, devices)
    assert problem.startswith("placement.device_memory_gb: in update_critic, device 0 of node 0 (pool all) would hold ")
    assert "critic " in problem
    assert "but has 32; use larger parallel sizes" in problem
    roomy = config(PlacementStrategy.fully_collocate, device_memory_gb=80.0, over_budget=OverBudget.warn)
    assert budget_problems(roomy, devices) == []
