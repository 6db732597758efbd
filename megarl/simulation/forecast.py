"""What a step would take, and who would wait, for several `rollout.max_staleness` and splits of the
devices."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import NamedTuple

from megarl.config.load import load_config
from megarl.config.schema import OnUpdate, PPOConfig
from megarl.placement.placement_plan import PlacementPlan
from megarl.simulation.run import Script, SimulatedRun, Simulation
from megarl.tracking.metrics_file import Points, read_metrics
from megarl.tracking.run_files import CONFIG_FILE, METRICS_FILE
from megarl.tracking.samples import read_samples, sample_files

STALENESSES = (0, 1, 2, 4)
# of what is simulated; slots are fewer in the same ratio
_STEPS = 16
_MOST_PROMPTS = 32
_MOST_SPLITS = 5
_LAST_STEPS = 20  # of a run, that its times are of
_WITHIN_PROMPT = 0.7  # correlation of the logarithms of lengths among the samples of a prompt
_LONGEST_OF = 1000  # samples, of which one is as long as the longest


class Times(NamedTuple):
    """In seconds. training_s: of a step, on the devices of the configuration, without its wait and its push.
    token_s: until a sample has its next token. push_s: of the weights."""

    training_s: float
    token_s: float
    push_s: float = 0.0


class Split(NamedTuple):
    """of: the training time of the configuration, that it takes on so many devices."""

    trainer_devices: int
    num_engines: int
    of: float


class Forecast(NamedTuple):
    """trainer_idle: share of the time in which the trainer waits for samples. slots_in_use: of all engines'.
    mean_age: in versions of the weights."""

    split: Split
    max_staleness: int
    step_s: float
    trainer_idle: float
    slots_in_use: float
    mean_age: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """lengths: tokens of the samples of each prompt, in the order of the data, which starts again at its end.
    slots: of an engine."""

    lengths: Sequence[Sequence[int]]
    prompts_per_step: int
    slots: int

    @classmethod
    def of(cls, config: PPOConfig, lengths: Sequence[Sequence[int]]) -> Work:
        prompts = config.trainer.prompts_per_step
        n = config.rollout.n
        fitting = [[of_prompt[place % len(of_prompt)] for place in range(n)] for of_prompt in lengths]
        return cls(lengths=fitting, prompts_per_step=prompts, slots=config.rollout.max_concurrency)


def forecast(work: Work, times: Times, split: Split, max_staleness: int) -> Forecast:
    outcome = _simulated(
        work, times, split.num_engines, training_s=times.training_s * split.of, max_staleness=max_staleness
    )
    return Forecast(split, max_staleness, outcome.step_s, outcome.waiting, outcome.busy, outcome.mean_age)


def _simulated(
    work: Work, times: Times, num_engines: int, *, training_s: float, max_staleness: int, steps: int = _STEPS
) -> SimulatedRun:
    """With as many slots for each prompt as there are, but at most 32 prompts a step."""
    # Simulate a smaller step with proportionally fewer slots: the waiting shares are about the same.
    prompts = min(work.prompts_per_step, _MOST_PROMPTS)
    slots = max(1, round(work.slots * prompts / work.prompts_per_step))
    script = Script(
        lengths=work.lengths,
        prompts_per_step=prompts,
        total_steps=steps,
        max_staleness=max_staleness,
        on_update=OnUpdate.continue_,
        num_engines=num_engines,
        slots=slots,
        token_s=times.token_s,
        training_s=training_s,
        push_s=times.push_s,
    )

    return Simulation(script).run()


def splits_of(config: PPOConfig, plan: PlacementPlan) -> list[Split]:
    """At most five ways to deal the devices of the placement, from few engines to many; that of the
    configuration is among them. A trainer on half the devices takes twice as long. Raises ValueError where
    engines and trainer take turns."""
    engine = config.rollout.tensor_parallel_size
    if any(plan.share_devices("rollout", role) for role in plan.roles if role != "rollout"):
        raise ValueError(
            f"placement.strategy={plan.strategy.value}: the engines take turns with others on their "
            f"devices, so there is nothing to split; "
            "simulate placement.strategy=split_collocate"
        )

    # Find the numbers of engines that leave whole replicas of the trained model.
    own = config.rollout.num_replicas * engine
    trainer = plan.num_devices - own
    model = config.actor.parallel.replica_size
    least = trainer % model  # of devices of other roles, which are no multiple
    possible = [
        number
        for number in range(1, (plan.num_devices - 1) // engine + 1)
        if (left := plan.num_devices - number * engine - least) >= model and left % model == 0
    ]

    # Choose splits evenly among them, and always include that of the configuration.
    chosen = {
        config.rollout.num_replicas,
        *(possible[index * (len(possible) - 1) // (_MOST_SPLITS - 1)] for index in range(_MOST_SPLITS)),
    }
    while len(chosen) > _MOST_SPLITS:
        chosen.remove(min(chosen - {config.rollout.num_replicas, max(chosen)}))
    devices = {number: plan.num_devices - number * engine for number in sorted(chosen)}

    return [Split(left, number, trainer / left) for number, left in devices.items()]


# ---- lengths that are given


def log_normal(mean: float, longest: int, n: int, seed: int = 0) -> list[list[int]]:
    """Tokens of the samples of each prompt of a simulation: log-normal with this mean, before those are cut
    that are longer than the longest, of which there is one in a thousand. Raises ValueError where no
    log-normal distribution is so."""
    # Solve for the distribution's parameters from the mean and a quantile.
    reach = NormalDist().inv_cdf(1 - 1 / _LONGEST_OF)
    if not 1 <= mean < longest or (spare := reach**2 - 2 * math.log(longest / mean)) < 0:
        most = math.floor(mean * math.exp(reach**2 / 2)) if mean >= 1 else 0
        raise ValueError(
            f"a mean of {mean:g} and {longest:,} at most: the mean must be 1 or more, and the most above "
            f"it, up to {most:,}"
        )

    sigma = reach - math.sqrt(spare)
    centre = math.log(mean) - sigma**2 / 2
    chance = random.Random(seed)
    drawn = []

    # Samples of the same prompt share a part of their deviation.
    for _ in range(_STEPS * _MOST_PROMPTS):
        prompt = chance.gauss(0, 1) * _WITHIN_PROMPT**0.5
        own = [chance.gauss(0, 1) * (1 - _WITHIN_PROMPT) ** 0.5 for _ in range(n)]
        drawn.append([max(1, min(longest, round(math.exp(centre + sigma * (prompt + one))))) for one in own])

    return drawn


# ---- a run


def measured(run_dir: Path) -> tuple[list[list[int]], Times]:
    """Of a run at max_staleness 0 that has kept samples: the lengths of its last ones, by prompt, and its
    times, medians of its last steps.

    A token takes as long as makes a simulated step generate for as long as the run's have. Raises
    ConfigError, MetricsFileError, SamplesFileError, and ValueError where the run has not what is needed.
    """
    config = load_config(PPOConfig, run_dir / CONFIG_FILE)
    series = read_metrics(run_dir / METRICS_FILE)

    if config.rollout.max_staleness:
        raise ValueError(
            f"{run_dir}: ran with rollout.max_staleness={config.rollout.max_staleness}, and its wait for "
            f"samples does not say how long "
            "they take; give a run at 0, of which some steps are enough"
        )

    if missing := [name for name in ("timing_s/step", "timing_s/gen") if name not in series]:
        raise ValueError(
            f"{run_dir / METRICS_FILE}: has no {' and no '.join(missing)}; give a run of reinforcement "
            f"learning"
        )

    lengths = _kept_lengths(run_dir)
    generating_s, push_s = (_median(series.get(name)) for name in ("timing_s/gen", "timing_s/update_weights"))
    other = sum(_mean(series, name) for name in ("timing_s/testing", "timing_s/save_checkpoint"))

    # Training time is what is left of a step without generation, push, validation and checkpoint.
    training_s = max(
        0.0,
        _mean(series, "timing_s/step")
        - _mean(series, "timing_s/gen")
        - _mean(series, "timing_s/update_weights")
        - other,
    )

    # Simulate with one second per token to learn how many token times a generation takes.
    unit = Times(training_s=0.0, token_s=1.0)
    ticks = _simulated(
        Work.of(config, lengths), unit, config.rollout.num_replicas, training_s=0.0, max_staleness=0, steps=4
    ).step_s

    return lengths, Times(training_s, generating_s / ticks, push_s)


def _median(points: Points | None) -> float:
    return 0.0 if points is None else median(points.values[-_LAST_STEPS:])


def _mean(series: dict[str, Points], name: str) -> float:
    """Over the last steps; a step that has no such thing took none."""
    last = series["timing_s/step"].steps[-_LAST_STEPS:]
    values = dict(zip(series[name].steps, series[name].values, strict=True)) if name in series else {}
    return fmean(values.get(step, 0.0) for step in last)


def _kept_lengths(run_dir: Path) -> list[list[int]]:
    groups: dict[tuple[int, str], list[int]] = {}

    # Read the last steps only: lengths change in the course of training.
    for step, path in sorted(sample_files(run_dir).items())[-_STEPS:]:
        rows = read_samples(path).rows
        for uid, length in zip(rows["uid"].to_pylist(), rows["response_length"].to_pylist(), strict=True):
            groups.setdefault((step, uid), []).append(max(1, length))

    if not groups:
        raise ValueError(
            f"{run_dir}: has kept no samples, whose lengths are needed; see tracking.samples_every_steps, "
            f"or give --lengths"
        )

    return list(groups.values())
