"""The values that a search chooses for a unit, and the memory that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from megarl.config.roles import TEACHER, ModelRole
from megarl.config.schema import MicroBatchConfig, ParallelConfig, PPOConfig, Recomputation
from megarl.machine.wording import counted
from megarl.models.architecture import Architecture
from megarl.models.layers import layers_of
from megarl.plan.placement.layer_sizes import layers_of_stage
from megarl.plan.placement.memory import RoleMemory, role_memory
from megarl.plan.search.space import roles_of


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
