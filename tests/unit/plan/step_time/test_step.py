"""Test the predicted time of whole steps: their schedule, and published runs."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from math import ceil
from statistics import median

import pytest

from benchmarks.tuning.published import (
    CONSTANTS_FILE,
    MEDIAN_ERROR,
    MISS,
    TABLE_FILE,
    WORST_FACTOR,
    factor,
    misordered,
    predict,
    read_runs,
    table_rows,
)
from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import ParallelConfig, PPOConfig, Recompute
from megarl.config.shipped import CONFIGS_DIR, with_published_models
from megarl.config.validate import read_architectures
from megarl.plan.placement.dataflow import PARAMETERS, Item
from megarl.plan.placement.layer_sizes import alike_stages
from megarl.plan.placement.model_state import model_state
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import PhaseTime, load_device
from megarl.plan.step_time.lengths import expected_lengths
from megarl.plan.step_time.role_time import role_work, times_of
from megarl.plan.step_time.step import (
    PredictedCosts,
    PredictedStep,
    combine,
    moved_items,
    offload_times,
    snapshot_times,
)

DEVICE = load_device("h100_80gb")


def shipped(name: str, *overrides: str) -> PPOConfig:
    path = CONFIGS_DIR / f"{name}.yaml"
    return with_published_models(load_config(PPOConfig, path, overrides), str(path))[0]


def predicted(config: PPOConfig) -> PredictedStep:
    costs = PredictedCosts(DEVICE, expected_lengths(config))
    return costs.predict_step(config, plan_placement(config), read_architectures(config)[0])


def combined(
    config: PPOConfig,
    times: dict[str, float],
    moves: dict[str, float],
    snapshots: dict[str, float] | None = None,
) -> PredictedStep:
    whole = {name: PhaseTime.of(products=seconds) for name, seconds in times.items()}
    return combine(config, plan_placement(config), whole, moves, DEVICE, expected_lengths(config), snapshots)


@pytest.mark.parametrize("name", ["qwen3_next_80b_grpo", "qwen3.6_35b_a3b_grpo"])
def test_gated_delta_nets_loop_over_chunks_without_their_kernels(name: str) -> None:
    """A pass launches 8 operations, of the 40 of a dense layer, for each 64 tokens of a mean row.

    Three quarters of the layers are gated delta nets.
    """
    config = shipped(name)
    architecture = read_architectures(config)[0]["actor"]
    lengths = expected_lengths(config)
    actor = model_roles(config)[0]
    assert actor.parallel.pipeline_parallel_size == 1
    (kernels, loops) = (
        role_work(config, actor, architecture, lengths, has_delta_kernels=each) for each in (True, False)
    )
    for phase, is_trained in (("old_log_prob", False), ("update_actor", True)):
        (with_kernels,) = kernels[phase].stages
        (without,) = loops[phase].stages
        assert without[:3] == with_kernels[:3]
        assert with_kernels[3] == 0
        # Forward; in training also the backward pass of twice as much, what is recomputed, and the loop's own
        # recomputation.
        how = actor.recomputation.how is Recompute.full
        num_passes = 1 + (3 + how) * is_trained
        assert without[3] == pytest.approx(
            8 / 40 * ceil(lengths.row / 64) * 3 / 4 * architecture.num_hidden_layers * num_passes
        )

    costs = PredictedCosts(DEVICE, lengths, has_delta_kernels=False)
    slower = costs.predict_step(config, plan_placement(config), read_architectures(config)[0])
    assert slower.seconds > 1.2 * predicted(config).seconds
    dense = shipped("qwen3_30b_a3b_grpo")
    plain = PredictedCosts(DEVICE, expected_lengths(dense), has_delta_kernels=False)
    step = plain.predict_step(dense, plan_placement(dense), read_architectures(dense)[0])
    assert step.seconds == predicted(dense).seconds


def test_the_update_of_each_stage_is_that_of_its_layers() -> None:
    """A rank without copies moves 30 bytes for each parameter.

    12 bytes of moments and master weights are read and written, 4 of a gradient are read, and 2 of a weight
    are written.
    """
    config = shipped("qwen2.5_7b_grpo")
    architecture = read_architectures(config)[0]["actor"]
    layout = ParallelConfig(pipeline_parallel_size=3, pipeline_layout=[5, 15, 8])
    actor = replace(model_roles(config)[0], parallel=layout)
    work = role_work(config, actor, architecture, expected_lengths(config))

    attention = 2 * 3584 * (3584 + 512) + 3584 + 2 * 512
    layer = attention + 3 * 3584 * 18944 + 2 * 3584
    embedding = 152064 * 3584
    held = (5 * layer + embedding, 15 * layer, 8 * layer + 3584 + embedding)
    assert [moved for _, moved in work["update_actor"].updates] == pytest.approx([30 * each for each in held])
    assert work["old_log_prob"].updates == ()

    # The stage in the middle takes longest, also for the products of its layers.
    times = times_of(work, DEVICE)["update_actor"].parts
    steps = work["update_actor"].num_passes
    assert times["optimizer"] == pytest.approx(steps * 30 * held[1] / DEVICE.memory_bytes_s)


def test_the_stage_with_the_most_state_is_moved_the_longest() -> None:
    """The middle stage of three has 15 of 28 layers; a weight in bfloat16 has 2 bytes."""
    config = shipped("qwen2.5_7b_grpo")
    layout = ParallelConfig(pipeline_parallel_size=3, pipeline_layout=[5, 15, 8])
    config = replace(config, actor=replace(config.actor, parallel=layout))
    moved = {"update_actor": frozenset({Item("actor", PARAMETERS)})}
    moves = offload_times(config, moved, read_architectures(config)[0], DEVICE)
    layer = 2 * 3584 * (3584 + 512) + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584
    assert moves["update_actor"] == pytest.approx(2 * 15 * layer / (DEVICE.host_gb_s * 1e9))


def test_stages_with_the_same_layers_are_alike() -> None:
    """The first three layers of DeepSeek-V3 are dense."""
    architecture = read_architectures(shipped("deepseek_v3_671b_grpo"))[0]["actor"]
    layout = ParallelConfig(pipeline_parallel_size=7, pipeline_layout=[2, 2, 2, 2, 3, 2, 48])
    assert alike_stages(architecture, layout) == (0, 1, 2, 2, 4, 2, 6)
    alone = ParallelConfig(pipeline_parallel_size=1)
    assert alike_stages(architecture, alone) == (0,)


TIMES = {
    "gen": 100.0,
    "old_log_prob": 10.0,
    "ref": 20.0,
    "values": 30.0,
    "update_critic": 40.0,
    "update_actor": 50.0,
    "update_weights": 5.0,
}


def test_roles_that_share_devices_take_turns() -> None:
    config = shipped("qwen2.5_7b_ppo", "placement.strategy=fully_collocate")
    step = combined(config, TIMES, {"update_actor": 3.0})
    overhead_s = config.samples_per_step * DEVICE.sample_ms / 1e3
    assert step.seconds == pytest.approx(sum(TIMES.values()) + 3.0 + overhead_s)
    # Every phase begins when the one before ends.
    for one, other in zip(step.schedule, step.schedule[1:], strict=False):
        assert other.start_s == pytest.approx(one.end_s)


def test_state_is_moved_in_phases_without_a_time_too() -> None:
    config = shipped("qwen2.5_7b_ppo", "placement.strategy=fully_collocate")
    times = {name: seconds for name, seconds in TIMES.items() if name != "ref"}
    overhead_s = config.samples_per_step * DEVICE.sample_ms / 1e3
    assert combined(config, times, {"ref": 7.0}).seconds == pytest.approx(
        sum(times.values()) + 7.0 + overhead_s
    )


def test_roles_on_their_own_devices_work_at_the_same_time() -> None:
    config = shipped("qwen2.5_7b_ppo_split")
    step = combined(config, TIMES, {})
    starts = {phase.name: phase.start_s for phase in step.schedule}
    # Scoring follows generation: actor and reference share devices, the critic has its own.
    assert starts["old_log_prob"] == starts["values"] == 100
    assert starts["ref"] == 110
    # The critic's update needs all scores, and the actor's update does not wait for it.
    assert starts["update_critic"] == starts["update_actor"] == 130
    assert step.seconds == pytest.approx(185 + config.samples_per_step * DEVICE.sample_ms / 1e3)


@pytest.mark.parametrize(("generation_s", "cycle_s"), [(100.0, 105.0), (20.0, 65.0)])
def test_a_run_that_generates_ahead_takes_the_longer_of_both_chains(
    generation_s: float, cycle_s: float
) -> None:
    config = shipped("qwen2.5_7b_async_grpo")
    times = {"gen": generation_s, "old_log_prob": 10.0, "update_actor": 50.0, "update_weights": 5.0}
    step = combined(config, times, {})
    assert step.seconds == pytest.approx(cycle_s + config.samples_per_step * DEVICE.sample_ms / 1e3)


def test_generation_ahead_hides_the_longest_samples() -> None:
    waiting = predicted(shipped("qwen2.5_7b_async_grpo", "rollout.max_staleness=0")).phases["gen"].seconds
    ahead = predicted(shipped("qwen2.5_7b_async_grpo", "rollout.max_staleness=2")).phases["gen"].seconds
    assert ahead < 0.9 * waiting


RECOVERY = "recovery.enabled=true"


@pytest.mark.parametrize(("ends_s", "every", "wait_s"), [(90.0, 1, 0.0), (117.0, 1, 7.0), (117.0, 2, 3.5)])
def test_a_step_waits_for_what_generation_does_not_hide_of_a_snapshot(
    ends_s: float, every: int, wait_s: float
) -> None:
    config = shipped("qwen2.5_7b_grpo", RECOVERY, f"recovery.snapshot_every_steps={every}")
    times = {"gen": 100.0, "old_log_prob": 10.0, "update_actor": 50.0, "update_weights": 5.0}
    # The phase that waits begins after 110 s.
    step = combined(config, times, {}, {"update_actor": ends_s})
    assert step.phases["update_actor"].seconds == pytest.approx(50 + wait_s)
    assert step.phases["update_actor"].parts.get("snapshot", 0.0) == pytest.approx(wait_s)
    without = combined(config, times, {})
    assert step.seconds == pytest.approx(without.seconds + wait_s)
    assert all("snapshot" not in phase.time.parts for phase in without.schedule)


@pytest.mark.parametrize(("generation_s", "wait_s"), [(20.0, 25.0), (100.0, 0.0)])
def test_generation_ahead_hides_a_snapshot_only_if_training_waits_for_it(
    generation_s: float, wait_s: float
) -> None:
    """Training begins at once, and its update waits from 10 s to 35 s; a step takes 105 s of generation."""
    config = shipped("qwen2.5_7b_async_grpo", RECOVERY)
    times = {"gen": generation_s, "old_log_prob": 10.0, "update_actor": 50.0, "update_weights": 5.0}
    step = combined(config, times, {}, {"update_actor": 35.0})
    assert step.seconds == pytest.approx(combined(config, times, {}).seconds + wait_s)


def snapshots_of(config: PPOConfig) -> dict[str, float]:
    architectures = read_architectures(config)[0]
    plan = plan_placement(config)
    moved = moved_items(plan)
    moves = offload_times(config, moved, architectures, DEVICE)
    return snapshot_times(config, plan, moved, moves, architectures, DEVICE)


NUM_PARAMETERS = 7_615_616_512  # of Qwen2.5-7B
NUM_OUTPUTS = 152_064 * 3_584  # parameters of its output layer, which a critic does not have
HOST_BYTES_S = 63e9


def test_the_end_of_a_snapshot_by_hand() -> None:
    """Ranks of TP 2 x DP 4 have half of the bfloat16 weights, and 12 bytes of each eighth parameter.

    Norms, which both ranks have whole, add less than 0.1 %. The optimizer's state has left the device for the
    weight sync; the weights leave it for generation and return for scoring, which waits.
    """
    weights = NUM_PARAMETERS * 2 / 2
    state = NUM_PARAMETERS * 12 / 8
    copied_s = (weights + state) / HOST_BYTES_S
    moved_s = weights / HOST_BYTES_S
    ends_s = snapshots_of(shipped("qwen2.5_7b_grpo", RECOVERY))
    assert ends_s == {"old_log_prob": pytest.approx(copied_s + moved_s, rel=1e-3)}
    # Generation takes longer.
    assert predicted(shipped("qwen2.5_7b_grpo", RECOVERY)) == predicted(shipped("qwen2.5_7b_grpo"))
    assert snapshots_of(shipped("qwen2.5_7b_grpo")) == {}


def test_models_on_the_same_devices_share_the_link_of_their_snapshots() -> None:
    """Ranks of TP 4, without replicas; one with TP 4 x DP 2 for the actor on devices of its own."""
    apart = snapshots_of(shipped("qwen2.5_7b_ppo_split", RECOVERY))
    of_actor = NUM_PARAMETERS * (2 / 4 + 12 / 8)
    of_critic = (NUM_PARAMETERS - NUM_OUTPUTS) * (2 / 4 + 12 / 4)
    assert apart == {
        "update_actor": pytest.approx(of_actor / HOST_BYTES_S, rel=1e-3),
        "update_critic": pytest.approx(of_critic / HOST_BYTES_S, rel=1e-3),
    }
    shared = snapshots_of(shipped("qwen2.5_7b_ppo", RECOVERY, "placement.strategy=fully_collocate"))
    of_both = NUM_PARAMETERS * (2 / 4 + 12 / 4) + of_critic
    assert shared == {
        "old_log_prob": pytest.approx((of_both + NUM_PARAMETERS * 2 / 4) / HOST_BYTES_S, rel=1e-3),
        "values": pytest.approx(of_both / HOST_BYTES_S, rel=1e-3),
    }


def test_a_slow_link_makes_steps_wait() -> None:
    config = shipped("qwen2.5_7b_async_grpo", RECOVERY)
    slow = replace(DEVICE, host_gb_s=0.5)
    costs = PredictedCosts(slow, expected_lengths(config))
    step = costs.predict_step(config, plan_placement(config), read_architectures(config)[0])
    update = step.phases["update_actor"]
    start_s = predicted(config).phases["ref"].seconds + predicted(config).phases["old_log_prob"].seconds
    copied_s = NUM_PARAMETERS * (2 / 4 + 12 / 8) / 0.5e9
    assert update.parts["snapshot"] == pytest.approx(copied_s - start_s, rel=2e-3)


def test_parts_of_a_step_sum_to_its_phases() -> None:
    step = predicted(shipped("qwen3_30b_a3b_grpo"))
    for phase in step.schedule:
        assert sum(phase.time.parts.values()) == pytest.approx(phase.time.seconds)
    assert step.tokens_per_device_s == pytest.approx(step.tokens / step.seconds / step.num_devices)


def test_more_devices_never_slow_a_layout_down_and_recomputation_always_does() -> None:
    base = predicted(shipped("qwen3_32b_grpo"))
    without = predicted(shipped("qwen3_32b_grpo", "actor.recompute=none"))
    assert without.phases["update_actor"].seconds < base.phases["update_actor"].seconds
    doubled = predicted(
        shipped(
            "qwen3_32b_grpo",
            "actor.parallel.data_parallel_size=8",
            "rollout.num_replicas=16",
            "placement.num_nodes=8",
        )
    )
    assert 0.5 * base.seconds < doubled.seconds < base.seconds


def test_published_step_times() -> None:
    """`python -m benchmarks.tuning.published` predicts each model with constants of the other models."""
    runs = read_runs()
    steps = [predict(run, DEVICE) for run in runs]
    factors = [factor(run, step) for run, step in zip(runs, steps, strict=True)]
    assert median(factors) - 1 <= MEDIAN_ERROR
    assert max(factors) <= WORST_FACTOR
    assert misordered(runs, steps) == []


def test_the_page_of_published_steps_is_what_is_predicted_now() -> None:
    """`python -m benchmarks.tuning.published --write` writes it again."""
    rows = table_rows(json.loads(CONSTANTS_FILE.read_text(encoding="utf-8")))
    with TABLE_FILE.open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == rows
    for row in rows:
        ratio = float(row["predicted / published"])
        assert (max(ratio, 1 / ratio) > MISS) == bool(row["note"]), row


def test_the_stages_of_published_runs_have_all_layers() -> None:
    for run in (*read_runs(), *read_runs("others")):
        layout = run.config.actor.parallel.pipeline_layout
        assert layout is None or sum(layout) == run.policy.num_hidden_layers


def test_state_of_an_uneven_pipeline_moves_as_long_as_in_its_fullest_stage() -> None:
    run = next(each for each in read_runs() if each.model == "DeepSeek-V3" and not each.staleness)
    moves = offload_times(
        run.config, moved_items(run.plan), dict.fromkeys(("actor", "reference"), run.policy), DEVICE
    )
    states = [
        model_state(model_roles(run.config)[0], run.policy, run.config.model.dtype, stage)
        for stage in range(16)
    ]
    # The first stage has three dense layers, the next ones have four with experts each.
    assert states[0].optimizer < states[1].optimizer
    assert moves["update_actor"] >= states[1].optimizer / (DEVICE.host_gb_s * 1e9)
