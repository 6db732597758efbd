"""Plan the memory of each device in each phase of a step before anything starts. Pure.

The state of models is counted in model_state.py. Working memory is estimated in activations.py for
micro-batches as full as allowed, out of the rows that exist. An engine takes its configured share of the
device (mem_fraction_static), or otherwise room for rows of the maximum length. Buckets have their configured
size. The needs of the device itself (CUDA context, NCCL, fragmentation) are not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from megarl.config.roles import judge_roles, model_roles
from megarl.config.schema import Device, EngineDType, OverBudget, PPOConfig, RunConfig
from megarl.config.speculation import draft_of
from megarl.machine.errors import byte_unit, counted
from megarl.models.architecture import Architecture
from megarl.models.counts import num_parameters, stage_shares
from megarl.models.families import DraftModel, engine_stages, read_draft_if_there
from megarl.models.fp8 import model_bytes
from megarl.models.layers import cached_numbers, layers_of, state_bytes
from megarl.plan.placement.activations import RoleMemory, role_memory
from megarl.plan.placement.dataflow import ENGINE, GRADIENTS, OPTIMIZER, PARAMETERS, Item, OffloadPlan, Phase
from megarl.plan.placement.model_state import Usage, stage_of, weight_bytes
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.placement.transport import SyncBuffers


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of one device.

    Attributes:
        device: The number of the device on its node.
        phases: The memory use by role, for each phase. Phases that change nothing on the device are omitted.
        pinned: By role, the host memory reserved for state that is offloaded from a GPU.
    """

    node: int
    device: int
    pool: str
    phases: Mapping[str, Mapping[str, Usage]] = field(default_factory=dict)
    pinned: Mapping[str, int] = field(default_factory=dict)

    def total(self, phase: str) -> int:
        return sum(usage.total for usage in self.phases[phase].values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        return self.total(self.peak_phase)


def plan_memory(
    config: RunConfig, plan: PlacementPlan, architectures: Mapping[str, Architecture]
) -> list[DeviceMemory]:
    """Return the memory of each device, ordered by node and device number.

    Args:
        architectures: The architecture of each model role, by its name.
    """
    placed = PlacedMemory(config, plan, architectures)
    sizes = _Sizes(config, architectures, placed)
    on_device: dict[tuple[int, int], list[tuple[str, int]]] = {}  # roles and their ranks
    pools: dict[tuple[int, int], str] = {}

    # Collect the roles of each device; groups in one pool share devices.
    for group in plan.groups:
        for process in group.processes:
            for index, number in enumerate(process.devices):
                pools[process.node, number] = group.pool
                rank = process.rank * len(process.devices) + index
                on_device.setdefault((process.node, number), []).extend((role, rank) for role in group.roles)

    # Devices with the same roles and pipeline stages use the same memory, so it is computed once.
    known: dict[tuple[tuple[str, int], ...], tuple[dict[str, dict[str, Usage]], dict[str, int]]] = {}
    devices = []

    for place in sorted(on_device):
        roles = tuple((role, sizes.stage(role, rank)) for role, rank in on_device[place])
        if roles not in known:
            before = sizes.before_training(dict(roles))
            # Every phase lists the same roles.
            idle = {role: Usage() for phase in before.values() for role in phase}
            known[roles] = (
                {name: {role: Usage() for role, _ in roles} | idle | phase for name, phase in before.items()}
                | {
                    phase.name: {role: sizes.usage(role, stage, phase) for role, stage in roles} | idle
                    for phase in placed.phases
                },
                {role: sizes.pinned(role, stage) for role, stage in roles} | dict.fromkeys(idle, 0),
            )
        phases, pinned = known[roles]
        devices.append(
            DeviceMemory(node=place[0], device=place[1], pool=pools[place], phases=phases, pinned=pinned)
        )

    return devices


def budget_problems(config: RunConfig, devices: list[DeviceMemory]) -> list[str]:
    """Return one line for each pool whose fullest device exceeds `placement.device_memory_gb`.

    One more line is returned if the engines' share of the device memory cannot hold one row.
    """
    limit_gb = config.placement.device_memory_gb
    if limit_gb is None:
        return []
    problems = _share_problems(config, devices) if isinstance(config, PPOConfig) else []

    # One line per pool is enough: what helps its fullest device helps the others.
    for pool in dict.fromkeys(device.pool for device in devices):
        fullest = max((device for device in devices if device.pool == pool), key=lambda device: device.peak)
        if fullest.peak > limit_gb * 2**30:
            usages = fullest.phases[fullest.peak_phase]
            unit, unit_name = byte_unit(fullest.peak)
            parts = ", ".join(
                f"{role} {usage.total / unit:,.2f}" for role, usage in usages.items() if usage.total
            )
            problems.append(
                f"placement.device_memory_gb: in {fullest.peak_phase}, device {fullest.device} of node "
                f"{fullest.node} (pool {pool}) needs {fullest.peak / unit:,.2f} {unit_name} ({parts}), but "
                f"has {limit_gb * 2**30 / unit:g}"
            )

    return problems


def _share_problems(config: PPOConfig, devices: list[DeviceMemory]) -> list[str]:
    share = engine_share(config)
    limit_gb = config.placement.device_memory_gb
    # The stage that needs the most, in a phase with the engine in memory.
    engine = max(
        (usages.get("rollout", Usage()) for device in devices for usages in device.phases.values()),
        key=lambda usage: usage.parameters + usage.kv_cache,
    )
    if share is None or (needed := engine.parameters + engine.kv_cache) <= share:
        return []
    key = config.rollout.engine.needs.memory_key
    fraction = config.rollout.memory_share_of(config.rollout.engine)
    assert limit_gb is not None
    unit, unit_name = byte_unit(needed)
    least = ceil(100 * needed / (limit_gb * 2**30)) / 100
    larger = f"use at least {least:.2f}, or " if least < 1 else "use "

    return [
        f"{key}: {fraction} of placement.device_memory_gb {limit_gb:g} is {share / unit:,.2f} {unit_name}, "
        f"but the weights need {engine.parameters / unit:,.2f} and one row of "
        f"{counted(config.max_row_tokens, 'token')} needs {engine.kv_cache / unit:,.2f}; "
        f"{larger}a larger rollout.tensor_parallel_size"
    ]


def refuses(config: RunConfig) -> bool:
    """Return whether a placement that exceeds its budget is an error."""
    return config.placement.over_budget is OverBudget.refuse


class PlacedMemory:
    """The memory of models and engines in each phase of a placement.

    Attributes:
        plan: The placement. What is in memory depends only on which roles share devices.
        phases: The phases in which a role works.
    """

    def __init__(
        self, config: RunConfig, plan: PlacementPlan, architectures: Mapping[str, Architecture]
    ) -> None:
        self.plan = plan
        self.turns = OffloadPlan(plan)
        self.phases = [phase for phase in self.turns.phases if phase.roles]
        self.buffers = SyncBuffers(config, plan, self.turns, architectures)
        self._held = self.turns.held()
        self._is_on_cpu = config.device is Device.cpu

    def of_model(self, role: str, memory: RoleMemory, phase: Phase) -> Usage:
        """Return the memory of a rank of a model in a phase."""
        state = memory.state
        held = {
            part: getattr(state, part)
            for part in (PARAMETERS, GRADIENTS, OPTIMIZER)
            if Item(role, part) in self._held[phase.name]
        }
        # The optimizer step follows the backward pass, so the larger of the two counts.
        if Item(role, GRADIENTS) in phase.needs:
            activations = max(memory.train, memory.step)
        else:
            works = role in phase.roles and phase.name != "update_weights"
            activations = memory.score if works else memory.stays
        if PARAMETERS in held:
            activations += memory.quantized

        buckets = self.buffers.in_phase(phase.name, role, state.parameters)
        if self._is_on_cpu:
            buckets += self.buffers.on_host(role, state.parameters)
        return Usage(**held, activations=activations, buckets=buckets)

    def of_engine(self, usage: Usage, phase: Phase) -> Usage:
        """Return the memory of an engine in a phase: it is in memory entirely or not at all."""
        if Item("rollout", ENGINE) not in self._held[phase.name]:
            return Usage()
        # An engine that is offloaded receives its weights first, and its cache once the trainer has freed
        # memory.
        has_no_cache = phase.name == "update_weights" and self.turns.engines_move
        return replace(
            usage,
            kv_cache=0 if has_no_cache else usage.kv_cache,
            buckets=self.buffers.in_phase(phase.name, "rollout", usage.parameters),
        )


class _Sizes:
    """Computes the memory of each role of a run."""

    def __init__(
        self, config: RunConfig, architectures: Mapping[str, Architecture], placed: PlacedMemory
    ) -> None:
        self._config = config
        self._placed = placed
        self._roles = {role.name: role for role in model_roles(config)}
        self._judges = judge_roles(config)
        self._architectures = architectures
        self._known: dict[tuple[str, int], RoleMemory] = {}
        self._engines: dict[int, Usage] = {}

    def stage(self, role: str, rank: int) -> int:
        """Return the pipeline stage of a rank, of an engine too; 0 for a judge."""
        if role in self._roles:
            return stage_of(self._roles[role].parallel, rank)
        if role in self._judges:
            return 0
        assert isinstance(self._config, PPOConfig)
        rollout = self._config.rollout
        return rank % rollout.devices_per_engine // rollout.tensor_parallel_size

    def usage(self, role: str, stage: int, phase: Phase) -> Usage:
        # SGLang's cache takes what a judge's weights leave of its devices.
        if role in self._judges:
            devices = self._judges[role].settings.tensor_parallel_size
            weights = num_parameters(self._architectures[role]) * weight_bytes(self._config.model.dtype)
            return Usage(parameters=weights // devices)

        # Only the engine has no model role.
        if role not in self._roles:
            assert isinstance(self._config, PPOConfig)
            if stage not in self._engines:
                self._engines[stage] = engine_usage(self._config, self._architectures["actor"], stage)
            return self._placed.of_engine(self._engines[stage], phase)
        return self._placed.of_model(role, self._of(role, stage), phase)

    def before_training(self, stages: Mapping[str, int]) -> dict[str, dict[str, Usage]]:
        """Return the memory of models that work before training, alone on the devices, by phase and role.

        Args:
            stages: The pipeline stage of each role of the device.
        """
        phases: dict[str, dict[str, Usage]] = {}
        for role in self._roles.values():
            if role.before_training and role.shares_with in stages:
                memory = self._of(role.name, stages[role.shares_with])
                alone = replace(memory.state, activations=memory.score + memory.quantized)
                phases[role.phases[0].name] = {role.name: alone}
        return phases

    def _of(self, role: str, stage: int) -> RoleMemory:
        if (role, stage) not in self._known:
            self._known[role, stage] = role_memory(
                self._config, self._roles[role], self._architectures[role], stage
            )
        return self._known[role, stage]

    def pinned(self, role: str, stage: int) -> int:
        """Return the bytes of pinned host memory of a rank: of offloaded state, and of engines' last weights.

        Gradients and an engine's weights and cache are dropped when offloaded, except the weights of a draft
        model; on a CPU, offloaded state is written to a file.
        """
        if self._config.device is Device.cpu:
            return 0
        turns = self._placed.turns
        if role == "rollout" and turns.engines_move:
            assert isinstance(self._config, PPOConfig)
            return draft_weights(self._config)
        if role not in self._roles:
            return 0
        state = self._of(role, stage).state
        offloaded = turns.offloaded_at_first(role)
        kept = self._placed.buffers.on_host(role, state.parameters)
        return kept + sum(getattr(state, part) for part in offloaded if part != GRADIENTS)


def engine_usage(config: PPOConfig, policy: Architecture, stage: int = 0) -> Usage:
    """Return the memory of an engine on one device: its weights and KV cache, and those of a draft model.

    The cache takes the rest of the engine's share of the device, or room for its concurrent sequences.
    """
    weights = stage_weights(config, policy, stage) + draft_weights(config)
    of_row = row_cache(config, policy, stage)

    # The number of concurrent sequences is limited by the concurrency and by the engine's share of a step's
    # samples.
    sequences = min(
        config.rollout.max_concurrency, -(-config.samples_per_step // config.rollout.num_replicas)
    )

    # A group with an attention of its own has the cache of its own sequences only.
    sequences = -(-sequences // config.rollout.attention_groups)

    share = engine_share(config)
    cache = sequences * of_row if share is None else max(share - weights, of_row)

    return Usage(parameters=weights, kv_cache=cache)


def engine_weights(config: PPOConfig, policy: Architecture) -> int:
    """Return the bytes of the weights on one device of an engine's stage with the most."""
    return max(stage_weights(config, policy, stage) for stage in range(config.rollout.pipeline_parallel_size))


def stage_weights(config: PPOConfig, policy: Architecture, stage: int) -> int:
    """Return the bytes of the weights on one device of a pipeline stage of an engine."""
    rollout = config.rollout
    share = stage_shares(policy.base, rollout.pipeline_parallel_size)[stage]
    whole = int(pushed_bytes(config, policy) * share)
    # Each group with an attention of its own has all heads, and the whole input embedding.
    again = (rollout.attention_groups - 1) * _attention_bytes(config, policy)
    return (whole + again) // rollout.tensor_parallel_size


def _attention_bytes(config: PPOConfig, policy: Architecture) -> int:
    """Return the bytes of an engine's matrices of attention, and of its input embedding."""
    element = weight_bytes(config.model.dtype)
    of_matrix = 1 if config.rollout.dtype is EngineDType.fp8 else element
    parts = (part for layer in layers_of(policy.base) for part in layer if part.kind.has_groups)
    elements = sum(matrix.outputs * matrix.inputs for part in parts for matrix in part.matrices)
    return of_matrix * elements + element * policy.vocab_size * policy.hidden_size


def draft_weights(config: PPOConfig) -> int:
    """Return the bytes of a draft model's weights on one device of an engine, as they are in its folder."""
    draft = _draft(config)
    return draft.weight_bytes // config.rollout.tensor_parallel_size if draft else 0


def _draft(config: PPOConfig) -> DraftModel | None:
    """Return the draft model of the engines, if there is one on this machine."""
    folder = draft_of(config.rollout)
    return None if folder is None else read_draft_if_there(folder)


def pushed_bytes(config: PPOConfig, policy: Architecture) -> int:
    """Return the bytes of all weights of an engine, without adapters."""
    size = num_parameters(policy.base)
    element = weight_bytes(config.model.dtype)
    if config.rollout.dtype is EngineDType.fp8:
        return model_bytes(policy.base, size, element)
    return size * element


def row_cache(config: PPOConfig, policy: Architecture, stage: int = -1) -> int:
    """Return the bytes of the KV cache of one row of maximum length on one device of a stage of an engine.

    It is a device of the group that computes the row's attention. The last stage has the most layers. A draft
    model keeps its own keys and values of every token.
    """
    numbers = config.max_row_tokens * weight_bytes(config.model.dtype)
    draft = _draft(config)
    of_draft = numbers * draft.cached_numbers(config.rollout.tensor_parallel_size) if draft else 0
    layers, *_ = engine_stages(policy, config.rollout.pipeline_parallel_size)[stage]
    ranks = config.rollout.tensor_parallel_size // config.rollout.attention_groups
    states = state_bytes(policy, weight_bytes(config.model.dtype)) // ranks
    return of_draft + numbers * cached_numbers(policy, layers, ranks) + states


def engine_share(config: PPOConfig) -> int | None:
    """Return the bytes of a GPU that the engine takes for weights and cache, None if not configured."""
    share = config.rollout.memory_share_of(config.rollout.engine)
    limit_gb = config.placement.device_memory_gb
    on_gpu = config.device is not Device.cpu
    return int(share * limit_gb * 2**30) if on_gpu and share is not None and limit_gb is not None else None
