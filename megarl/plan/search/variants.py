"""Variants of a unit's layouts (micro-batch and recomputation), from fast to slow, computed when needed.

A variant is a run with other values, from which its times and its memory follow.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import log2
from types import MappingProxyType
from typing import Any, NamedTuple

from megarl.config.batch_arithmetic import room_of_longest_row, rounded_up
from megarl.config.dotted import with_value
from megarl.config.roles import ModelRole
from megarl.config.rules import models
from megarl.config.schema import (
    MicroBatchConfig,
    ParallelConfig,
    PPOConfig,
    Recomputation,
    Recompute,
    RecomputeModule,
)
from megarl.machine.errors import counted, sized
from megarl.models.architecture import Architecture
from megarl.models.layers import layers_of
from megarl.plan.placement.activations import RoleMemory, role_memory
from megarl.plan.placement.layer_sizes import layers_of_stage
from megarl.plan.placement.model_state import model_state
from megarl.plan.search.space import Reason, Rejections, Space, units_of
from megarl.plan.step_time.step import PredictedCosts

LEVEL = "variants"
# The time of a variant with other micro-batches, virtual stages or distribution of experts, relative to the
# fastest known one with the same degrees of a dense model, is taken to be at least this.
_MOST_GAIN = 0.6

_TOKENS_UNIT = 1024
_TOKENS_FACTORS = (1, 2, 4)
# What recomputes less is faster, so the first one that fits is the best.
_RECOMPUTATIONS = (
    Recomputation(),
    Recomputation(Recompute.selective, (RecomputeModule.mlp,)),
    Recomputation(Recompute.full),
)


class Variant(NamedTuple):
    """A variant of a unit's layouts: the run with the chosen values, and the roles of the unit with them.

    Attributes:
        phases: The seconds of each phase, once they are known.
        memory: The memory of each role, by pipeline stage, once it is known.
    """

    config: PPOConfig
    roles: Sequence[ModelRole]
    phases: Mapping[str, float] = MappingProxyType({})
    memory: Mapping[str, tuple[RoleMemory, ...]] = MappingProxyType({})

    @property
    def parallel(self) -> ParallelConfig:
        return self.roles[0].parallel

    @property
    def sections(self) -> dict[str, Any]:
        """The sections with the values of the unit."""
        keys = (key for role in self.roles for key in (role.parallel_key, role.micro_batch_key))
        names = dict.fromkeys(key.partition(".")[0] for key in keys)
        return {name: getattr(self.config, name) for name in names}

    @property
    def seconds(self) -> float:
        """The time of all its phases, one after the other."""
        return sum(self.phases.values())


def variant_of(
    space: Space,
    unit: str,
    parallel: ParallelConfig,
    max_tokens: int | None,
    recomputation: Recomputation | None,
) -> Variant:
    """Return a variant without its times and memory.

    Args:
        max_tokens: The tokens of a micro-batch, None if the run limits its micro-batches by rows.
        recomputation: None for a unit that does not train.
    """
    first, *_ = roles = units_of(space.config)[unit]
    values: dict[str, Any] = {first.parallel_key: parallel}
    if recomputation is not None:
        how, modules, num_layers = recomputation
        section = first.parallel_key.removesuffix(".parallel")
        values |= {
            f"{section}.recompute": how,
            f"{section}.recompute_modules": list(modules),
            f"{section}.recompute_num_layers": num_layers,
        }

    # The reference is the only role without training whose micro-batch is chosen.
    for role in roles:
        key = role.micro_batch_key
        is_chosen = (role.optim is not None or role.name == "reference") and role.micro_batch.max_tokens
        if is_chosen and max_tokens is not None and not space.is_pinned(f"{key}.max_tokens"):
            values[key] = MicroBatchConfig(max_tokens=max_tokens)

    config = space.config
    for key, value in values.items():
        config = with_value(config, key, value)
    return Variant(config, units_of(config)[unit])


def memory_by_stage(config: PPOConfig, role: ModelRole, architecture: Architecture) -> tuple[RoleMemory, ...]:
    """Return the memory of a rank of each pipeline stage.

    Of stages with the same layers, between the first and the last, only the first is computed: it has the
    most micro-batches under way.
    """
    known: dict[object, RoleMemory] = {}
    stages = role.parallel.pipeline_parallel_size
    layers = layers_of(architecture)
    found = []
    for stage in range(stages):
        held = layers_of_stage(architecture, role.parallel, stage)
        parts = tuple((part.kind, part.window) for number in held for part in layers[number])
        kind = (stage == 0, stage == stages - 1, parts)
        if kind not in known:
            known[kind] = role_memory(config, role, architecture, stage)
        found.append(known[kind])
    return tuple(found)


def describe(role: ModelRole) -> str:
    """Return the sizes of a role that are not 1, such as `TP 4, DP 8, micro-batches of 16,384 tokens`."""
    parallel = role.parallel
    sizes = {
        "TP": parallel.tensor_parallel_size,
        "PP": parallel.pipeline_parallel_size,
        "VPP": parallel.virtual_pipeline_parallel_size or 1,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_parallel_size,
        "ETP": parallel.expert_tensor_parallel_size,
        "DP": parallel.data_parallel_size,
    }

    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["DP 1"]
    if role.micro_batch.max_tokens is not None:
        parts.append(f"micro-batches of {counted(role.micro_batch.max_tokens, 'token')}")
    if role.optim is not None:
        parts.append(f"recompute {role.recomputation.how.value}")

    return ", ".join(parts)


class VariantTable:
    """The variants of a unit over a number of devices that fit alone, in the order of their times.

    Iterating computes as many as are read. A variant of a layout that is neither faster nor smaller than
    another one of it is left out.
    """

    def __init__(
        self,
        space: Space,
        unit: str,
        architectures: Mapping[str, Architecture],
        layouts: Sequence[ParallelConfig],
        costs: PredictedCosts,
        rejections: Rejections,
    ) -> None:
        self._space = space
        self._unit = unit
        self._architectures = architectures
        self._costs = costs
        self._rejections = rejections
        self._limit = space.device_bytes
        self._recomputations = recomputations(space, unit)
        self._known: list[Variant] = []
        self._of_layout: dict[ParallelConfig, list[tuple[float, ...]]] = {}
        # What was not needed so far: a bound of its time, the order of its arrival, the number of its
        # variants, and what computes the first of them.
        self._queue: list[tuple[float, int, int, Callable[[], object]]] = []
        self._order = itertools.count()

        # Layouts with the same degrees of a dense model have similar times, so one of them bounds the others.
        groups: dict[ParallelConfig, list[ParallelConfig]] = {}
        for parallel in layouts:
            groups.setdefault(dense(parallel), []).append(parallel)
        for group in groups.values():
            limits = token_limits(space, unit, group[0])
            rejections.consider(LEVEL, len(group) * len(limits) * len(self._recomputations))
            group.sort(key=expected_rank)
            self._open([(parallel, limit) for limit in limits for parallel in group])

    def __iter__(self) -> Iterator[Variant]:
        index = 0
        while True:
            while index >= len(self._known):
                if not self._queue:
                    return
                *_, compute = heapq.heappop(self._queue)
                compute()
            yield self._known[index]
            index += 1

    @property
    def num_waiting(self) -> int:
        """The number of variants that have not been needed so far."""
        return sum(number for _, _, number, _ in self._queue)

    def _push(self, bound: float, number: int, compute: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (bound, next(self._order), number, compute))

    def _open(
        self, candidates: list[tuple[ParallelConfig, int | None]], fastest_s: float = float("inf")
    ) -> None:
        """Compute the next variant of a group that fits. It bounds those that are left.

        Args:
            candidates: The layouts with the same degrees of a dense model and the limits of their
                micro-batches that were not looked at.
            fastest_s: The time of the fastest other candidate.
        """
        while candidates:
            seconds = self._start(*candidates.pop(0))
            if seconds is None:
                continue
            fastest_s = min(seconds, fastest_s)
            if candidates:
                number = len(candidates) * len(self._recomputations)
                self._push(_MOST_GAIN * fastest_s, number, partial(self._open, candidates, fastest_s))
            return

    def _start(self, parallel: ParallelConfig, max_tokens: int | None) -> float | None:
        """Compute the fastest variant with a layout and a micro-batch, and return its time.

        Those with more recomputation wait. Returns None if none fits.
        """
        variants = [
            variant_of(self._space, self._unit, parallel, max_tokens, each) for each in self._recomputations
        ]
        if (problem := _problem(variants[0])) is not None:
            self._rejections.reject(LEVEL, Reason.rules, problem, len(variants))
            return None
        # The state alone may be too large, which takes less time to compute than the working memory.
        if (needed := self._state_bytes(variants[0])) > self._limit:
            self._reject_memory(variants[0], needed, len(variants))
            return None

        for number, variant in enumerate(variants):
            seconds = self._measure(variant)
            if seconds is not None:
                # More recomputation takes longer, so this time is a lower bound of the others.
                for slower in variants[number + 1 :]:
                    self._push(seconds, 1, partial(self._measure, slower))
                return seconds
        return None

    def _state_bytes(self, variant: Variant) -> int:
        return max(
            model_state(role, self._architectures[role.name], variant.config.model.dtype, stage).total
            for role in variant.roles
            if role.base_of is None
            for stage in {0, variant.parallel.pipeline_parallel_size - 1}
        )

    def _reject_memory(self, variant: Variant, needed: float, count: int = 1) -> None:
        said = f"{describe(variant.roles[0])} of {self._unit} needs {sized(needed)} or more on a device"
        self._rejections.reject(LEVEL, Reason.memory, said, count)

    def _measure(self, variant: Variant) -> float | None:
        """Compute the memory of a variant and, if it fits alone, its times, which give it its place.

        Returns:
            The time; None if it does not fit, and is rejected.
        """
        config = variant.config
        memory = {
            role.name: memory_by_stage(config, role, self._architectures[role.name]) for role in variant.roles
        }
        needed = least_bytes(memory, [role.name for role in variant.roles if role.base_of])
        if needed > self._limit:
            self._reject_memory(variant, needed)
            return None

        phases = {
            phase: time.seconds
            for role in variant.roles
            for phase, time in self._costs.role_times(config, role, self._architectures[role.name]).items()
        }
        measured = variant._replace(phases=phases, memory=memory)
        self._push(measured.seconds, 1, partial(self._add, measured))
        return measured.seconds

    def _add(self, variant: Variant) -> None:
        """Add a variant, unless another one of the layout is nowhere slower or larger."""
        sizes = (
            *variant.phases.values(),
            *(
                size
                for stages in variant.memory.values()
                for each in stages
                for size in (
                    each.state.parameters,
                    each.state.gradients,
                    each.state.optimizer,
                    each.score,
                    each.train,
                    each.step,
                    each.stays,
                )
            ),
        )

        known = self._of_layout.setdefault(variant.parallel, [])
        if any(all(one <= other for one, other in zip(each, sizes, strict=True)) for each in known):
            self._rejections.reject(LEVEL, Reason.dominated)
            return
        known.append(sizes)
        self._known.append(variant)


def _problem(variant: Variant) -> str | None:
    """Return why the rules refuse a variant, None if they do not."""
    rules = (models.micro_batch, models.recomputation)
    return next(
        (str(found) for role in variant.roles for rule in rules for found in rule(variant.config, role)), None
    )


def least_bytes(memory: Mapping[str, Sequence[RoleMemory]], bases: Collection[str]) -> int:
    """Return the bytes that a unit needs on a device in every placement, however much is offloaded.

    Args:
        memory: The memory of each role by stage.
        bases: Roles whose model is another role's, which have no state of their own.
    """
    return max(
        max(each.state.parameters + each.score, each.state.total + max(each.train, each.step))
        for role, stages in memory.items()
        if role not in bases
        for each in stages
    )


def dense(parallel: ParallelConfig) -> ParallelConfig:
    return replace(
        parallel, virtual_pipeline_parallel_size=None, expert_parallel_size=1, expert_tensor_parallel_size=1
    )


def expected_rank(parallel: ParallelConfig) -> tuple[int, float, int]:
    """Return a key that sorts layouts by how fast they probably are.

    Whole experts are faster than parts of them, 8 ranks for experts are on most nodes, and virtual stages
    shrink the bubble.
    """
    return (
        parallel.expert_tensor_parallel_size,
        abs(log2(parallel.expert_parallel_size / 8)),
        -(parallel.virtual_pipeline_parallel_size or 1),
    )


def recomputations(space: Space, unit: str) -> Sequence[Recomputation | None]:
    """Return what a unit may recompute, from little to much; None for a unit that does not train."""
    role = units_of(space.config)[unit][0]
    if role.optim is None:
        return (None,)

    section = role.parallel_key.removesuffix(".parallel")
    names = ("recompute", "recompute_modules", "recompute_num_layers")
    pinned = [number for number, name in enumerate(names) if space.is_pinned(f"{section}.{name}")]

    fitting = [
        each
        for each in _RECOMPUTATIONS
        if all(each[number] == role.recomputation[number] for number in pinned)
    ]

    return fitting or (role.recomputation,)


def token_limits(space: Space, unit: str, parallel: ParallelConfig) -> list[int | None]:
    """Return the configured limit of a micro-batch, and room for 1, 2 and 4 of the longest rows."""
    role = replace(units_of(space.config)[unit][0], parallel=parallel)
    configured = role.micro_batch.max_tokens
    is_free = role.optim is not None and not space.is_pinned(f"{role.micro_batch_key}.max_tokens")
    if configured is None or not is_free:
        return [configured]

    # Each context-parallel rank has its part of a row.
    longest = -(-room_of_longest_row(space.config, role) // parallel.context_parallel_size)
    limits = {rounded_up(longest, _TOKENS_UNIT) * factor for factor in _TOKENS_FACTORS}
    return [*sorted(limits | ({configured} if configured >= longest else set()))]
