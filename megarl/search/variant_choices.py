"""Choices of a unit: layouts in the order to look at them, limits of micro-batches, and recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log2

from megarl.config.batch_arithmetic import room_of_longest_row
from megarl.config.schema import ParallelConfig, Recomputation, Recompute, RecomputeModule
from megarl.search.space import Space, Unit, roles_of

_TOKENS_UNIT = 1024
_TOKENS_FACTORS = (1, 2, 4)
# What recomputes less is faster, so the first one that fits is the best.
_RECOMPUTATIONS = (
    Recomputation(),
    Recomputation(Recompute.selective, (RecomputeModule.mlp,)),
    Recomputation(Recompute.full),
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


def recomputations(space: Space, unit: Unit) -> Sequence[Recomputation | None]:
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


def token_limits(space: Space, unit: Unit, parallel: ParallelConfig) -> list[int | None]:
    """Return the configured limit of a micro-batch, and room for 1, 2 and 4 of the longest rows."""
    role = replace(roles_of(space.config, unit)[0], parallel=parallel)
    configured = role.micro_batch.max_tokens
    is_free = role.optim is not None and not space.is_pinned(f"{role.micro_batch_key}.max_tokens")
    if configured is None or not is_free:
        return [configured]

    # Each context-parallel rank has its part of a row.
    longest = -(-room_of_longest_row(space.config, role) // parallel.context_parallel_size)
    least = -(-longest // _TOKENS_UNIT) * _TOKENS_UNIT
    limits = {least * factor for factor in _TOKENS_FACTORS}
    return [*sorted(limits | ({configured} if configured >= longest else set()))]
