"""Test the predicted time of whole steps: their schedule, and published runs."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.tuning.published import MEDIAN_ERROR, WORST_FACTOR, factor, misordered, predict, read_runs
from megarl.config.load import load_config
from megarl.config.published import with_published_models
from megarl.config.schema import PPOConfig
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.validate import read_architectures
from megarl.placement.plan import plan_placement
from megarl.step_time.device_files import load_device
from megarl.step_time.lengths import expected_lengths
from megarl.step_time.phase_time import PhaseTime
from megarl.step_time.step import PredictedStep, combine, predict_step

DEVICE = load_device("h100_80gb")


def shipped(name: str, *overrides: str) -> PPOConfig:
    path = CONFIGS_DIR / f"{name}.yaml"
    return with_published_models(load_config(PPOConfig, path, overrides), str(path))[0]


def predicted(config: PPOConfig) -> PredictedStep:
    return predict_step(
        config, plan_placement(config), read_architectures(config)[0], DEVICE, expected_lengths(config)
    )


def combined(config: PPOConfig, times: dict[str, float], moves: dict[str, float]) -> PredictedStep:
    whole = {name: PhaseTime.of(products=seconds) for name, seconds in times.items()}
    return combine(config, plan_placement(config), whole, moves, DEVICE, expected_lengths(config))


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
