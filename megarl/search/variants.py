"""Variants of a unit's layouts (micro-batch and recomputation), from fast to slow, computed when needed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megarl.config.batch_arithmetic import room_of_longest_row
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
from megarl.models.architecture import Architecture
from megarl.placement.expert_activations import layers_of_stage
from megarl.placement.memory import RoleMemory, model_state, role_memory
from megarl.search.costs import StepCosts
from megarl.search.pool_memory import least_bytes
from megarl.search.rejections import Reason, Rejections
from megarl.search.space import Space, Unit, roles_of

LEVEL = "variants"
_TOKENS_UNIT = 1024
_TOKENS_FACTORS = (1, 2, 4)
# What recomputes less is faster, so the first one that fits is the best.
_RECOMPUTATIONS = (
    Recomputation(),
    Recomputation(Recompute.selective, (RecomputeModule.mlp,)),
    Recomputation(Recompute.full),
)


class Choice(NamedTuple):
    """What is chosen for a unit.

    Attributes:
        max_tokens: The tokens of a micro-batch, None if the run limits its micro-batches by rows.
        recomputation: None for a unit that does not train.
        reference_tokens: The tokens of the reference's micro-batch, None if it stays as configured.
    """

    parallel: ParallelConfig
    max_tokens: int | None
    recomputation: Recomputation | None
    reference_tokens: int | None = None


class Variant(NamedTuple):
    """A choice for a unit, with its times and its memory.

    Attributes:
        seconds: The time of all its phases, one after the other.
        phases: The seconds of each phase.
        memory: The memory of each role, by pipeline stage.
    """

    choice: Choice
    seconds: float
    phases: Mapping[str, float]
    memory: Mapping[str, tuple[RoleMemory, ...]]

    @property
    def per_stage(self) -> int:
        return self.choice.parallel.stage_size


def with_choice(config: PPOConfig, unit: Unit, choice: Choice) -> PPOConfig:
    """Return the configuration with what is chosen for a unit."""
    for role in roles_of(config, unit):
        if role.name == "reference":
            limit = _limited(config.reference.micro_batch, choice.reference_tokens)
            config = config.with_sections(reference=replace(config.reference, micro_batch=limit))
        elif choice.recomputation is None:
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


class VariantTable:
    """The variants of a unit over a number of devices that fit alone, in the order of their times.

    Iterating computes as many as are read. A variant of a layout that is neither faster nor smaller than
    another one of it is left out.
    """

    def __init__(
        self,
        space: Space,
        unit: Unit,
        architectures: Mapping[str, Architecture],
        layouts: Sequence[ParallelConfig],
        costs: StepCosts,
        rejections: Rejections,
    ) -> None:
        self._space = space
        self._unit = unit
        self._architectures = architectures
        self._costs = costs
        self._rejections = rejections
        self._limit = device_bytes(space)
        self._known: list[Variant] = []
        self._of_layout: dict[ParallelConfig, list[tuple[int, ...]]] = {}
        self._queue: list[tuple[float, int, Choice, Mapping[str, float] | None]] = []
        self._order = itertools.count()

        # A variant without recomputation bounds the time of those with it.
        for parallel in layouts:
            for max_tokens in self._token_limits(parallel):
                self._start(parallel, max_tokens)

    def __iter__(self) -> Iterator[Variant]:
        index = 0
        while True:
            while index >= len(self._known):
                if not self._queue:
                    return
                self._advance()
            yield self._known[index]
            index += 1

    @property
    def num_waiting(self) -> int:
        """The number of variants that have not been needed so far."""
        return len(self._queue)

    def _start(self, parallel: ParallelConfig, max_tokens: int | None) -> None:
        keeps_reference = self._space.is_pinned("reference.micro_batch.max_tokens")
        of_reference = None if keeps_reference else max_tokens
        choices = [Choice(parallel, max_tokens, each, of_reference) for each in self._recomputations()]
        self._rejections.consider(LEVEL, len(choices))
        if (problem := self._problem(choices[0])) is not None:
            self._rejections.reject(LEVEL, Reason.rules, problem, len(choices))
            return
        # The state alone may be too large, which is known before any time is predicted.
        if (needed := self._state_bytes(choices[0])) > self._limit:
            said = f"the state of {self._unit.name} needs {needed / 2**30:,.1f} GiB in {describe(choices[0])}"
            self._rejections.reject(LEVEL, Reason.memory, said, len(choices))
            return

        phases = self._times(choices[0])
        bound = sum(phases.values())
        for number, choice in enumerate(choices):
            known = None if number else phases
            heapq.heappush(self._queue, (bound, next(self._order), choice, known))

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

    def _advance(self) -> None:
        """Take the variant with the least time or bound. If it has only a bound, compute its time."""
        _, _, choice, phases = heapq.heappop(self._queue)
        if phases is None:
            phases = self._times(choice)
            heapq.heappush(self._queue, (sum(phases.values()), next(self._order), choice, phases))
            return

        memory = self._memory(choice)
        needed = least_bytes(memory, self._bases())
        if needed > self._limit:
            said = f"{describe(choice)} of {self._unit.name} needs {needed / 2**30:,.1f} GiB on a device"
            self._rejections.reject(LEVEL, Reason.memory, said)
        elif self._is_dominated(choice.parallel, memory):
            self._rejections.reject(LEVEL, Reason.dominated)
        else:
            self._known.append(Variant(choice, sum(phases.values()), phases, memory))

    def _is_dominated(self, parallel: ParallelConfig, memory: Mapping[str, tuple[RoleMemory, ...]]) -> bool:
        """Return whether a faster variant of the layout needs no more memory. Remember this one if not."""
        sizes = tuple(
            size
            for stages in memory.values()
            for state, work in stages
            for size in (
                state.parameters,
                state.gradients,
                state.optimizer,
                work.score,
                work.train,
                work.step,
                work.stays,
            )
        )
        known = self._of_layout.setdefault(parallel, [])
        if any(all(map(int.__le__, each, sizes)) for each in known):
            return True
        known.append(sizes)
        return False

    def _bases(self) -> frozenset[str]:
        return frozenset(role.name for role in roles_of(self._space.config, self._unit) if role.base_of)

    def _times(self, choice: Choice) -> Mapping[str, float]:
        config = with_choice(self._space.config, self._unit, choice)
        return {
            phase: time.seconds
            for role in roles_of(config, self._unit)
            for phase, time in self._costs.role_times(config, role, self._architectures[role.name]).items()
        }

    def _memory(self, choice: Choice) -> dict[str, tuple[RoleMemory, ...]]:
        config = with_choice(self._space.config, self._unit, choice)
        return {
            role.name: memory_by_stage(config, role, self._architectures[role.name])
            for role in roles_of(config, self._unit)
        }

    def _recomputations(self) -> Sequence[Recomputation | None]:
        role = roles_of(self._space.config, self._unit)[0]
        if role.optim is None:
            return (None,)
        section = role.parallel_key.removesuffix(".parallel")
        names = ("recompute", "recompute_modules", "recompute_num_layers")
        pinned = [number for number, name in enumerate(names) if self._space.is_pinned(f"{section}.{name}")]
        fitting = [
            each
            for each in _RECOMPUTATIONS
            if all(each[number] == role.recomputation[number] for number in pinned)
        ]
        return fitting or (role.recomputation,)

    def _token_limits(self, parallel: ParallelConfig) -> list[int | None]:
        """Return the configured limit of a micro-batch, and room for 1, 2 and 4 of the longest rows."""
        config = with_choice(self._space.config, self._unit, Choice(parallel, None, None))
        role = replace(roles_of(self._space.config, self._unit)[0], parallel=parallel)
        configured = role.micro_batch.max_tokens
        is_free = role.optim is not None and not self._space.is_pinned(f"{role.micro_batch_key}.max_tokens")
        if configured is None or not is_free:
            return [configured]

        longest = -(-room_of_longest_row(config, role) // parallel.context_parallel_size)
        least = -(-longest // _TOKENS_UNIT) * _TOKENS_UNIT
        limits = {least * factor for factor in _TOKENS_FACTORS}
        return [*sorted(limits | ({configured} if configured >= longest else set()))]


def device_bytes(space: Space) -> float:
    """Return the memory budget of a device in bytes."""
    limit_gb = space.config.placement.device_memory_gb
    assert limit_gb is not None, "the search needs a budget"
    return limit_gb * 2**30


def memory_by_stage(config: PPOConfig, role: ModelRole, architecture: Architecture) -> tuple[RoleMemory, ...]:
    """Return the memory of a rank of each pipeline stage.

    Of stages with the same layers, between the first and the last, only the first is computed: it has the
    most micro-batches under way.
    """
    known: dict[object, RoleMemory] = {}
    stages = role.parallel.pipeline_parallel_size
    found = []
    for stage in range(stages):
        kind = (stage == 0, stage == stages - 1, _kinds_of_layers(architecture, role.parallel, stage))
        if kind not in known:
            known[kind] = role_memory(config, role, architecture, stage)
        found.append(known[kind])
    return tuple(found)


def _kinds_of_layers(architecture: Architecture, parallel: ParallelConfig, stage: int) -> tuple[object, ...]:
    """Return what distinguishes the layers of a stage: experts, delta nets and windows."""
    if architecture.experts is None and not architecture.delta_layers and not architecture.windows:
        return ()
    sparse = frozenset(architecture.experts.layers) if architecture.experts else frozenset()
    windows = architecture.windows
    return tuple(
        (layer in sparse, layer in architecture.delta_layers, windows[layer] if windows else None)
        for layer in layers_of_stage(architecture, parallel, stage)
    )


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
        parts.append(f"micro-batches of {choice.max_tokens:,} tokens")
    if choice.recomputation is not None:
        parts.append(f"recompute {choice.recomputation.how.value}")
    return ", ".join(parts)
