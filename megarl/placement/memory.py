"""Memory of each device in each phase of a step, before anything starts: from layouts, lengths and who is in memory then. Pure.

Parameters, gradients and optimizer state are counted to the element, as Megatron allocates them (its buffers are padded by less than a
hundredth). Activations and logits are estimates from above: micro-batches as full as allowed, attention that keeps no (S, S) matrix. An
engine has the share of its device that it is given (mem_fraction_static); without one, room for rows as long as allowed. Buckets are as
configured. What the device itself needs (a CUDA context, NCCL, fragments) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import ceil

from megarl.config.architecture import Architecture
from megarl.config.derive import max_row_tokens, num_parameters, padded_vocab_size, samples_per_step
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import Device, DType, OverBudget, ParallelConfig, PPOConfig, Recompute, SFTConfig, Transport
from megarl.placement.dataflow import ENGINE, GRADIENTS, OPTIMIZER, PARAMETERS, Item, Phase
from megarl.placement.offload_plan import OffloadPlan
from megarl.placement.placement_plan import PlacementPlan
from megarl.placement.transport import choose_transport

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Bytes."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    buckets: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """`phases`: name of a phase -> what is in memory, by role. A phase in which nothing of the device changes is left out.
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


def plan_memory(config: PPOConfig | SFTConfig, plan: PlacementPlan, architectures: Mapping[str, Architecture]) -> list[DeviceMemory]:
    """Of each device, in the order of nodes and numbers. `architectures`: of each model role, by its name."""
    turns = OffloadPlan(plan)
    sizes = _Sizes(config, architectures, plan, turns)
    held = turns.held()
    steps = [phase for phase in turns.phases if phase.roles]
    on_device: dict[tuple[int, int], list[tuple[str, int]]] = {}  # roles, with the rank of their process
    pools: dict[tuple[int, int], str] = {}
    for group in plan.groups:
        for process in group.processes:
            for number in process.devices:
                pools[process.node, number] = group.pool
                on_device.setdefault((process.node, number), []).extend((role, process.rank) for role in group.roles)
    known: dict[tuple[tuple[str, int], ...], tuple[dict[str, dict[str, Usage]], dict[str, int]]] = {}
    devices = []
    for place in sorted(on_device):
        roles = tuple((role, sizes.stage(role, rank)) for role, rank in on_device[place])
        if roles not in known:
            known[roles] = (
                {phase.name: {role: sizes.usage(role, stage, phase, held[phase.name]) for role, stage in roles} for phase in steps},
                {role: sizes.pinned(role, stage) for role, stage in roles},
            )
        phases, pinned = known[roles]
        devices.append(DeviceMemory(node=place[0], device=place[1], pool=pools[place], phases=phases, pinned=pinned))
    return devices


def budget_problems(config: PPOConfig | SFTConfig, devices: list[DeviceMemory]) -> list[str]:
    """One line for each pool whose fullest device has more in memory than `placement.device_memory_gb`, and one for engines whose share of
    that cannot hold a row."""
    limit_gb = config.placement.device_memory_gb
    if limit_gb is None:
        return []
    problems = _share_problems(config, devices) if isinstance(config, PPOConfig) else []
    for pool in dict.fromkeys(device.pool for device in devices):
        fullest = max((device for device in devices if device.pool == pool), key=lambda device: device.peak)
        if fullest.peak > limit_gb * 2**30:
            usages = fullest.phases[fullest.peak_phase]
            parts = ", ".join(f"{role} {usage.total / 2**30:,.2f}" for role, usage in usages.items() if usage.total)
            problems.append(
                f"placement.device_memory_gb: in {fullest.peak_phase}, device {fullest.device} of node {fullest.node} (pool {pool}) would "
                f"hold {fullest.peak / 2**30:,.2f} GiB ({parts}), but has {limit_gb:g}; use larger parallel sizes, smaller micro-batches, "
                "recompute=full, a placement in which fewer roles share it, or placement.over_budget=warn"
            )
    return problems


def _share_problems(config: PPOConfig, devices: list[DeviceMemory]) -> list[str]:
    share, limit_gb = engine_share(config), config.placement.device_memory_gb
    engine = next(usages["rollout"] for device in devices for usages in device.phases.values() if usages.get("rollout", Usage()).total)
    if share is None or (needed := engine.parameters + engine.kv_cache) <= share:
        return []
    key, fraction = config.rollout.engine.needs.memory_key, config.rollout.memory_share_of(config.rollout.engine)
    assert limit_gb is not None
    return [
        f"{key}: {fraction} of placement.device_memory_gb {limit_gb:g} is {share / 2**30:,.2f} GiB, but the weights take "
        f"{engine.parameters / 2**30:,.2f} and one row of {max_row_tokens(config):,} tokens {engine.kv_cache / 2**30:,.2f}; use at least "
        f"{ceil(100 * needed / (limit_gb * 2**30)) / 100:.2f}, or a larger rollout.tensor_parallel_size"
    ]


def refuses(config: PPOConfig | SFTConfig) -> bool:
    """Whether a placement over its budget is an error."""
    return config.placement.over_budget is OverBudget.refuse


class _Sizes:
    """Of each role of a run."""

    def __init__(
        self, config: PPOConfig | SFTConfig, architectures: Mapping[str, Architecture], plan: PlacementPlan, turns: OffloadPlan
    ) -> None:
        self._config = config
        self._turns = turns
        self._buckets = _buckets(config, plan) if isinstance(config, PPOConfig) else {}
        self._roles = {role.name: role for role in model_roles(config)}
        self._architectures = architectures
        self._weight_bytes = weight_bytes(config.model.dtype)

    def stage(self, role: str, rank: int) -> int:
        """The pipeline stage of a rank: Megatron counts tensor-parallel ranks fastest, then replicas, then stages. 0 for an engine."""
        if role not in self._roles:
            return 0
        parallel = self._roles[role].parallel
        return rank // (parallel.tensor_parallel_size * parallel.data_parallel_size)

    def usage(self, role: str, stage: int, phase: Phase, held: frozenset[Item]) -> Usage:
        works = role in phase.roles
        if role not in self._roles:
            return self._engine(phase, works) if Item(role, ENGINE) in held else Usage()
        model = self._roles[role]
        state = model_state(model, self._architectures[role], self._config.model.dtype, stage)
        parts = {part: getattr(state, part) for part in (PARAMETERS, GRADIENTS, OPTIMIZER) if Item(role, part) in held}
        trains = Item(role, GRADIENTS) in phase.needs
        scores = works and not trains and phase.name != "update_weights"
        activations = self._activations(model, stage, trains) if trains or scores else 0
        buckets = min(self._buckets[role], state.parameters) if works and phase.name == "update_weights" else 0
        return Usage(**parts, activations=activations, buckets=buckets)

    def pinned(self, role: str, stage: int) -> int:
        """Gradients and an engine's weights and cache are dropped; on a CPU what leaves goes into a file."""
        if role not in self._roles or self._config.device is Device.cpu:
            return 0
        state = model_state(self._roles[role], self._architectures[role], self._config.model.dtype, stage)
        return sum(getattr(state, part) for part in self._turns.offloaded_at_first(role) if part != GRADIENTS)

    def _engine(self, phase: Phase, works: bool) -> Usage:
        """Weights, and a cache: of the share of the device that the engine takes, or for as many sequences as it writes at a time. One that
        takes turns gets its weights first, and its cache when the trainer has made room."""
        config, policy = self._config, self._architectures["actor"]
        assert isinstance(config, PPOConfig)
        weights = engine_weights(config, policy)
        sequences = min(config.rollout.max_concurrency, -(-samples_per_step(config) // config.rollout.num_replicas))
        share = engine_share(config)
        receives = works and phase.name == "update_weights"
        cache = sequences * row_cache(config, policy) if share is None else max(share - weights, row_cache(config, policy))
        return Usage(
            parameters=weights,
            kv_cache=0 if receives and self._turns.engines_move else cache,
            buckets=min(self._buckets["rollout"], weights) if receives else 0,
        )

    def _activations(self, model: ModelRole, stage: int, trains: bool) -> int:
        """Of one micro-batch through a stage; in training of all micro-batches under way in the pipeline."""
        config, architecture, parallel = self._config, self._architectures[model.name], model.parallel
        tokens = model.micro_batch.max_tokens or (model.micro_batch.sequences or 1) * max_row_tokens(config)
        layer = _layer_elements(architecture, parallel) * self._weight_bytes
        hidden = architecture.hidden_size * self._weight_bytes
        is_last = stage == parallel.pipeline_parallel_size - 1
        top = 6 * hidden if is_last else 2 * hidden  # the last norm in float32 and bfloat16, and what the head reads
        head = 0 if model.with_value_head or not is_last else self._head(architecture, parallel, tokens, trains)
        if not trains:
            return tokens * (layer + top) + head
        # On the way back: gradients of gate and up, and of a layer's input and output.
        gradients = 2 * architecture.intermediate_size // parallel.tensor_parallel_size * self._weight_bytes + 2 * hidden
        again = _share_computed_again(model, architecture)
        handed_on = hidden // (parallel.tensor_parallel_size if parallel.sequence_parallel else 1)
        kept = architecture.num_hidden_layers * (again * handed_on + (1 - again) * layer) * _share_under_way(parallel, stage)
        return int(tokens * (kept + (layer if again else 0) + gradients + top)) + head

    def _head(self, architecture: Architecture, parallel: ParallelConfig, tokens: int, trains: bool) -> int:
        """Logits of a chunk of tokens, three times. In training the gradient of this rank's rows of the output layer, which is summed in
        float32: the sum (4 bytes), a chunk's part of it in both types (6)."""
        rows = padded_vocab_size(architecture.vocab_size, parallel.tensor_parallel_size) // parallel.tensor_parallel_size
        logits = 3 * min(tokens, self._config.engine.log_prob_chunk_tokens) * rows * _FLOAT32
        return logits + (10 * rows * architecture.hidden_size if trains else 0)


def _buckets(config: PPOConfig, plan: PlacementPlan) -> dict[str, int]:
    """Bytes that a push takes on each side. `device`: slots of two buckets, which are the trainer's, and two messages of half a bucket to
    others. `group`: two buckets for what is sent, and two for what is received. `folder`: two where files are written."""
    bucket = int(config.resharding.bucket_mb * 2**20)
    transport = choose_transport(config, plan)
    return {
        "actor": 3 * bucket if transport is Transport.device else 2 * bucket,
        "rollout": 2 * bucket if transport is Transport.group else 0,
    }


def _share_computed_again(model: ModelRole, architecture: Architecture) -> float:
    """Of a model's layers, those of which only the input is kept. What `selective` saves is not counted on."""
    how, _, num_layers = model.recomputation
    if how is not Recompute.full:
        return 0.0
    parallel = model.parallel
    of_stage = architecture.num_hidden_layers / (parallel.pipeline_parallel_size * (parallel.virtual_pipeline_parallel_size or 1))
    return min(1.0, (num_layers or of_stage) / of_stage)


def _share_under_way(parallel: ParallelConfig, stage: int) -> float:
    """Of a model's layers, those whose activations a stage keeps at the same time: 1F1B has a micro-batch under way in this stage and in
    each after it; interleaved stages begin more of them (Narayanan et al. 2021, section 2.2)."""
    stages, virtual = parallel.pipeline_parallel_size, parallel.virtual_pipeline_parallel_size or 1
    chunks = stages - stage if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
    return chunks / (stages * virtual)


def _layer_elements(architecture: Architecture, parallel: ParallelConfig) -> int:
    """What the backward pass of a layer needs, for each token, in elements of the weights' type.

    Two norms keep their input in float32 (2 H each), normalised, and scaled (H each); with sequence parallelism only the last is whole.
    Attention: queries four times, keys and values in the product of all three and once more each half; with a norm of queries and keys,
    three times more. MLP: gate and up, the activation, up once more, their product. tests/unit/engine/test_memory_plan.py measures it.
    """
    cut = parallel.tensor_parallel_size
    query, key_value = (heads * architecture.head_dim for heads in (architecture.num_attention_heads, architecture.num_key_value_heads))
    whole = 2 * architecture.hidden_size + 6 * architecture.hidden_size // (cut if parallel.sequence_parallel else 1)
    attention = 4 * query + 3 * key_value + 3 * (query + key_value) * architecture.qk_norm
    return whole + (attention + 5 * architecture.intermediate_size) // cut


def weight_bytes(dtype: DType) -> int:
    return 4 if dtype is DType.float32 else 2


def engine_weights(config: PPOConfig, policy: Architecture) -> int:
    """Bytes of one device's part."""
    return num_parameters(policy) * weight_bytes(config.model.dtype) // config.rollout.tensor_parallel_size


def row_cache(config: PPOConfig, policy: Architecture) -> int:
    """Bytes of one device's part of the keys and values of a row as long as allowed."""
    heads = max(1, policy.num_key_value_heads // config.rollout.tensor_parallel_size)
    return max_row_tokens(config) * 2 * policy.num_hidden_layers * heads * policy.head_dim * weight_bytes(config.model.dtype)


def engine_share(config: PPOConfig) -> int | None:
    """Bytes that the engine takes of a GPU for weights and cache, whatever it needs; None where nobody says so."""
    share, limit_gb = config.rollout.memory_share_of(config.rollout.engine), config.placement.device_memory_gb
    on_gpu = config.device is not Device.cpu
    return int(share * limit_gb * 2**30) if on_gpu and share is not None and limit_gb is not None else None


def model_state(model: ModelRole, architecture: Architecture, dtype: DType, stage: int) -> Usage:
    """Parameters, gradients and optimizer state of one rank of a pipeline stage: weights in `dtype`; where the model trains, float32
    gradients, and over data-parallel ranks (ZeRO 1) two float32 moments and, for bfloat16, a float32 master copy."""
    count = stage_parameters(architecture, model.parallel, stage, with_value_head=model.with_value_head)
    element_bytes = weight_bytes(dtype)
    master_bytes = 0 if dtype is DType.float32 else 4
    if model.optim is None:
        return Usage(parameters=count * element_bytes)
    return Usage(
        parameters=count * element_bytes,
        gradients=count * _FLOAT32,
        optimizer=-(-count * (8 + master_bytes) // model.parallel.data_parallel_size),
    )


def stage_parameters(architecture: Architecture, parallel: ParallelConfig, stage: int, with_value_head: bool) -> int:
    """Elements that one rank of a pipeline stage holds: cut over tensor-parallel ranks, but for norms and a value head."""
    cut, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    hidden, head_dim = architecture.hidden_size, architecture.head_dim
    query, key_value = architecture.num_attention_heads * head_dim, architecture.num_key_value_heads * head_dim
    linear = hidden * (query + 2 * key_value) + query * hidden + 3 * hidden * architecture.intermediate_size
    linear += (query + 2 * key_value) * architecture.qkv_bias
    norms = 2 * hidden + 2 * head_dim * architecture.qk_norm
    count = architecture.num_hidden_layers // stages * (linear // cut + norms)
    embedding = padded_vocab_size(architecture.vocab_size, parallel.tensor_parallel_size) // cut * hidden
    is_first, is_last = stage == 0, stage == stages - 1
    count += embedding * is_first + hidden * is_last
    if is_last and with_value_head:
        return count + hidden
    has_output = is_last and not (architecture.tie_word_embeddings and is_first)  # tied: the last of several stages has a copy
    return count + embedding * has_output
