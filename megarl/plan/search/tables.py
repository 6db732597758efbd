"""The layouts of each unit and the shapes of engines that a search chooses from, computed when needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from megarl.config.finding import Finding
from megarl.config.roles import REWARD_MODEL, ModelRole
from megarl.config.rules import experts, fp8, models, vision
from megarl.config.rules import rollout as rollout_rules
from megarl.config.schema import (
    MicroBatchConfig,
    ParallelConfig,
    PPOConfig,
    Recomputation,
    RolloutConfig,
    SGLangConfig,
)
from megarl.config.validate import RULES, Check, Needs, checks_of
from megarl.machine.errors import counted, sized
from megarl.models.architecture import Architecture
from megarl.models.layers import routes_tokens
from megarl.plan.placement.memory import engine_share, engine_usage, row_cache
from megarl.plan.placement.model_state import Usage
from megarl.plan.placement.requests import engine_problems
from megarl.plan.search.space import ROLLOUT, Pool, Reason, Rejections, Space, units_of
from megarl.plan.search.variants import LEVEL as VARIANTS
from megarl.plan.search.variants import VariantTable
from megarl.plan.step_time.step import PredictedCosts

LEVEL = "layouts"
# The largest degrees that are enumerated; pinned values may be larger.
_MOST_CONTEXT = 16
_MOST_TENSOR = 64
_VIRTUAL = (2, 4)
# Rules about sizes that have to divide.
_DIVISIBILITY = (models.fit_layout, experts.fit_layout, vision.fit_layout, fp8.products_fit)
# These rules depend on what is chosen for a layout afterwards.
_OF_VARIANTS = (models.micro_batch, models.recomputation)


class Tables:
    """The variants of units and the shapes of engines, by the devices of their pool.

    Attributes:
        rejections: Counts what was considered and left out.
    """

    def __init__(
        self, space: Space, architectures: Mapping[str, Architecture], costs: PredictedCosts
    ) -> None:
        self.space = space
        self.architectures = architectures
        self.costs = costs
        self.rejections = Rejections()
        self._variants: dict[tuple[str, int, int], VariantTable] = {}
        self._engines: dict[tuple[tuple[int, ...], int], list[EngineShape]] = {}
        self._fastest: dict[tuple[str, int], float] = {}  # seconds by unit and number of devices

    def variants(self, unit: str, pool: Pool) -> VariantTable:
        """Return the variants of a unit over the devices of a pool."""
        key = (unit, pool.num_devices, pool.granule)
        if key not in self._variants:
            roles = units_of(self.space.config)[unit]
            found = layouts(
                self.space, roles, self.architectures, pool.num_devices, pool.granule, self.rejections
            )
            table = VariantTable(self.space, unit, self.architectures, found, self.costs, self.rejections)
            self._variants[key] = table
            if (fastest := next(iter(table), None)) is not None:
                self._fastest[unit, pool.num_devices] = fastest.seconds
        return self._variants[key]

    def engines(self, pool: Pool, max_staleness: int) -> list[EngineShape]:
        """Return the shapes of the engines in a pool."""
        key = (tuple(count for count in pool.on_nodes if count), max_staleness)
        if key not in self._engines:
            self._engines[key] = engines_of(
                self.space, self.architectures["actor"], pool, max_staleness, self.costs, self.rejections
            )
        return self._engines[key]

    def least_s(self, pools: Sequence[Pool], max_staleness: int) -> float:
        """Return a lower bound of a step before the layouts of the units in these pools are computed."""
        of_pools = max(
            sum(self._least_of_unit(unit, pool) for unit in self.space.units if unit in pool.units)
            for pool in pools
        )
        shapes = self.engines(next(pool for pool in pools if ROLLOUT in pool.units), max_staleness)
        generation_s = shapes[0].seconds if shapes else 0.0
        # In async rollout, generation and training overlap.
        return max(of_pools, generation_s) if max_staleness else of_pools + generation_s

    def _least_of_unit(self, unit: str, pool: Pool) -> float:
        """Return a lower bound of a unit's time: on more devices, it is known not to be faster than this."""
        known = [
            seconds
            for (name, num_devices), seconds in self._fastest.items()
            if name == unit and num_devices >= pool.num_devices
        ]
        config = self.space.config
        rough = sum(
            self.costs.least_role_s(config, role, self.architectures[role.name], pool.num_devices)
            for role in units_of(config)[unit]
        )
        return max(rough, *known, 0.0)

    def finish(self) -> None:
        """Count the variants that were never needed, because faster ones decided."""
        for table in self._variants.values():
            self.rejections.reject(VARIANTS, Reason.slower, count=table.num_waiting)


def layouts(
    space: Space,
    roles: Sequence[ModelRole],
    architectures: Mapping[str, Architecture],
    num_devices: int,
    granule: int,
    rejections: Rejections,
) -> list[ParallelConfig]:
    """Return the layouts of a unit's roles over `num_devices` devices that the rules accept.

    Args:
        roles: The roles that share the layout.
        architectures: The architecture of each role's model.
        num_devices: The number of devices, all of which the layout uses.
        granule: The largest size of groups that fill these devices on every node.
        rejections: Counts the layouts, and those that are left out.
    """
    found = []
    for parallel in _candidates(space, roles[0], architectures[roles[0].name], num_devices):
        rejections.consider(LEVEL)
        problem = _problem(space, roles, architectures, parallel, granule)
        if problem is None:
            found.append(parallel)
        else:
            rejections.reject(LEVEL, *problem)
    return found


def _candidates(
    space: Space, role: ModelRole, architecture: Architecture, num_devices: int
) -> Iterator[ParallelConfig]:
    """Yield the layouts whose sizes multiply to the number of devices."""
    # The pinned sizes leave one way each.
    pinned = {
        name: [value]
        for name, value in vars(role.parallel).items()
        if space.is_pinned(f"{role.parallel_key}.{name}")
    }
    for tensor in pinned.get("tensor_parallel_size", _divisors(num_devices, _MOST_TENSOR)):
        for context in pinned.get("context_parallel_size", _contexts(role, num_devices // tensor)):
            ranks = num_devices // (tensor * context)
            for pipeline in pinned.get("pipeline_parallel_size", _divisors(ranks, ranks)):
                # A pinned size may not divide the devices.
                replicas = ranks // pipeline
                if tensor * context * pipeline * replicas != num_devices:
                    continue
                dense = ParallelConfig(
                    tensor_parallel_size=tensor,
                    context_parallel_size=context,
                    pipeline_parallel_size=pipeline,
                    data_parallel_size=replicas,
                    sequence_parallel=pinned.get("sequence_parallel", [tensor > 1])[0],
                )
                if replicas in pinned.get("data_parallel_size", [replicas]):
                    yield from _refined(pinned, dense, architecture)


def _refined(
    pinned: Mapping[str, list[Any]], dense: ParallelConfig, architecture: Architecture
) -> Iterator[ParallelConfig]:
    """Yield a layout with each number of virtual stages, and each distribution of experts."""
    pipeline = dense.pipeline_parallel_size
    layers = architecture.num_hidden_layers // pipeline
    shards = dict.fromkeys((1, dense.tensor_parallel_size)) if routes_tokens(architecture) else [1]
    virtual = [None, *(each for each in _VIRTUAL if pipeline > 1 and layers % each == 0)]

    for chunks in pinned.get("virtual_pipeline_parallel_size", virtual):
        for expert_tensor in pinned.get("expert_tensor_parallel_size", shards):
            most = max(1, architecture.num_experts)
            groups = [each for each in _divisors(dense.stage_size // expert_tensor, most) if most % each == 0]
            for expert in pinned.get("expert_parallel_size", groups):
                yield replace(
                    dense,
                    virtual_pipeline_parallel_size=chunks,
                    expert_tensor_parallel_size=expert_tensor,
                    expert_parallel_size=expert,
                )


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]


def _contexts(role: ModelRole, num_devices: int) -> list[int]:
    # The length of a reward model's conversations follows from its micro-batch and these ranks.
    if role.name == REWARD_MODEL:
        return [role.parallel.context_parallel_size]
    return [each for each in _divisors(num_devices, _MOST_CONTEXT) if each & (each - 1) == 0]


def _problem(
    space: Space,
    roles: Sequence[ModelRole],
    architectures: Mapping[str, Architecture],
    parallel: ParallelConfig,
    granule: int,
) -> tuple[Reason, str] | None:
    """Return why a layout is refused, None if it is not."""
    size = parallel.tensor_parallel_size
    if granule % size:
        return Reason.node, f"groups of tensor_parallel_size {size} do not fill the devices of each node"

    for role in roles:
        # The micro-batch and recomputation of a layout are chosen afterwards.
        fitted = replace(
            role,
            parallel=parallel,
            micro_batch=MicroBatchConfig(sequences=1),
            recomputation=Recomputation(),
        )
        for check in checks_of(RULES, Needs.role, space.config):
            if check.function not in _OF_VARIANTS:
                for found in check.run(space.config, fitted):
                    return _reason(check, found)
        for check in checks_of(RULES, Needs.model, space.config):
            for found in check.run(space.config, fitted, architectures[role.name]):
                return _reason(check, found)

    return None


def _reason(check: Check, found: Finding) -> tuple[Reason, str]:
    return (Reason.divisibility if check.function in _DIVISIBILITY else Reason.rules, str(found))


ENGINES = "engines"
_CONCURRENCIES = (64, 128, 256, 512, 1024)
_FRACTIONS = (0.5, 0.6, 0.7, 0.8, 0.85)


class EngineShape(NamedTuple):
    """The section `rollout` with a shape of the engines, and what follows from it.

    Attributes:
        seconds: The time of a step's generation.
        usage: The memory of a device.
    """

    rollout: RolloutConfig
    seconds: float
    usage: Usage


def with_engines(
    config: PPOConfig, sizes: tuple[int, int, int], max_staleness: int, **others: Any
) -> PPOConfig:
    """Return the configuration with other engines.

    Args:
        sizes: The number of replicas, the devices of each, and the groups of experts.
        others: Values of other keys of the section `rollout`.
    """
    num_replicas, tensor, expert = sizes
    section = replace(
        config.rollout,
        num_replicas=num_replicas,
        tensor_parallel_size=tensor,
        expert_parallel_size=expert,
        max_staleness=max_staleness,
        **others,
    )
    return config.with_sections(rollout=section)


def engines_of(
    space: Space,
    policy: Architecture,
    pool: Pool,
    max_staleness: int,
    costs: PredictedCosts,
    rejections: Rejections,
) -> list[EngineShape]:
    """Return the shapes of the engines in a pool, from fast to slow.

    A shape that is neither faster nor smaller than another one with as many devices is left out.
    """
    found = []
    for sizes in _sizes_of_engine(space, policy, pool):
        if (problem := _engine_problem(space, policy, sizes, max_staleness)) is not None:
            rejections.consider(ENGINES)
            rejections.reject(ENGINES, Reason.divisibility, problem)
            continue
        for share in _with_shares(space):
            for concurrency in _concurrencies(space, sizes[0]):
                rejections.consider(ENGINES)
                config = with_engines(
                    space.config, sizes, max_staleness, max_concurrency=concurrency, **share
                )
                usage = engine_usage(config, policy)
                if not _fits(space, config, policy, usage):
                    said = f"an engine of {counted(sizes[1], 'device')} needs {sized(usage.total)} on each"
                    rejections.reject(ENGINES, Reason.memory, said)
                    continue
                seconds = costs.generation_time(config, policy).seconds
                found.append(EngineShape(config.rollout, seconds, usage))

    found.sort(key=lambda each: _rank(space, each))
    return list(_undominated(found, rejections))


def _rank(space: Space, shape: EngineShape) -> tuple[Any, ...]:
    """Return a key that sorts shapes from fast to slow.

    The configured share of a device comes first among equally fast shapes, and then the smallest. The chosen
    values make the order unique.
    """
    rollout = shape.rollout
    engine = rollout.engine
    share = rollout.memory_share_of(engine)
    sizes = (rollout.num_replicas, rollout.tensor_parallel_size, rollout.expert_parallel_size)
    is_other = share != space.config.rollout.memory_share_of(engine)
    return (shape.seconds, is_other, shape.usage.total, *sizes, rollout.max_concurrency, share)


def _undominated(found: Sequence[EngineShape], rejections: Rejections) -> Iterator[EngineShape]:
    least: dict[int, int] = {}
    for each in found:
        tensor = each.rollout.tensor_parallel_size
        # No earlier shape is slower, so a later one is only of use if it needs less memory.
        if tensor in least and least[tensor] <= each.usage.total:
            rejections.reject(ENGINES, Reason.dominated)
            continue
        least[tensor] = each.usage.total
        yield each


def _sizes_of_engine(space: Space, policy: Architecture, pool: Pool) -> Iterator[tuple[int, int, int]]:
    """Yield the number of replicas, the devices of each, and the groups of experts."""
    rollout = space.config.rollout
    node = space.devices_per_node
    most_tensor = min(_MOST_TENSOR, pool.num_devices)

    # On one node, or on 2, 4, ... whole nodes.
    free = [size for size in range(1, most_tensor + 1) if node % size == 0]
    free += [node * 2**power for power in range(1, 7) if node * 2**power <= most_tensor]
    tensors = [rollout.tensor_parallel_size] if space.is_pinned("rollout.tensor_parallel_size") else free

    for tensor in tensors:
        most = pool.num_engines(tensor, node)
        wanted = rollout.num_replicas if space.is_pinned("rollout.num_replicas") else most
        if not 0 < wanted <= most:
            continue
        for expert in _groups_of_engine(space, policy, tensor):
            yield wanted, tensor, expert


def _groups_of_engine(space: Space, policy: Architecture, tensor: int) -> list[int]:
    if space.is_pinned("rollout.expert_parallel_size"):
        return [space.config.rollout.expert_parallel_size]
    if not routes_tokens(policy):
        return [1]
    return [each for each in range(1, tensor + 1) if tensor % each == 0]


def _with_shares(space: Space) -> list[dict[str, SGLangConfig]]:
    """Return the section of the engine with each share of a device, as the values of other keys."""
    rollout = space.config.rollout
    key = rollout.engine.needs.memory_key
    # On a CPU an engine has no share of a device.
    if key is None or space.is_pinned(key) or engine_share(space.config) is None:
        return [{}]
    _, section, _, argument = key.split(".")
    settings = getattr(rollout, section)
    return [
        {section: replace(settings, server_args={**settings.server_args, argument: share})}
        for share in sorted({*_FRACTIONS, rollout.memory_share_of(rollout.engine)})
    ]


def _concurrencies(space: Space, num_replicas: int) -> list[int]:
    configured = space.config.rollout.max_concurrency
    if space.is_pinned("rollout.max_concurrency"):
        return [configured]
    # More than the samples of an engine has no effect.
    most = -(-space.config.samples_per_step // num_replicas)
    limits = sorted({*_CONCURRENCIES, configured})
    return [*(each for each in limits if each < most), *[each for each in limits if each >= most][:1]]


def _engine_problem(
    space: Space, policy: Architecture, sizes: tuple[int, int, int], max_staleness: int
) -> str | None:
    config = with_engines(space.config, sizes, max_staleness)
    checks = checks_of(RULES, Needs.actor, config)
    found = (each for check in checks for each in check.run(config, policy))
    return next(map(str, chain(engine_problems(config), rollout_rules.whole_model(config), found)), None)


def _fits(space: Space, config: PPOConfig, policy: Architecture, usage: Usage) -> bool:
    """Return whether an engine fits on a device, and its share holds the weights and a row of cache."""
    share = engine_share(config)
    if share is not None and usage.parameters + row_cache(config, policy) > share:
        return False
    return usage.total <= space.device_bytes
