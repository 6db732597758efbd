"""Memory of each device in each phase of a step, before anything starts: from layouts, lengths and who is in
memory then. Pure.

Parameters, gradients and optimizer state are counted to the element, as Megatron allocates them (its buffers
are padded by less than a hundredth). What models need while they work is counted in activations.py, for
micro-batches as full as allowed, of the rows that there are. An engine has the share of its device that it is
given (mem_fraction_static); without one, room for rows as long as allowed. Buckets are as configured. What
the device itself needs (a CUDA context, NCCL, fragments) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import ceil

from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import Device, DType, OverBudget, ParallelConfig, PPOConfig, RunConfig, Transport
from megarl.models.architecture import Architecture
from megarl.models.counts import ParameterCount, num_parameters, rank_parameters
from megarl.placement.activations import working_memory
from megarl.placement.dataflow import ENGINE, GRADIENTS, OPTIMIZER, PARAMETERS, Item, Phase
from megarl.placement.expert_activations import layers_of_stage
from megarl.placement.offload_plan import OffloadPlan
from megarl.placement.placement_plan import PlacementPlan
from megarl.placement.transport import choose_transport

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Bytes. activations: all that a model needs while it works, beside its state, and what stays of that
    when it does not."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    buckets: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        )

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """`phases`: name of a phase -> what is in memory, by role. A phase in which nothing of the device changes
    is left out.
    `pinned`: by role, the host's memory that is kept for what leaves a GPU.
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
    """Of each device, in the order of nodes and numbers. `architectures`: of each model role, by its name."""
    turns = OffloadPlan(plan)
    sizes = _Sizes(config, architectures, plan, turns)
    held = turns.held()
    steps = [phase for phase in turns.phases if phase.roles]
    on_device: dict[tuple[int, int], list[tuple[str, int]]] = {}  # roles, with the rank of their process
    pools: dict[tuple[int, int], str] = {}

    # Collect the roles of each device; groups of one pool share devices.
    for group in plan.groups:
        for process in group.processes:
            for number in process.devices:
                pools[process.node, number] = group.pool
                on_device.setdefault((process.node, number), []).extend(
                    (role, process.rank) for role in group.roles
                )

    # Devices with the same roles and pipeline stages have equal usage, so it is computed once.
    known: dict[tuple[tuple[str, int], ...], tuple[dict[str, dict[str, Usage]], dict[str, int]]] = {}
    devices = []

    for place in sorted(on_device):
        roles = tuple((role, sizes.stage(role, rank)) for role, rank in on_device[place])
        if roles not in known:
            known[roles] = (
                {
                    phase.name: {
                        role: sizes.usage(role, stage, phase, held[phase.name]) for role, stage in roles
                    }
                    for phase in steps
                },
                {role: sizes.pinned(role, stage) for role, stage in roles},
            )
        phases, pinned = known[roles]
        devices.append(
            DeviceMemory(node=place[0], device=place[1], pool=pools[place], phases=phases, pinned=pinned)
        )

    return devices


def budget_problems(config: RunConfig, devices: list[DeviceMemory]) -> list[str]:
    """One line for each pool whose fullest device has more in memory than `placement.device_memory_gb`, and
    one for engines whose share of that cannot hold a row."""
    limit_gb = config.placement.device_memory_gb
    if limit_gb is None:
        return []
    problems = _share_problems(config, devices) if isinstance(config, PPOConfig) else []

    # One line per pool is enough: what helps its fullest device helps the others.
    for pool in dict.fromkeys(device.pool for device in devices):
        fullest = max((device for device in devices if device.pool == pool), key=lambda device: device.peak)
        if fullest.peak > limit_gb * 2**30:
            usages = fullest.phases[fullest.peak_phase]
            parts = ", ".join(
                f"{role} {usage.total / 2**30:,.2f}" for role, usage in usages.items() if usage.total
            )
            problems.append(
                f"placement.device_memory_gb: in {fullest.peak_phase}, device {fullest.device} of node "
                f"{fullest.node} (pool {pool}) would "
                f"hold {fullest.peak / 2**30:,.2f} GiB ({parts}), but has {limit_gb:g}; use larger parallel "
                f"sizes, smaller micro-batches, "
                "recompute=full, a placement in which fewer roles share it, or placement.over_budget=warn"
            )

    return problems


def _share_problems(config: PPOConfig, devices: list[DeviceMemory]) -> list[str]:
    share = engine_share(config)
    limit_gb = config.placement.device_memory_gb
    # All engines are alike, so the first phase in which one is in memory tells the sizes.
    engine = next(
        usages["rollout"]
        for device in devices
        for usages in device.phases.values()
        if usages.get("rollout", Usage()).total
    )
    if share is None or (needed := engine.parameters + engine.kv_cache) <= share:
        return []
    key = config.rollout.engine.needs.memory_key
    fraction = config.rollout.memory_share_of(config.rollout.engine)
    assert limit_gb is not None

    return [
        f"{key}: {fraction} of placement.device_memory_gb {limit_gb:g} is {share / 2**30:,.2f} GiB, but the "
        f"weights take "
        f"{engine.parameters / 2**30:,.2f} and one row of {config.max_row_tokens:,} tokens "
        f"{engine.kv_cache / 2**30:,.2f}; use at least "
        f"{ceil(100 * needed / (limit_gb * 2**30)) / 100:.2f}, or a larger rollout.tensor_parallel_size"
    ]


def refuses(config: RunConfig) -> bool:
    """Whether a placement over its budget is an error."""
    return config.placement.over_budget is OverBudget.refuse


class _Sizes:
    """Of each role of a run."""

    def __init__(
        self,
        config: RunConfig,
        architectures: Mapping[str, Architecture],
        plan: PlacementPlan,
        turns: OffloadPlan,
    ) -> None:
        self._config = config
        self._turns = turns
        self._buckets: dict[str, int] = {}
        self._keeps_buckets: dict[str, frozenset[str]] = {}

        # Supervised fine-tuning has no engines, so it pushes no weights.
        if isinstance(config, PPOConfig):
            transport = choose_transport(config, plan)
            self._buckets = _buckets(config, transport)
            self._keeps_buckets = _keeps_buckets(turns, transport)

        self._roles = {role.name: role for role in model_roles(config)}
        self._architectures = architectures
        self._weight_bytes = weight_bytes(config.model.dtype)

    def stage(self, role: str, rank: int) -> int:
        """The pipeline stage of a rank; 0 for an engine."""
        return stage_of(self._roles[role].parallel, rank) if role in self._roles else 0

    def usage(self, role: str, stage: int, phase: Phase, held: frozenset[Item]) -> Usage:
        works = role in phase.roles
        # Only the engine has no model role; it is in memory as a whole or not at all.
        if role not in self._roles:
            return self._engine(phase, works) if Item(role, ENGINE) in held else Usage()
        model = self._roles[role]
        state = model_state(model, self._architectures[role], self._config.model.dtype, stage)
        parts = {
            part: getattr(state, part)
            for part in (PARAMETERS, GRADIENTS, OPTIMIZER)
            if Item(role, part) in held
        }
        moments = second_moments(model, self._architectures[role], stage)
        work = working_memory(self._config, model, self._architectures[role], stage, moments)

        # The optimizer step follows the backward pass, so the larger of the two counts.
        if Item(role, GRADIENTS) in phase.needs:
            activations = max(work.train, work.step)
        else:
            activations = work.score if works and phase.name != "update_weights" else work.stays

        return Usage(
            **parts, activations=activations, buckets=self._buckets_in(phase, role, state.parameters)
        )

    def _buckets_in(self, phase: Phase, role: str, weights: int) -> int:
        """Return the bytes of message and IPC buffers that a rank has in a phase: never more than the weights
        that they carry."""
        return min(self._buckets[role], weights) if phase.name in self._keeps_buckets.get(role, ()) else 0

    def pinned(self, role: str, stage: int) -> int:
        """Gradients and an engine's weights and cache are dropped; on a CPU what leaves goes into a file."""
        if role not in self._roles or self._config.device is Device.cpu:
            return 0
        state = model_state(self._roles[role], self._architectures[role], self._config.model.dtype, stage)
        return sum(getattr(state, part) for part in self._turns.offloaded_at_first(role) if part != GRADIENTS)

    def _engine(self, phase: Phase, works: bool) -> Usage:
        """Weights, and a cache: of the share of the device that the engine takes, or for as many sequences as
        it writes at a time. One that takes turns gets its weights first, and its cache when the trainer has
        made room."""
        config = self._config
        policy = self._architectures["actor"]
        assert isinstance(config, PPOConfig)
        weights = engine_weights(config, policy)
        # An engine writes no more at a time than its concurrency, or its share of a step's samples.
        sequences = min(
            config.rollout.max_concurrency, -(-config.samples_per_step // config.rollout.num_replicas)
        )
        share = engine_share(config)
        receives = works and phase.name == "update_weights"
        cache = (
            sequences * row_cache(config, policy)
            if share is None
            else max(share - weights, row_cache(config, policy))
        )

        return Usage(
            parameters=weights,
            kv_cache=0 if receives and self._turns.engines_move else cache,
            buckets=self._buckets_in(phase, "rollout", weights),
        )


def _buckets(config: PPOConfig, transport: Transport) -> dict[str, int]:
    """Return the bytes that a weight push takes on each side.

    `device`: IPC buffers of two buckets, which are the trainer's, and two messages of half a bucket to
    others. `group`: two buckets for what is sent, and two for what is received. `folder`: two where files are
    written.
    """
    bucket = int(config.resharding.bucket_mb * 2**20)
    return {
        "actor": 3 * bucket if transport is Transport.device else 2 * bucket,
        "rollout": 2 * bucket if transport is Transport.group else 0,
    }


def _keeps_buckets(turns: OffloadPlan, transport: Transport) -> dict[str, frozenset[str]]:
    """Return the phases in which each side of a weight push has its buffers.

    With `folder` they exist during the push only. The actor keeps those of the other transports until a part
    of its state is offloaded, which with `device` is as soon as the engines have their weights. What an
    engine frees after a push stays with its allocator.
    """
    every_phase = frozenset(phase.name for phase in turns.phases)
    pushing = "update_weights"
    return {
        "actor": frozenset({pushing})
        if transport is Transport.folder
        else turns.until_moved("actor", pushing),
        "rollout": every_phase,
    }


def stage_of(parallel: ParallelConfig, rank: int) -> int:
    """The pipeline stage of a rank."""
    return parallel.coordinate(rank).pp


def weight_bytes(dtype: DType) -> int:
    return 4 if dtype is DType.float32 else 2


def engine_weights(config: PPOConfig, policy: Architecture) -> int:
    """Bytes of one device's part."""
    return num_parameters(policy) * weight_bytes(config.model.dtype) // config.rollout.tensor_parallel_size


def row_cache(config: PPOConfig, policy: Architecture) -> int:
    """Bytes of one device's part of the keys and values of a row as long as allowed."""
    # With more ranks than key-value heads, each rank still holds one whole head.
    heads = max(1, policy.num_key_value_heads // config.rollout.tensor_parallel_size)
    return (
        config.max_row_tokens
        * 2
        * policy.num_hidden_layers
        * heads
        * policy.head_dim
        * weight_bytes(config.model.dtype)
    )


def engine_share(config: PPOConfig) -> int | None:
    """Bytes that the engine takes of a GPU for weights and cache, whatever it needs; None where nobody says
    so."""
    share = config.rollout.memory_share_of(config.rollout.engine)
    limit_gb = config.placement.device_memory_gb
    on_gpu = config.device is not Device.cpu
    return int(share * limit_gb * 2**30) if on_gpu and share is not None and limit_gb is not None else None


def model_state(model: ModelRole, architecture: Architecture, dtype: DType, stage: int) -> Usage:
    """Return the parameters, gradients and optimizer state of one rank of a pipeline stage.

    Weights are in `dtype`. Where the model trains, there are float32 gradients and, over the ranks that hold
    the same (ZeRO 1), which are fewer for experts, two float32 moments and, for bfloat16, a float32 master
    copy.
    """
    parallel = model.parallel
    held = stage_parameters(architecture, parallel, stage, with_value_head=model.with_value_head)
    element_bytes = weight_bytes(dtype)
    master_bytes = 0 if dtype is DType.float32 else 4
    if model.optim is None:
        return Usage(parameters=held.total * element_bytes)

    state_bytes = 8 + master_bytes
    # Experts have fewer copies than dense weights, so ZeRO 1 divides their state less.
    optimizer = -(-held.dense * state_bytes // parallel.num_copies)
    optimizer += -(-held.experts * state_bytes // parallel.expert_data_parallel_size)

    return Usage(
        parameters=held.total * element_bytes,
        gradients=held.total * _FLOAT32,
        optimizer=optimizer,
    )


def second_moments(model: ModelRole, architecture: Architecture, stage: int) -> int:
    """Return the bytes of those that one optimizer of a rank has: experts have one of their own."""
    parallel = model.parallel
    held = stage_parameters(architecture, parallel, stage, with_value_head=model.with_value_head)
    dense = -(-held.dense // parallel.num_copies)
    of_experts = -(-held.experts // parallel.expert_data_parallel_size)
    return _FLOAT32 * max(dense, of_experts)


def stage_parameters(
    architecture: Architecture, parallel: ParallelConfig, stage: int, with_value_head: bool
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
    )
