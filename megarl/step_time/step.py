"""The predicted time of a whole step: its phases in order, on the devices that they share. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megarl.config.roles import model_roles
from megarl.config.schema import PPOConfig
from megarl.models.architecture import Architecture
from megarl.placement.dataflow import phases_of, waits_for
from megarl.placement.placement_plan import PlacementPlan
from megarl.step_time.device import DeviceProfile
from megarl.step_time.generation import generation_time
from megarl.step_time.lengths import Lengths
from megarl.step_time.phase_time import PhaseTime
from megarl.step_time.role_time import role_times
from megarl.step_time.transfers import moved_items, offload_times, push_time, snapshot_times

PUSH = "update_weights"
GENERATION = "gen"


class PlacedPhase(NamedTuple):
    """A phase in the schedule of a step.

    Attributes:
        pools: The pools whose devices work.
        start_s: When it begins, in seconds after the step.
        time: How long it takes.
    """

    name: str
    pools: tuple[str, ...]
    start_s: float
    time: PhaseTime

    @property
    def end_s(self) -> float:
        return self.start_s + self.time.seconds


class PredictedStep(NamedTuple):
    """The predicted time of a step.

    Attributes:
        seconds: The time from one weight sync to the next.
        schedule: The phases in the order in which they begin.
        tokens: The prompt and response tokens that the step trains.
        trained_s: The seconds from the first phase after generation to the end of the weight sync, if
            generation runs ahead; None if training waits for generation.
    """

    seconds: float
    schedule: tuple[PlacedPhase, ...]
    tokens: float
    num_devices: int
    trained_s: float | None = None

    @property
    def tokens_per_device_s(self) -> float:
        """The trained tokens per second and device."""
        return self.tokens / self.seconds / self.num_devices

    @property
    def phases(self) -> dict[str, PhaseTime]:
        return {each.name: each.time for each in self.schedule}

    @property
    def driver_s(self) -> dict[str, float]:
        """The seconds of each phase as the driver measures them: it only waits for samples of a step.

        A run that generates ahead waits for as long as training is faster than generation.
        """
        seconds = {name: time.seconds for name, time in self.phases.items()}
        if self.trained_s is not None:
            seconds[GENERATION] = max(0.0, seconds[GENERATION] + seconds[PUSH] - self.trained_s)
        return seconds


def predict_step(
    config: PPOConfig,
    plan: PlacementPlan,
    architectures: Mapping[str, Architecture],
    device: DeviceProfile,
    lengths: Lengths,
) -> PredictedStep:
    """Return the predicted time of a step in the steady state.

    Args:
        config: A valid configuration.
        architectures: The architecture of each model role, by its name.
        device: The kind of all devices.
    """
    times = {GENERATION: generation_time(config, architectures["actor"], device, lengths, _ahead(config))}
    for role in model_roles(config):
        times |= role_times(config, role, architectures[role.name], device, lengths)
    times[PUSH] = push_time(config, plan, architectures["actor"], device)
    moved = moved_items(plan)
    moves = offload_times(config, moved, architectures, device)
    snapshots = snapshot_times(config, plan, moved, moves, architectures, device)
    return combine(config, plan, times, moves, device, lengths, snapshots)


def combine(
    config: PPOConfig,
    plan: PlacementPlan,
    times: Mapping[str, PhaseTime],
    moves: Mapping[str, float],
    device: DeviceProfile,
    lengths: Lengths,
    snapshots: Mapping[str, float] | None = None,
) -> PredictedStep:
    """Return the step that consists of these phases.

    A phase begins when the phases that it waits for have ended and its devices are free. A run that
    generates ahead alternates between two chains, generation and training, whichever is longer.

    Args:
        times: The time of each phase, by its name. Phases without a time, of the driver and of reward
            functions, are in the device's `sample_ms`.
        moves: The seconds of offloading and restoring state at the begin of phases.
        snapshots: When snapshots end for which a phase waits, by its name, in seconds after the step before
            (`snapshot_times`). Each step has its share of the wait.
    """
    # A phase without a predicted time of its own still takes the time of its moves.
    whole = {
        name: times.get(name, PhaseTime.of()).plus(PhaseTime.of(offload=moves.get(name, 0.0)))
        for name in dict.fromkeys((*times, *moves))
    }
    is_ahead = _ahead(config) > 0
    every = config.recovery.snapshot_every_steps
    schedule = _scheduled(plan, whole, snapshots or {}, every, without=(GENERATION,) if is_ahead else ())
    end_s = max(each.end_s for each in schedule)
    trained_s = None

    if is_ahead:
        # Training and the weight sync of a step pass while engines generate the next ones.
        generation = PlacedPhase(GENERATION, _pools(plan, ("rollout",)), 0.0, whole[GENERATION])
        schedule = [generation, *schedule]
        trained_s = end_s
        end_s = max(end_s, generation.time.seconds + whole[PUSH].seconds)

    tokens = config.samples_per_step * lengths.row
    seconds = end_s + config.samples_per_step * device.sample_ms / 1e3
    return PredictedStep(seconds, tuple(schedule), tokens, plan.num_devices, trained_s)


def _scheduled(
    plan: PlacementPlan,
    times: Mapping[str, PhaseTime],
    snapshots: Mapping[str, float],
    every: int,
    without: tuple[str, ...],
) -> list[PlacedPhase]:
    step = phases_of(plan.roles)
    waits = waits_for(step)
    free_s: dict[tuple[int, int], float] = {}
    ends_s: dict[str, float] = {}
    schedule = []

    for phase in step:
        time = times.get(phase.name, PhaseTime.of())
        if phase.name in without:
            time = PhaseTime.of()
        devices = frozenset().union(*(plan.group_of(role).devices for role in phase.roles))
        start_s = max(
            (0.0, *(ends_s[name] for name in waits[phase.name]), *(free_s.get(each, 0.0) for each in devices))
        )
        # What generation and earlier phases do not hide of a snapshot delays each of `every` steps.
        time = time.plus(PhaseTime.of(snapshot=(snapshots.get(phase.name, 0.0) - start_s) / every))
        ends_s[phase.name] = start_s + time.seconds
        free_s |= dict.fromkeys(devices, ends_s[phase.name])
        if time.seconds:
            schedule.append(PlacedPhase(phase.name, _pools(plan, phase.roles), start_s, time))

    return schedule


def _pools(plan: PlacementPlan, roles: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(plan.group_of(role).pool for role in roles))


def _ahead(config: PPOConfig) -> int:
    return config.rollout.max_staleness
