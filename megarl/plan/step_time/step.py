"""The predicted time of a whole step: its phases in order, on the devices that they share. Pure.

Besides the work of models and engines, a step has a weight sync, state that is offloaded and restored, and
snapshots in host memory. `PredictedCosts` remembers the times of the parts for a search.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from megarl.config.roles import ModelRole, RoleKind, model_roles
from megarl.config.schema import DType, PPOConfig, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.counts import training_flops
from megarl.plan.placement.dataflow import ENGINE, GRADIENTS, Item, OffloadPlan, Phase, phases_of, waits_for
from megarl.plan.placement.memory import engine_weights, pushed_bytes
from megarl.plan.placement.model_state import Usage, model_state, rank_snapshot_bytes
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.placement.transport import choose_transport
from megarl.plan.step_time.counts import dtype_of
from megarl.plan.step_time.device import DeviceProfile, PhaseTime, peak_flops
from megarl.plan.step_time.generation import generation_time
from megarl.plan.step_time.lengths import Lengths
from megarl.plan.step_time.role_time import role_times

PUSH = "update_weights"
GENERATION = "gen"
# How often each byte is copied on its way within a node: into a message, out of it, and to its place.
_COPIES = 3


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


def placed_step(
    config: PPOConfig,
    plan: PlacementPlan,
    times: Mapping[str, PhaseTime],
    architectures: Mapping[str, Architecture],
    device: DeviceProfile,
    lengths: Lengths,
    moved: Mapping[str, frozenset[Item]],
) -> PredictedStep:
    """Return the step of models and engines that take these times in a placement, in the steady state.

    Args:
        config: A valid configuration.
        times: The time of each phase of models and engines, by its name.
        architectures: The architecture of each model role, by its name.
        device: The kind of all devices.
        moved: What `moved_items` returns for the placement.
    """
    moves = offload_times(config, moved, architectures, device)
    snapshots = snapshot_times(config, plan, moved, moves, architectures, device)
    whole = {**times, PUSH: push_time(config, plan, architectures["actor"], device)}
    return combine(config, plan, whole, moves, device, lengths, snapshots)


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
    is_ahead = config.rollout.max_staleness > 0
    schedule: list[PlacedPhase] = []

    def place(phase: Phase, start_s: float) -> float:
        # What generation and earlier phases do not hide of a snapshot delays one of several steps.
        late_s = (snapshots or {}).get(phase.name, 0.0) - start_s
        late = PhaseTime.of(snapshot=late_s / config.recovery.snapshot_every_steps)
        time = whole.get(phase.name, PhaseTime.of()).plus(late)
        if time.seconds:
            schedule.append(PlacedPhase(phase.name, _pools(plan, phase.roles), start_s, time))
        return time.seconds

    StepSchedule(plan, generates_ahead=is_ahead).ends(place)
    end_s = max(each.end_s for each in schedule)
    trained_s = None

    if is_ahead:
        # Training and the weight sync of a step pass while engines generate the next ones.
        generation = PlacedPhase(GENERATION, _pools(plan, ("rollout",)), 0.0, whole[GENERATION])
        schedule.insert(0, generation)
        trained_s = end_s
        end_s = max(end_s, generation.time.seconds + whole[PUSH].seconds)

    tokens = config.samples_per_step * lengths.row
    seconds = end_s + config.samples_per_step * device.sample_ms / 1e3
    return PredictedStep(seconds, tuple(schedule), tokens, plan.num_devices, trained_s)


class StepSchedule:
    """The order of a step's phases in a placement.

    A phase begins when those that it depends on have ended, and when its devices are free.

    Args:
        generates_ahead: Whether the engines generate for a later step, at the same time as all other phases.
    """

    def __init__(self, plan: PlacementPlan, *, generates_ahead: bool) -> None:
        self._step = phases_of(plan.roles)
        self._waits = waits_for(self._step)
        self._devices = {
            phase.name: frozenset().union(*(plan.group_of(role).devices for role in phase.roles))
            for phase in self._step
        }
        self._generates_ahead = generates_ahead

    def ends(self, take: Callable[[Phase, float], float]) -> dict[str, float]:
        """Return when each phase ends, in seconds after the step. Generation that runs ahead ends at once.

        Args:
            take: Returns the seconds of a phase, given when it begins.
        """
        ends_s: dict[str, float] = {}
        free_s: dict[tuple[int, int], float] = {}
        for phase in self._step:
            if self._generates_ahead and phase.name == GENERATION:
                ends_s[phase.name] = 0.0
                continue
            devices = self._devices[phase.name]
            waited = (ends_s[name] for name in self._waits[phase.name])
            start_s = max((0.0, *waited, *(free_s.get(each, 0.0) for each in devices)))
            ends_s[phase.name] = start_s + take(phase, start_s)
            free_s |= dict.fromkeys(devices, ends_s[phase.name])

        return ends_s

    def seconds(self, times: Mapping[str, float]) -> float:
        """Return the time of a step whose phases take these seconds. Phases without a time take none."""
        ends = self.ends(lambda phase, start_s: times.get(phase.name, 0.0))
        ahead = times.get(GENERATION, 0.0) if self._generates_ahead else 0.0
        return max(ahead, *ends.values())


def _pools(plan: PlacementPlan, roles: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(plan.group_of(role).pool for role in roles))


def push_time(
    config: PPOConfig, plan: PlacementPlan, policy: Architecture, device: DeviceProfile
) -> PhaseTime:
    """Return the time of a weight sync.

    Engines receive at the same time, so the time is that of one device: what it receives, or what a trainer
    rank sends if fewer trainers than engine ranks share the work.
    """
    needs = choose_transport(config, plan).needs
    received = engine_weights(config, policy)
    copies_s = _COPIES * received / device.memory_bytes_s

    if needs.through_files:
        whole = pushed_bytes(config, policy)
        nodes = len(plan.group_of("rollout").nodes)
        return PhaseTime.of(storage=whole / (device.storage_gb_s * 1e9) * (1 + 1 / nodes), copies=copies_s)

    # Each replica needs every weight once; the trainers' devices share the sending.
    senders = len(plan.group_of("actor").devices)
    sent = received * max(1.0, len(plan.group_of("rollout").devices) / senders)
    rate = (device.between_nodes if plan.num_nodes > 1 else device.within_node).gb_s
    # With shared devices, an engine rank finds a part of its weights on its own device or node, if a whole
    # replica of the trained model is on each node.
    if (
        needs.shares_devices
        and plan.num_nodes > 1
        and config.actor.parallel.replica_size <= plan.devices_per_node
    ):
        rate = max(rate, device.within_node.gb_s / 2)
    return PhaseTime.of(messages=sent / (rate * device.efficiency.links * 1e9), copies=copies_s)


def moved_items(plan: PlacementPlan) -> dict[str, frozenset[Item]]:
    """Return, for each phase, the parts of state that are offloaded or restored at its begin."""
    turns = OffloadPlan(plan)
    held = turns.held()
    names = [phase.name for phase in turns.phases]
    moved = {}
    for index, name in enumerate(names):
        # Steps repeat, so the last phase precedes the first one.
        before = held[names[index - 1]]
        moved[name] = (before - held[name]) | (turns.coming(name) - before)
    return moved


def offload_times(
    config: RunConfig,
    moved: Mapping[str, frozenset[Item]],
    architectures: Mapping[str, Architecture],
    device: DeviceProfile,
) -> dict[str, float]:
    """Return, for each phase, the seconds of offloading and restoring state at its begin.

    Gradients, and an engine's weights and cache, are dropped and allocated again without a copy.

    Args:
        moved: What is moved in its placement (`moved_items`).
        architectures: The architecture of each model role, by its name.
    """
    states = {
        role.name: _fullest_state(role, architectures[role.name], config.model.dtype)
        for role in model_roles(config)
    }
    nbytes = {name: sum(_copied(states, item) for item in items) for name, items in moved.items()}
    return {name: size / (device.host_gb_s * 1e9) for name, size in nbytes.items() if size}


def _fullest_state(role: ModelRole, architecture: Architecture, dtype: DType) -> Usage:
    """Return the state of a rank of the pipeline stage with the most: the others wait for it."""
    stages = sorted(set(role.parallel.representatives()))
    states = [model_state(role, architecture, dtype, stage) for stage in stages]
    return max(states, key=lambda state: state.total)


def snapshot_times(
    config: RunConfig,
    plan: PlacementPlan,
    moved: Mapping[str, frozenset[Item]],
    moves: Mapping[str, float],
    architectures: Mapping[str, Architecture],
    device: DeviceProfile,
) -> dict[str, float]:
    """Return, for each phase that waits for snapshots, the seconds after the step before in which they end.

    A snapshot of a trained model begins when a step has ended, next to generation. The first phase that
    restores a part of the model, or trains it, waits for the end. Without recovery there are no snapshots.

    Args:
        moved: What is moved in this placement (`moved_items`).
        moves: The seconds that this takes (`offload_times`).
        architectures: The architecture of each model role, by its name.
    """
    if not config.recovery.enabled:
        return {}

    turns = OffloadPlan(plan)
    trained = {role.name: role for role in model_roles(config) if role.optim is not None}
    sizes = {
        name: max(
            rank_snapshot_bytes(role, architectures[name], config.model.dtype, stage)
            for stage in range(role.parallel.pipeline_parallel_size)
        )
        for name, role in trained.items()
    }

    ends_s: dict[str, float] = {}
    for name, role in trained.items():
        # Models on the same devices share the link to the host.
        nbytes = sum(sizes.get(each, 0) for each in (name, *plan.on_same_devices(name)))
        end_s = nbytes / (device.host_gb_s * 1e9)
        updates = [phase.name for phase in role.phases if phase.trains]

        for phase in turns.phases:
            items = {item for item in moved.get(phase.name, ()) if item.role == name}
            if items & phase.needs or phase.name in updates:
                ends_s[phase.name] = max(end_s, ends_s.get(phase.name, 0.0))
                break
            # The snapshot stands still while a part of the model is offloaded.
            if items:
                end_s += moves.get(phase.name, 0.0)

    return ends_s


def _copied(states: Mapping[str, Usage], item: Item) -> int:
    """Return the bytes per device that moving a part of a role's state copies."""
    if item.part in (GRADIENTS, ENGINE) or item.role not in states:
        return 0
    return getattr(states[item.role], item.part)


# The lengths of a bound are sampled, so the bound stays below the time of all responses.
_CAUTION = 0.95


class PredictedCosts:
    """The predictions for one kind of device, and for the variants of one run.

    Times are remembered by what a search varies, so a run with other fixed values needs another instance.
    Equal arguments give equal times.

    Args:
        has_delta_kernels: See `role_work`.
    """

    def __init__(self, device: DeviceProfile, lengths: Lengths, *, has_delta_kernels: bool = True) -> None:
        self._device = device
        self._lengths = lengths
        self._has_delta_kernels = has_delta_kernels
        self._flops: dict[str, int] = {}
        self._of_roles: dict[Hashable, Mapping[str, PhaseTime]] = {}
        self._of_engines: dict[Hashable, PhaseTime] = {}
        self._moved: dict[Hashable, Mapping[str, frozenset[Item]]] = {}

    def role_times(
        self, config: PPOConfig, role: ModelRole, architecture: Architecture
    ) -> Mapping[str, PhaseTime]:
        """Return the time of each phase of a model, which `config` has as `role`."""
        key = (role.name, role.parallel, role.micro_batch, role.recomputation)
        if key not in self._of_roles:
            self._of_roles[key] = role_times(
                config,
                role,
                architecture,
                self._device,
                self._lengths,
                has_delta_kernels=self._has_delta_kernels,
            )
        return self._of_roles[key]

    def generation_time(self, config: PPOConfig, policy: Architecture) -> PhaseTime:
        """Return the time in which the engines generate the samples of a step.

        With `rollout.max_staleness` above 0 it is the mean over the steps that generation runs ahead.
        """
        rollout = config.rollout
        sizes = (rollout.num_replicas, rollout.tensor_parallel_size, rollout.expert_parallel_size)
        share = rollout.memory_share_of(rollout.engine)
        key = (*sizes, rollout.max_concurrency, rollout.max_staleness, share)
        if key not in self._of_engines:
            ahead = rollout.max_staleness
            self._of_engines[key] = generation_time(config, policy, self._device, self._lengths, ahead)
        return self._of_engines[key]

    def overhead_s(self, config: PPOConfig) -> float:
        """Return the time of a step that depends on neither layouts nor placement."""
        return config.samples_per_step * self._device.sample_ms / 1e3

    def least_role_s(
        self, config: PPOConfig, role: ModelRole, architecture: Architecture, num_devices: int
    ) -> float:
        """Return a lower bound of all phases of a role over a number of devices, in any layout.

        It is the time of the products of the responses in its updates, at the rate of large ones.
        """
        if role.optim is None or role.kind in (RoleKind.scorer, RoleKind.teacher):
            return 0.0
        if role.name not in self._flops:
            rows = [(1, response) for response in self._lengths.spread(64)]
            flops = training_flops(architecture, rows, with_value_head=role.with_value_head)
            self._flops[role.name] = flops * config.samples_per_step * config.passes_per_step // len(rows)
        dtype = "fp8" if role.megatron.transformer.get("fp8") else dtype_of(config)
        rate = peak_flops(self._device, dtype)
        # The larger of both efficiencies keeps this a lower bound.
        share = max(self._device.efficiency.gemm, self._device.efficiency.attention)
        return _CAUTION * self._flops[role.name] / (num_devices * rate * share)

    def predict_step(
        self, config: PPOConfig, plan: PlacementPlan, architectures: Mapping[str, Architecture]
    ) -> PredictedStep:
        """Return the time of a complete step, with everything that the other functions leave out.

        It is never below the schedule of the phases' times (`StepSchedule`) plus the overhead.
        """
        times = {GENERATION: self.generation_time(config, architectures["actor"])}
        for role in model_roles(config):
            times |= self.role_times(config, role, architectures[role.name])
        moved = self._moved_items(plan)
        return placed_step(config, plan, times, architectures, self._device, self._lengths, moved)

    def _moved_items(self, plan: PlacementPlan) -> Mapping[str, frozenset[Item]]:
        # Moves depend on which roles share devices, not on the number of devices.
        key = tuple((role, plan.on_same_devices(role)) for role in plan.roles)
        if key not in self._moved:
            self._moved[key] = moved_items(plan)
        return self._moved[key]
