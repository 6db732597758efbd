"""Plan the memory of each device in each phase of a step before anything starts. Pure.

Parameters, gradients and optimizer state are counted to the element, as Megatron allocates them (its buffers
are padded by less than 1%). Working memory is estimated in activations.py for micro-batches as full as
allowed, out of the rows that exist. An engine takes its configured share of the device (mem_fraction_static),
or otherwise room for rows of the maximum length. Buckets have their configured size. The needs of the device
itself (CUDA context, NCCL, fragmentation) are not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import ceil
from typing import NamedTuple

from megarl.config.megatron_options import element_bytes
from megarl.config.roles import ModelRole, judge_roles, model_roles
from megarl.config.schema import (
    Device,
    DType,
    EngineDType,
    Layers,
    OverBudget,
    ParallelConfig,
    PPOConfig,
    RunConfig,
)
from megarl.config.speculation import draft_of
from megarl.machine.wording import byte_unit, counted
from megarl.models.architecture import Architecture
from megarl.models.counts import (
    ParameterCount,
    num_parameters,
    num_tower_parameters,
    rank_parameters,
    stage_shares,
    without_saved_modules,
)
from megarl.models.draft import DraftModel, read_draft_if_there
from megarl.models.families import engine_stages
from megarl.models.fp8 import model_bytes
from megarl.models.layers import cached_numbers, state_bytes
from megarl.plan.placement.activations import WorkingMemory, working_memory
from megarl.plan.placement.dataflow import ENGINE, GRADIENTS, OPTIMIZER, PARAMETERS, Item, Phase
from megarl.plan.placement.layer_sizes import Kernels, kernels_of, layer_kind, layers_of_stage
from megarl.plan.placement.offload_plan import OffloadPlan
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.placement.transport import sync_buffers

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory of one role on one device, in bytes.

    `activations` is the working memory in addition to the state, and what remains of it when the model is
    idle.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    buckets: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))


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
    turns = OffloadPlan(plan)
    sizes = _Sizes(config, architectures, plan, turns)
    held = turns.held()
    steps = [phase for phase in turns.phases if phase.roles]
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
                    phase.name: {
                        role: sizes.usage(role, stage, phase, held[phase.name]) for role, stage in roles
                    }
                    | idle
                    for phase in steps
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
                f"has {limit_gb * 2**30 / unit:g}; use larger parallel sizes, smaller micro-batches, "
                "recompute=full, a placement in which fewer roles share the device, or "
                "placement.over_budget=warn"
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

    return [
        f"{key}: {fraction} of placement.device_memory_gb {limit_gb:g} is {share / unit:,.2f} {unit_name}, "
        f"but the weights need {engine.parameters / unit:,.2f} and one row of "
        f"{counted(config.max_row_tokens, 'token')} needs {engine.kv_cache / unit:,.2f}; use at least "
        f"{ceil(100 * needed / (limit_gb * 2**30)) / 100:.2f}, or a larger rollout.tensor_parallel_size"
    ]


def refuses(config: RunConfig) -> bool:
    """Return whether a placement that exceeds its budget is an error."""
    return config.placement.over_budget is OverBudget.refuse


class _Sizes:
    """Computes the memory of each role of a run."""

    def __init__(
        self,
        config: RunConfig,
        architectures: Mapping[str, Architecture],
        plan: PlacementPlan,
        turns: OffloadPlan,
    ) -> None:
        self._config = config
        self._turns = turns
        self._buffers = sync_buffers(config, plan, turns, architectures)
        self._roles = {role.name: role for role in model_roles(config)}
        self._judges = judge_roles(config)
        self._architectures = architectures
        self._known: dict[tuple[str, int], RoleMemory] = {}

    def stage(self, role: str, rank: int) -> int:
        """Return the pipeline stage of a rank, of an engine too; 0 for a judge."""
        if role in self._roles:
            return stage_of(self._roles[role].parallel, rank)
        if role in self._judges:
            return 0
        assert isinstance(self._config, PPOConfig)
        rollout = self._config.rollout
        return rank % rollout.devices_per_engine // rollout.tensor_parallel_size

    def usage(self, role: str, stage: int, phase: Phase, held: frozenset[Item]) -> Usage:
        # SGLang's cache takes what a judge's weights leave of its devices.
        if role in self._judges:
            devices = self._judges[role].settings.tensor_parallel_size
            weights = num_parameters(self._architectures[role]) * weight_bytes(self._config.model.dtype)
            return Usage(parameters=weights // devices)

        # Only the engine has no model role; it is in memory entirely or not at all.
        if role not in self._roles:
            return self._engine(phase, stage) if Item(role, ENGINE) in held else Usage()

        memory = self._of(role, stage)
        return replace(
            memory.usage(role, phase, held),
            buckets=self._buffers.in_phase(phase.name, role, memory.state.parameters)
            + (self._buffers.on_host(role, memory.state.parameters) if self._is_on_cpu else 0),
        )

    def before_training(self, stages: Mapping[str, int]) -> dict[str, dict[str, Usage]]:
        """Return the memory of models that work before training, alone on the devices, by phase and role.

        Args:
            stages: The pipeline stage of each role of the device.
        """
        phases: dict[str, dict[str, Usage]] = {}
        for role in self._roles.values():
            if role.before_training and role.shares_with in stages:
                memory = self._of(role.name, stages[role.shares_with])
                alone = replace(memory.state, activations=memory.work.score)
                phases[role.phases[0].name] = {role.name: alone}
        return phases

    @property
    def _is_on_cpu(self) -> bool:
        return self._config.device is Device.cpu

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
        if role == "rollout" and self._turns.engines_move and not self._is_on_cpu:
            assert isinstance(self._config, PPOConfig)
            return draft_weights(self._config)
        if role not in self._roles or self._is_on_cpu:
            return 0
        state = self._of(role, stage).state
        offloaded = self._turns.offloaded_at_first(role)
        kept = self._buffers.on_host(role, state.parameters)
        return kept + sum(getattr(state, part) for part in offloaded if part != GRADIENTS)

    def _engine(self, phase: Phase, stage: int) -> Usage:
        config = self._config
        assert isinstance(config, PPOConfig)
        usage = engine_usage(config, self._architectures["actor"], stage)
        # An engine that is offloaded receives its weights first, and its cache once the trainer has freed
        # memory.
        has_no_cache = phase.name == "update_weights" and self._turns.engines_move
        return replace(
            usage,
            kv_cache=0 if has_no_cache else usage.kv_cache,
            buckets=self._buffers.in_phase(phase.name, "rollout", usage.parameters),
        )


class RoleMemory(NamedTuple):
    """The memory of one rank of a model: its state, and its working memory."""

    state: Usage
    work: WorkingMemory

    def usage(self, role: str, phase: Phase, held: frozenset[Item]) -> Usage:
        """Return the memory of the model in a phase, without buffers of a weight sync.

        Args:
            held: What is in memory during the phase, of all roles.
        """
        parts = {
            part: getattr(self.state, part)
            for part in (PARAMETERS, GRADIENTS, OPTIMIZER)
            if Item(role, part) in held
        }
        # The optimizer step follows the backward pass, so the larger of the two counts.
        if Item(role, GRADIENTS) in phase.needs:
            activations = max(self.work.train, self.work.step)
        else:
            works = role in phase.roles and phase.name != "update_weights"
            activations = self.work.score if works else self.work.stays

        return Usage(**parts, activations=activations)


def role_memory(config: RunConfig, model: ModelRole, architecture: Architecture, stage: int) -> RoleMemory:
    """Return the memory of one rank of a pipeline stage."""
    state = model_state(model, architecture, config.model.dtype, stage)
    step = step_memory(config, model, architecture, stage)
    return RoleMemory(state, working_memory(config, model, architecture, stage, step))


def engine_usage(config: PPOConfig, policy: Architecture, stage: int = 0) -> Usage:
    """Return the memory of an engine on one device: its weights and KV cache, and those of a draft model.

    The cache takes the rest of the engine's share of the device, or room for its concurrent sequences.
    """
    weights = stage_weights(config, policy, stage) + draft_weights(config)
    of_row = stage_row_cache(config, policy, stage)

    # The number of concurrent sequences is limited by the concurrency and by the engine's share of a step's
    # samples.
    sequences = min(
        config.rollout.max_concurrency, -(-config.samples_per_step // config.rollout.num_replicas)
    )

    share = engine_share(config)
    cache = sequences * of_row if share is None else max(share - weights, of_row)

    return Usage(parameters=weights, kv_cache=cache)


def stage_of(parallel: ParallelConfig, rank: int) -> int:
    """Return the pipeline stage of a rank."""
    return parallel.coordinate(rank).pp


def weight_bytes(dtype: DType) -> int:
    return 4 if dtype is DType.float32 else 2


def engine_weights(config: PPOConfig, policy: Architecture) -> int:
    """Return the bytes of the weights on one device of an engine's stage with the most."""
    stages = range(config.rollout.pipeline_parallel_size)
    return max(stage_weights(config, policy, stage) for stage in stages)


def stage_weights(config: PPOConfig, policy: Architecture, stage: int) -> int:
    """Return the bytes of the weights on one device of a pipeline stage of an engine."""
    share = stage_shares(policy.base, config.rollout.pipeline_parallel_size)[stage]
    return int(pushed_bytes(config, policy) * share) // config.rollout.tensor_parallel_size


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


def row_cache(config: PPOConfig, policy: Architecture) -> int:
    """Return the `stage_row_cache` of the last stage, which has the most layers."""
    return stage_row_cache(config, policy, config.rollout.pipeline_parallel_size - 1)


def stage_row_cache(config: PPOConfig, policy: Architecture, stage: int) -> int:
    """Return the bytes of the KV cache of one row of maximum length on one device of a stage of an engine.

    A draft model keeps its own keys and values of every token.
    """
    numbers = config.max_row_tokens * weight_bytes(config.model.dtype)
    draft = _draft(config)
    of_draft = numbers * draft.cached_numbers(config.rollout.tensor_parallel_size) if draft else 0
    layers, *_ = engine_stages(policy, config.rollout.pipeline_parallel_size)[stage]
    ranks = config.rollout.tensor_parallel_size
    states = state_bytes(policy, weight_bytes(config.model.dtype)) // ranks
    return of_draft + numbers * cached_numbers(policy, layers, ranks) + states


def engine_share(config: PPOConfig) -> int | None:
    """Return the bytes of a GPU that the engine takes for weights and cache, None if not configured."""
    share = config.rollout.memory_share_of(config.rollout.engine)
    limit_gb = config.placement.device_memory_gb
    on_gpu = config.device is not Device.cpu
    return int(share * limit_gb * 2**30) if on_gpu and share is not None and limit_gb is not None else None


def model_state(model: ModelRole, architecture: Architecture, dtype: DType, stage: int) -> Usage:
    """Return the parameters, gradients and optimizer state of one rank of a pipeline stage.

    Weights are in `dtype`. A model that trains also has gradients and, sharded over the ranks with equal
    weights (ZeRO 1; fewer ranks for experts), two moments and, for bfloat16, a float32 master copy. Gradients
    and moments are float32, unless the options of Megatron say otherwise.
    """
    parallel = model.parallel
    held = stage_parameters(architecture, parallel, stage, with_value_head=model.with_value_head)
    parameters = held.total * weight_bytes(dtype)
    if model.optim is None:
        return Usage(parameters=parameters)

    # A reference that is this model without its adapters has the original weights of saved modules.
    parameters += base_copies(model, architecture, stage) * weight_bytes(dtype)

    # Frozen parameters have neither gradients nor optimizer state.
    trained = trained_parameters(model, architecture, stage)
    of_element = element_bytes(dtype, model.megatron)
    state_bytes = of_element.moments + of_element.master
    # Experts have fewer copies than dense weights, so ZeRO 1 divides their state by less.
    optimizer = -(-trained.dense * state_bytes // parallel.num_copies)
    optimizer += -(-trained.of_experts * state_bytes // parallel.expert_data_parallel_size)

    return Usage(
        parameters=parameters,
        gradients=trained.total * of_element.gradient,
        optimizer=optimizer,
    )


def step_memory(
    config: RunConfig, model: ModelRole, architecture: Architecture, stage: int
) -> tuple[int, int]:
    """Return the temporary bytes of a rank's reduction of gradients, and of its optimizer step.

    After the last micro-batch, Megatron sums a copy of some gradients over tensor-parallel ranks. The step
    has float32 copies of gradients of another dtype. Experts have a separate optimizer.
    """
    parallel = model.parallel
    trained = trained_parameters(model, architecture, stage)
    dense = -(-trained.dense // parallel.num_copies)
    of_experts = -(-trained.of_experts // parallel.expert_data_parallel_size)
    of_element = element_bytes(config.model.dtype, model.megatron)
    # With sequence parallelism, each rank has the gradients of its own tokens.
    reduced = trained.replicated * of_element.gradient * parallel.sequence_parallel
    stepped = of_element.stepped * (dense + of_experts)
    # Torch's Adam materializes the square roots of all second moments of an optimizer at once on CUDA.
    # Transformer Engine's does not.
    if kernels_of(config) is not Kernels.cpu and layer_kind(config) is not Layers.transformer_engine:
        stepped += _FLOAT32 * max(dense, of_experts)
    return reduced, stepped


def trained_parameters(model: ModelRole, architecture: Architecture, stage: int) -> ParameterCount:
    """Count the parameters that one rank of a pipeline stage holds and trains.

    A frozen vision tower has neither gradients nor optimizer state.
    """
    trained = stage_parameters(
        architecture,
        model.parallel,
        stage,
        with_value_head=model.with_value_head,
        trained_only=architecture.lora is not None,
    )
    is_frozen = model.freeze_vision and stage == 0
    return trained._replace(dense=trained.dense - is_frozen * num_tower_parameters(architecture))


def base_copies(model: ModelRole, architecture: Architecture, stage: int) -> int:
    """Count the parameters of which one rank of a stage holds the original values as well."""
    if not model.runs_base:
        return 0
    alone = trained_parameters(model, without_saved_modules(architecture), stage)
    return trained_parameters(model, architecture, stage).total - alone.total


def stage_parameters(
    architecture: Architecture,
    parallel: ParallelConfig,
    stage: int,
    with_value_head: bool,
    trained_only: bool = False,
) -> ParameterCount:
    """Count the parameters that one rank of a pipeline stage holds."""
    return rank_parameters(
        architecture,
        layers=layers_of_stage(architecture, parallel, stage),
        is_first_stage=stage == 0,
        is_last_stage=stage == parallel.pipeline_parallel_size - 1,
        tensor_parallel_size=parallel.tensor_parallel_size,
        expert_parallel_size=parallel.expert_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        with_value_head=with_value_head,
        trained_only=trained_only,
    )
