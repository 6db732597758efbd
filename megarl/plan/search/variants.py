"""Variants of a unit's layouts (micro-batch and recomputation), from fast to slow, computed when needed.

A variant is a choice of values, from which its times and its memory follow.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import log2
from types import MappingProxyType
from typing import NamedTuple

from megarl.config.batch_arithmetic import room_of_longest_row, rounded_up
from megarl.config.roles import TEACHER, ModelRole
from megarl.config.rules import models
from megarl.config.schema import (
    MicroBatchConfig,
    ParallelConfig,
    PPOConfig,
    Recomputation,
    Recompute,
    RecomputeModule,
)
from megarl.machine.wording import counted, sized
from megarl.models.architecture import Architecture
from megarl.models.layers import layers_of
from megarl.plan.placement.activations import RoleMemory, role_memory
from megarl.plan.placement.layer_sizes import layers_of_stage
from megarl.plan.placement.model_state import model_state
from megarl.plan.search.pool_memory import least_bytes
from megarl.plan.search.predicted_costs import PredictedCosts
from megarl.plan.search.rejections import Reason, Rejections
from megarl.plan.search.space import Space, roles_of

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


class Choice(NamedTuple):
    """The values that are chosen for a unit: a variant of its layouts, with its times and its memory.

    Attributes:
        max_tokens: The tokens of a micro-batch, None if the run limits its micro-batches by rows.
        recomputation: None for a unit that does not train.
        reference_tokens: The tokens of the reference's micro-batch, None if it stays as configured.
        phases: The seconds of each phase, once they are known.
        memory: The memory of each role, by pipeline stage, once it is known.
    """

    parallel: ParallelConfig
    max_tokens: int | None
    recomputation: Recomputation | None
    reference_tokens: int | None = None
    phases: Mapping[str, float] = MappingProxyType({})
    memory: Mapping[str, tuple[RoleMemory, ...]] = MappingProxyType({})

    @property
    def seconds(self) -> float:
        """The time of all its phases, one after the other."""
        return sum(self.phases.values())


def with_choice(config: PPOConfig, unit: str, choice: Choice) -> PPOConfig:
    """Return the configuration with what is chosen for a unit."""
    for role in roles_of(config, unit):
        if role.name == "reference":
            limit = _limited(config.reference.micro_batch, choice.reference_tokens)
            config = config.with_sections(reference=replace(config.reference, micro_batch=limit))
        elif role.name == TEACHER:
            config = config.with_sections(teacher=replace(config.teacher, parallel=choice.parallel))
        elif choice.recomputation is None:
            # Only the reward model remains, which does not train.
            model = replace(config.reward.model, parallel=choice.parallel)
            config = config.with_sections(reward=replace(config.reward, model=model))
        else:
            how, modules, num_layers = choice.recomputation
            section = replace(
                config.trained_models[role.name],
                parallel=choice.parallel,
                micro_batch=_limited(role.micro_batch, choice.max_tokens),
                recompute=how,
                recompute_modules=list(modules),
                recompute_num_layers=num_layers,
            )
            config = config.with_sections(**{role.name: section})
    return config


def _limited(micro_batch: MicroBatchConfig, max_tokens: int | None) -> MicroBatchConfig:
    return (
        micro_batch
        if max_tokens is None or micro_batch.max_tokens is None
        else MicroBatchConfig(max_tokens=max_tokens)
    )


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


def describe(choice: Choice) -> str:
    """Return the sizes of a choice that are not 1, such as `TP 4, DP 8, micro-batches of 16,384 tokens`."""
    parallel = choice.parallel
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
    if choice.max_tokens is not None:
        parts.append(f"micro-batches of {counted(choice.max_tokens, 'token')}")
    if choice.recomputation is not None:
        parts.append(f"recompute {choice.recomputation.how.value}")

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
        self._known: list[Choice] = []
        self._of_layout: dict[ParallelConfig, list[tuple[float, ...]]] = {}
        # What was not needed so far: a bound of its time, the order of its arrival, the number of its
        # variants, and what computes the first of them.
        self._queue: list[tuple[float, int, int, Callable[[], None]]] = []
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

    def __iter__(self) -> Iterator[Choice]:
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

    def _push(self, bound: float, number: int, compute: Callable[[], None]) -> None:
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
        keeps_reference = self._space.is_pinned("reference.micro_batch.max_tokens")
        of_reference = None if keeps_reference else max_tokens
        choices = [Choice(parallel, max_tokens, each, of_reference) for each in self._recomputations]
        if (problem := self._problem(choices[0])) is not None:
            self._rejections.reject(LEVEL, Reason.rules, problem, len(choices))
            return None
        # The state alone may be too large, which takes less time to compute than the working memory.
        if (needed := self._state_bytes(choices[0])) > self._limit:
            self._reject_memory(choices[0], needed, len(choices))
            return None

        for number, choice in enumerate(choices):
            memory = self._memory_that_fits(choice)
            if memory is not None:
                phases = self._times(choice)
                seconds = sum(phases.values())
                self._push(seconds, 1, partial(self._add, choice, phases, memory))
                # More recomputation takes longer, so this time is a lower bound of the others.
                for slower in choices[number + 1 :]:
                    self._push(seconds, 1, partial(self._measure, slower))
                return seconds
        return None

    def _problem(self, choice: Choice) -> str | None:
        """Return why the rules refuse a choice, None if they do not."""
        config = with_choice(self._space.config, self._unit, choice)
        for role in roles_of(config, self._unit):
            for rule in (models.micro_batch, models.recomputation):
                for violation in rule(config, role):
                    return str(violation)
        return None

    def _state_bytes(self, choice: Choice) -> int:
        config = with_choice(self._space.config, self._unit, choice)
        return max(
            model_state(role, self._architectures[role.name], config.model.dtype, stage).total
            for role in roles_of(config, self._unit)
            if role.base_of is None
            for stage in {0, choice.parallel.pipeline_parallel_size - 1}
        )

    def _reject_memory(self, choice: Choice, needed: float, count: int = 1) -> None:
        said = f"{describe(choice)} of {self._unit} needs {sized(needed)} or more on a device"
        self._rejections.reject(LEVEL, Reason.memory, said, count)

    def _memory_that_fits(self, choice: Choice) -> Mapping[str, tuple[RoleMemory, ...]] | None:
        """Return the memory of a choice. If it does not fit alone, reject the choice and return None."""
        config = with_choice(self._space.config, self._unit, choice)
        roles = roles_of(config, self._unit)
        memory = {role.name: memory_by_stage(config, role, self._architectures[role.name]) for role in roles}
        needed = least_bytes(memory, [role.name for role in roles if role.base_of])
        if needed <= self._limit:
            return memory
        self._reject_memory(choice, needed)
        return None

    def _measure(self, choice: Choice) -> None:
        """Compute the memory of a choice and, if it fits, its times, which give it its place in the order."""
        memory = self._memory_that_fits(choice)
        if memory is not None:
            phases = self._times(choice)
            self._push(sum(phases.values()), 1, partial(self._add, choice, phases, memory))

    def _add(
        self,
        choice: Choice,
        phases: Mapping[str, float],
        memory: Mapping[str, tuple[RoleMemory, ...]],
    ) -> None:
        """Add a variant to those that are known, unless another one is better."""
        if self._is_dominated(choice.parallel, phases, memory):
            self._rejections.reject(LEVEL, Reason.dominated)
        else:
            self._known.append(choice._replace(phases=phases, memory=memory))

    def _is_dominated(
        self,
        parallel: ParallelConfig,
        phases: Mapping[str, float],
        memory: Mapping[str, tuple[RoleMemory, ...]],
    ) -> bool:
        """Return whether another variant of the layout is nowhere slower or larger. If not, keep this one."""
        sizes = (
            *phases.values(),
            *(
                size
                for stages in memory.values()
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

        known = self._of_layout.setdefault(parallel, [])
        if any(all(one <= other for one, other in zip(each, sizes, strict=True)) for each in known):
            return True

        known.append(sizes)
        return False

    def _times(self, choice: Choice) -> Mapping[str, float]:
        config = with_choice(self._space.config, self._unit, choice)
        return {
            phase: time.seconds
            for role in roles_of(config, self._unit)
            for phase, time in self._costs.role_times(config, role, self._architectures[role.name]).items()
        }


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
    role = roles_of(space.config, unit)[0]
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
    role = replace(roles_of(space.config, unit)[0], parallel=parallel)
    configured = role.micro_batch.max_tokens
    is_free = role.optim is not None and not space.is_pinned(f"{role.micro_batch_key}.max_tokens")
    if configured is None or not is_free:
        return [configured]

    # Each context-parallel rank has its part of a row.
    longest = -(-room_of_longest_row(space.config, role) // parallel.context_parallel_size)
    least = rounded_up(longest, _TOKENS_UNIT)
    limits = {least * factor for factor in _TOKENS_FACTORS}
    return [*sorted(limits | ({configured} if configured >= longest else set()))]
