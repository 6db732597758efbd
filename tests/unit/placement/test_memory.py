"""The memory that a placement predicts: counted by hand here, and against what real engines allocate in
engine/test_memory_plan.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.schema import (
    ActorConfig,
    CriticConfig,
    DataConfig,
    Device,
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
    RolloutEngineKind,
    SGLangConfig,
    TrainerConfig,
)
from megarl.models.architecture import Architecture
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
        actor=ActorConfig(
            parallel=ParallelConfig(tensor_parallel_size=4), micro_batch=tokens, recompute=Recompute.full
        ),
        critic=CriticConfig(
            parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2), micro_batch=tokens
        ),
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
    assert stage_parameters(model, whole, 0, with_value_head=False).total == SIZE - embedding * tied
    assert stage_parameters(model, whole, 0, with_value_head=True).total == SIZE - embedding + 3584
    stages = ParallelConfig(pipeline_parallel_size=4)
    parts = [stage_parameters(model, stages, stage, with_value_head=False).total for stage in range(4)]
    assert sum(parts) == SIZE  # tied: the last stage has a copy
    assert parts[0] == parts[1] + embedding
    cut = ParallelConfig(tensor_parallel_size=2)
    norms = 28 * 2 * 3584 + 3584
    assert (
        stage_parameters(model, cut, 0, with_value_head=False).total
        == (SIZE - embedding * tied - norms) // 2 + norms
    )


def test_what_is_in_memory_in_each_phase_where_nobody_takes_turns() -> None:
    devices = memory(PlacementStrategy.stand_alone)
    assert [device.pool for device in devices] == ["actor"] * 4 + ["reference"] * 4 + ["critic"] * 4 + [
        "rollout"
    ] * 4
    actor = devices[0].phases
    state = {
        phase: usages["actor"].parameters + usages["actor"].gradients + usages["actor"].optimizer
        for phase, usages in actor.items()
    }
    assert set(state.values()) == {state["gen"]}  # it stays, 2 + 4 + 12 bytes each
    assert state["gen"] == pytest.approx(18 * SIZE / 4, rel=1e-3)
    assert actor["gen"]["actor"].activations == 2048 * 128 * 4  # the angles of a row, which stay
    assert actor["update_weights"]["actor"].buckets == 2 * 512 * 2**20
    engine = devices[-1].phases["gen"]["rollout"]
    assert engine.parameters == SIZE  # half of 2 bytes each

    # sequences x tokens x a token's keys and values of half the heads
    assert engine.kv_cache == 64 * 2048 * (2 * 28 * 2 * 128 * 2)


def test_fully_collocated_roles_are_in_memory_only_in_their_phases() -> None:
    phases = memory(PlacementStrategy.fully_collocate)[0].phases
    resident = {
        phase: sorted(role for role, usage in usages.items() if usage.total > usage.activations)
        for phase, usages in phases.items()
    }
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


def test_what_leaves_a_gpu_is_pinned_in_the_hosts_memory() -> None:
    """Optimizer state of 12 bytes an element and weights of 2; gradients and engines are dropped."""
    fully = memory(PlacementStrategy.fully_collocate)[0].pinned
    assert fully["actor"] == pytest.approx(14 * SIZE / 4, rel=1e-3)
    assert fully["reference"] == pytest.approx(2 * SIZE / 4, rel=1e-3)
    assert fully["rollout"] == 0
    assert not any(memory(PlacementStrategy.stand_alone)[0].pinned.values())
    on_cpu = replace(config(PlacementStrategy.fully_collocate), device=Device.cpu)  # where it goes into files
    assert not any(plan_memory(on_cpu, plan_placement(on_cpu), EVERY_ROLE)[0].pinned.values())


def test_a_small_step_is_not_taken_for_a_full_micro_batch() -> None:
    """1,152 tokens of a step, two rows, where a micro-batch might have 16,384, of which the MLP alone would
    keep 60 GiB."""
    run = config(PlacementStrategy.stand_alone, device_memory_gb=50.0)
    actor = ActorConfig(
        parallel=ParallelConfig(tensor_parallel_size=4), micro_batch=MicroBatchConfig(max_tokens=16384)
    )
    data = replace(run.data, max_prompt_length=64, max_response_length=512)
    run = replace(run, actor=actor, data=data, trainer=TrainerConfig(prompts_per_step=2))
    small, large = (replace(run, trainer=TrainerConfig(prompts_per_step=prompts)) for prompts in (2, 128))
    (of_small, of_large) = (plan_memory(each, plan_placement(each), EVERY_ROLE) for each in (small, large))
    assert [problem for problem in budget_problems(small, of_small) if "(pool actor)" in problem] == []
    assert len([problem for problem in budget_problems(large, of_large) if "(pool actor)" in problem]) == 1
    exactly = replace(small, actor=replace(actor, micro_batch=MicroBatchConfig(max_tokens=1152)))
    assert plan_memory(exactly, plan_placement(exactly), EVERY_ROLE) == of_small


def sglang(**placement: object) -> PPOConfig:
    """Engines of one device, to which SGLang is given three fifths."""
    run = config(PlacementStrategy.stand_alone, device_memory_gb=72.0, **placement)
    settings = SGLangConfig(server_args={"mem_fraction_static": 0.6})
    rollout = replace(run.rollout, engine=RolloutEngineKind.sglang, sglang=settings, tensor_parallel_size=1)
    return replace(run, rollout=rollout, device=Device.cuda)


def test_an_engine_takes_the_share_of_a_gpu_that_it_is_given() -> None:
    """However long rows may be: SGLang lets those wait for which its cache has no room."""
    run = sglang()
    for tokens in (1024, 30_000):
        longer = replace(run, data=replace(run.data, max_response_length=tokens))
        engine = plan_memory(longer, plan_placement(longer), EVERY_ROLE)[-1].phases["gen"]["rollout"]
        assert engine.parameters == 2 * SIZE
        assert engine.parameters + engine.kv_cache == int(0.6 * 72 * 2**30)
        assert budget_problems(longer, plan_memory(longer, plan_placement(longer), EVERY_ROLE)) == []

    on_cpu = replace(run, device=Device.cpu)
    engine = plan_memory(on_cpu, plan_placement(on_cpu), EVERY_ROLE)[-1].phases["gen"]["rollout"]
    assert engine.kv_cache == 64 * 2048 * (2 * 28 * 4 * 128 * 2)


def test_a_share_that_cannot_hold_a_row_is_a_problem() -> None:
    """14.18 GiB of weights and 32,768 tokens x 57,344 bytes = 1.75 GiB of cache are 0.221 of 72 GiB."""
    run = sglang()
    run = replace(run, data=replace(run.data, max_prompt_length=2768, max_response_length=30_000))
    run = replace(
        run, rollout=replace(run.rollout, sglang=SGLangConfig(server_args={"mem_fraction_static": 0.2}))
    )
    (problem,) = budget_problems(run, plan_memory(run, plan_placement(run), EVERY_ROLE))
    assert problem.startswith("rollout.sglang.server_args.mem_fraction_static: 0.2 of ")
    for part in (
        "placement.device_memory_gb 72 is 14.40 GiB",
        "weights need 14.19",
        "one row of 32,768 tokens needs 1.75",
        "at least 0.23",
        "a larger rollout.tensor_parallel_size",
    ):
        assert part in problem


def test_a_budget_names_the_device_the_phase_and_the_roles() -> None:
    over = config(PlacementStrategy.fully_collocate, device_memory_gb=32.0)
    devices = plan_memory(over, plan_placement(over), EVERY_ROLE)
    (problem,) = budget_problems(over, devices)
    assert problem.startswith(
        "placement.device_memory_gb: in update_critic, device 0 of node 0 (pool all) needs "
    )
    assert "critic " in problem
    assert "but has 32; use larger parallel sizes" in problem
    roomy = config(PlacementStrategy.fully_collocate, device_memory_gb=80.0, over_budget=OverBudget.warn)
    assert budget_problems(roomy, devices) == []
