"""The memory that a placement predicts: counted by hand here, and against what real engines allocate in engine/test_memory_plan.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.architecture import Architecture
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


def test_what_leaves_a_gpu_is_pinned_in_the_hosts_memory() -> None:
    """Optimizer state of 12 bytes an element and weights of 2; gradients and engines are dropped."""
    fully = memory(PlacementStrategy.fully_collocate)[0].pinned
    assert fully["actor"] == pytest.approx(14 * SIZE / 4, rel=1e-3)
    assert fully["reference"] == pytest.approx(2 * SIZE / 4, rel=1e-3)
    assert fully["rollout"] == 0
    assert not any(memory(PlacementStrategy.stand_alone)[0].pinned.values())
    on_cpu = replace(config(PlacementStrategy.fully_collocate), device=Device.cpu)  # where it goes into files
    assert not any(plan_memory(on_cpu, plan_placement(on_cpu), EVERY_ROLE)[0].pinned.values())


def test_recompute_keeps_one_number_per_layer_and_token() -> None:
    run = config(PlacementStrategy.stand_alone)
    kept = replace(run, actor=replace(run.actor, recompute=Recompute.none))
    full, none = (
        plan_memory(each, plan_placement(each), EVERY_ROLE)[0].phases["update_actor"]["actor"].activations for each in (run, kept)
    )
    layer = (8 * 3584 + (4 * 3584 + 3 * 512 + 5 * 18944) // 4) * 2
    top = (6 * 3584 + 2 * 18944 // 4 + 2 * 3584) * 2  # and the gradients of a layer
    rows = 152064 // 4
    head = 3 * 1024 * rows * 4 + 10 * rows * 3584  # 0.43 GiB of logits, 1.27 GiB of the output layer's gradient
    assert none == 4096 * (28 * layer + top) + head
    assert full == 4096 * (28 * 3584 * 2 + layer + top) + head


def test_sequence_parallelism_cuts_what_layers_hand_on() -> None:
    run = config(PlacementStrategy.stand_alone)
    cut = replace(run, actor=replace(run.actor, parallel=replace(run.actor.parallel, sequence_parallel=True)))
    whole, parts = (
        plan_memory(each, plan_placement(each), EVERY_ROLE)[0].phases["update_actor"]["actor"].activations for each in (run, cut)
    )
    # Of 28 layers' inputs, and of six of the eight hidden states of the one that is computed again, three quarters are elsewhere.
    assert whole - parts == 4096 * 2 * (28 * 3584 * 3 // 4 + 6 * 3584 * 3 // 4)


@pytest.mark.parametrize(
    ("virtual", "layers"),
    [
        (None, {0: 4 * 7, 3: 7}),  # micro-batches of 7 layers
        (7, {0: 2 * 3 + 6 * 4 + 1, 3: 6 * 4 + 1}),  # and of one
    ],
)
def test_a_stage_keeps_the_micro_batches_under_way(virtual: int | None, layers: dict[int, int]) -> None:
    run = config(PlacementStrategy.stand_alone)
    parallel = ParallelConfig(pipeline_parallel_size=4, virtual_pipeline_parallel_size=virtual)
    run = replace(run, critic=replace(run.critic, parallel=parallel, recompute=Recompute.full))
    devices = [device for device in plan_memory(run, plan_placement(run), EVERY_ROLE) if device.pool == "critic"]
    layer = (8 * 3584 + 4 * 3584 + 3 * 512 + 5 * 18944) * 2
    for stage in (0, 3):
        top = ((6 if stage == 3 else 2) * 3584 + 2 * 18944 + 2 * 3584) * 2
        assert devices[stage].phases["update_critic"]["critic"].activations == 4096 * (layers[stage] * 3584 * 2 + layer + top)


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
    run = replace(run, rollout=replace(run.rollout, sglang=SGLangConfig(server_args={"mem_fraction_static": 0.2})))
    (problem,) = budget_problems(run, plan_memory(run, plan_placement(run), EVERY_ROLE))
    assert problem == (
        "rollout.sglang.server_args.mem_fraction_static: 0.2 of placement.device_memory_gb 72 is 14.40 GiB, but the weights take 14.19 and "
        "one row of 32,768 tokens 1.75; use at least 0.23, or a larger rollout.tensor_parallel_size"
    )


def test_a_budget_names_the_device_the_phase_and_the_roles() -> None:
    over = config(PlacementStrategy.fully_collocate, device_memory_gb=32.0)
    devices = plan_memory(over, plan_placement(over), EVERY_ROLE)
    (problem,) = budget_problems(over, devices)
    assert problem.startswith("placement.device_memory_gb: in update_critic, device 0 of node 0 (pool all) would hold ")
    assert "critic " in problem
    assert "but has 32; use larger parallel sizes" in problem
    roomy = config(PlacementStrategy.fully_collocate, device_memory_gb=80.0, over_budget=OverBudget.warn)
    assert budget_problems(roomy, devices) == []
