"""Forecast step time and idle time by `rollout.max_staleness` and split of the devices."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import NamedTuple

from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.machine.folder_kinds import is_run, no_run
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.step_time.measured_run import LAST_STEPS, last_median
from megarl.rehearse.simulation.run import Script, SimulatedRun, Simulation
from megarl.tracking.metrics_file import Points, read_metrics
from megarl.tracking.run_files import CONFIG_FILE, METRICS_FILE
from megarl.tracking.samples import read_samples, sample_files

STALENESSES = (0, 1, 2, 4)
# Limits of the simulated step; slots are scaled down in the same ratio.
_STEPS = 16
_MOST_PROMPTS = 32
_MOST_SPLITS = 5
_WITHIN_PROMPT = 0.7  # correlation of log lengths among the samples of a prompt
_LONGEST_OF = 1000  # one sample in this many is as long as the longest


class Split(NamedTuple):
    """A split of the devices between trainer and engines.

    Attributes:
        of: Training time relative to the configured number of devices.
    """

    trainer_devices: int
    num_engines: int
    of: float


# The runs that were simulated, by the split of the devices and `max_staleness`.
Forecasts = Mapping[tuple[Split, int], SimulatedRun]


def script_of(config: PPOConfig, lengths: Sequence[Sequence[int]]) -> Script:
    """Return the script that simulates a run, without its times.

    It has at most 32 prompts per step, and the configured number of slots per prompt: the idle shares are
    about those of the whole step.

    Args:
        lengths: Tokens of the samples of each prompt, in data order.
    """
    n = config.rollout.n
    whole = config.trainer.prompts_per_step
    prompts = min(whole, _MOST_PROMPTS)
    return Script(
        lengths=[[of_prompt[place % len(of_prompt)] for place in range(n)] for of_prompt in lengths],
        prompts_per_step=prompts,
        total_steps=_STEPS,
        num_engines=config.rollout.num_replicas,
        slots=max(1, round(config.rollout.max_concurrency * prompts / whole)),
    )


def forecast(script: Script, split: Split, max_staleness: int) -> SimulatedRun:
    """Simulate a script, whose training time is that on the configured devices, with a split."""
    training_s = script.training_s * split.of
    changed = replace(
        script, num_engines=split.num_engines, training_s=training_s, max_staleness=max_staleness
    )
    return Simulation(changed).run()


def splits_of(config: PPOConfig, plan: PlacementPlan) -> list[Split]:
    """Return at most five splits of the devices, from few engines to many.

    The configured split is among them.

    A trainer on half the devices is assumed to take twice as long.

    Raises:
        ValueError: Engines and trainer share devices.
    """
    engine = config.rollout.devices_per_engine
    if any(plan.share_devices("rollout", role) for role in plan.roles if role != "rollout"):
        raise ValueError(
            f"placement.strategy={plan.strategy.value}: the engines share their devices with other roles, so "
            "there is nothing to split; simulate placement.strategy=split_collocate"
        )

    # Find the numbers of engines that leave whole replicas of the trained model.
    trainer = plan.num_devices - config.rollout.num_replicas * engine
    model = config.actor.parallel.replica_size
    least = trainer % model  # devices of other roles, which are not a multiple of the model's
    possible = [
        number
        for number in range(1, (plan.num_devices - 1) // engine + 1)
        if (left := plan.num_devices - number * engine - least) >= model and left % model == 0
    ]

    # Choose splits evenly among them, and always include the configured one.
    chosen = {
        config.rollout.num_replicas,
        *(possible[index * (len(possible) - 1) // (_MOST_SPLITS - 1)] for index in range(_MOST_SPLITS)),
    }
    while len(chosen) > _MOST_SPLITS:
        chosen.remove(min(chosen - {config.rollout.num_replicas, max(chosen)}))
    devices = {number: plan.num_devices - number * engine for number in sorted(chosen)}

    return [Split(left, number, trainer / left) for number, left in devices.items()]


# ---- assumed lengths


def log_normal(mean: float, longest: int, n: int, seed: int = 0) -> list[list[int]]:
    """Draw sample lengths for each prompt of a simulation.

    Lengths are log-normal with this mean before truncation. One in a thousand exceeds `longest` and is
    truncated.

    Raises:
        ValueError: No log-normal distribution has this mean and maximum.
    """
    # Solve for the distribution's parameters from the mean and a quantile.
    reach = NormalDist().inv_cdf(1 - 1 / _LONGEST_OF)
    if not 1 <= mean < longest or (spare := reach**2 - 2 * math.log(longest / mean)) < 0:
        most = math.floor(mean * math.exp(reach**2 / 2)) if mean >= 1 else 0
        raise ValueError(
            f"a mean of {mean:g} and a maximum of {longest:,}: the mean must be at least 1, and the maximum "
            f"above the mean and at most {most:,}"
        )

    sigma = reach - math.sqrt(spare)
    center = math.log(mean) - sigma**2 / 2
    chance = random.Random(seed)
    drawn = []

    # Samples of the same prompt share a part of their deviation.
    for _ in range(_STEPS * _MOST_PROMPTS):
        prompt = chance.gauss(0, 1) * _WITHIN_PROMPT**0.5
        own = [chance.gauss(0, 1) * (1 - _WITHIN_PROMPT) ** 0.5 for _ in range(n)]
        drawn.append([max(1, min(longest, round(math.exp(center + sigma * (prompt + one))))) for one in own])

    return drawn


# ---- a measured run


def measured(run_dir: Path) -> tuple[list[list[int]], dict[str, float]]:
    """Read the workload and times of a run at max_staleness 0 that has kept samples.

    The lengths are those of the last kept samples, by prompt. The times, by their names in a script, are
    medians over the last steps. The time per token is chosen so that a simulated step generates for as long
    as the run's steps did.

    Raises:
        ConfigError, MetricsFileError, SamplesFileError: A file cannot be read.
        ValueError: The run lacks data that the simulation needs.
    """
    if not is_run(run_dir):
        raise ValueError(no_run(run_dir))
    config = load_config(PPOConfig, run_dir / CONFIG_FILE)
    series = read_metrics(run_dir / METRICS_FILE)

    if config.rollout.max_staleness:
        raise ValueError(
            f"{run_dir}: ran with rollout.max_staleness={config.rollout.max_staleness}, so its waiting time "
            "does not show how long generation takes; give a run at 0 (a few steps are enough)"
        )

    if missing := [name for name in ("timing_s/step", "timing_s/gen") if name not in series]:
        raise ValueError(
            f"{run_dir / METRICS_FILE}: has no {' and no '.join(missing)}; give a reinforcement learning run"
        )

    lengths = _kept_lengths(run_dir)
    generating_s, push_s = (
        last_median(series, name) or 0.0 for name in ("timing_s/gen", "timing_s/update_weights")
    )
    other = sum(_mean(series, name) for name in ("timing_s/testing", "timing_s/save_checkpoint"))

    # The training time is the rest of a step without generation, weight sync, validation and checkpoint.
    training_s = max(
        0.0,
        _mean(series, "timing_s/step")
        - _mean(series, "timing_s/gen")
        - _mean(series, "timing_s/update_weights")
        - other,
    )

    # Simulate with one second per token to learn how many token times a generation takes.
    ticks = Simulation(replace(script_of(config, lengths), total_steps=4)).run().step_s

    return lengths, {"training_s": training_s, "token_s": generating_s / ticks, "push_s": push_s}


def _mean(series: dict[str, Points], name: str) -> float:
    """Return the mean over the last steps. A step without the metric counts as 0."""
    last = series["timing_s/step"].steps[-LAST_STEPS:]
    values = dict(zip(series[name].steps, series[name].values, strict=True)) if name in series else {}
    return fmean(values.get(step, 0.0) for step in last)


def _kept_lengths(run_dir: Path) -> list[list[int]]:
    groups: dict[tuple[int, str], list[int]] = {}

    # Read the last steps only: lengths change during training.
    for step, path in sorted(sample_files(run_dir).items())[-_STEPS:]:
        rows = read_samples(path).rows
        for uid, length in zip(rows["uid"].to_pylist(), rows["response_length"].to_pylist(), strict=True):
            groups.setdefault((step, uid), []).append(max(1, length))

    if not groups:
        raise ValueError(
            f"{run_dir}: has no samples, whose lengths are needed; set tracking.samples_every_steps, "
            f"or give --lengths"
        )

    return list(groups.values())
