"""Shapes of the rollout engines in a pool: replicas, devices of each, experts, concurrency and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megarl.config.rules import rollout as rollout_rules
from megarl.config.schema import PPOConfig, RolloutConfig, SGLangConfig
from megarl.config.validate import RULES, Needs, checks_of
from megarl.machine.wording import counted, sized
from megarl.models.architecture import Architecture
from megarl.models.layers import routes_tokens
from megarl.plan.placement.memory import engine_share, engine_usage, row_cache
from megarl.plan.placement.model_state import Usage
from megarl.plan.placement.requests import engine_problems
from megarl.plan.search.placements import Pool
from megarl.plan.search.predicted_costs import PredictedCosts
from megarl.plan.search.space import Reason, Rejections, Space

LEVEL = "engines"
_MOST_TENSOR = 64
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
    for sizes in _sizes(space, policy, pool):
        if (problem := _problem(space, policy, sizes, max_staleness)) is not None:
            rejections.consider(LEVEL)
            rejections.reject(LEVEL, Reason.divisibility, problem)
            continue
        for share in _with_shares(space):
            for concurrency in _concurrencies(space, sizes[0]):
                rejections.consider(LEVEL)
                config = with_engines(
                    space.config, sizes, max_staleness, max_concurrency=concurrency, **share
                )
                usage = engine_usage(config, policy)
                if not _fits(space, config, policy, usage):
                    said = f"an engine of {counted(sizes[1], 'device')} needs {sized(usage.total)} on each"
                    rejections.reject(LEVEL, Reason.memory, said)
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
            rejections.reject(LEVEL, Reason.dominated)
            continue
        least[tensor] = each.usage.total
        yield each


def _sizes(space: Space, policy: Architecture, pool: Pool) -> Iterator[tuple[int, int, int]]:
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
        for expert in _expert_groups(space, policy, tensor):
            yield wanted, tensor, expert


def _expert_groups(space: Space, policy: Architecture, tensor: int) -> list[int]:
    if space.is_pinned("rollout.expert_parallel_size"):
        return [space.config.rollout.expert_parallel_size]
    if not routes_tokens(policy):
        return [1]
    return [each for each in range(1, tensor + 1) if tensor % each == 0]


def _with_shares(space: Space) -> list[dict[str, SGLangConfig]]:
    """Return the section of the engine with each share of a device, as the values of other keys."""
    rollout = space.config.rollout
    needs = rollout.engine.needs
    settings = rollout.settings_of(rollout.engine)
    is_free = needs.memory_key is not None and not space.is_pinned(needs.memory_key)
    # On a CPU an engine has no share of a device.
    if not is_free or engine_share(space.config) is None:
        return [{}]
    assert needs.section is not None
    assert settings is not None
    arguments = settings.server_args
    return [
        {needs.section: replace(settings, server_args={**arguments, needs.memory_arg: share})}
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


def _problem(
    space: Space, policy: Architecture, sizes: tuple[int, int, int], max_staleness: int
) -> str | None:
    config = with_engines(space.config, sizes, max_staleness)
    for problem in engine_problems(config):
        return problem
    for violation in rollout_rules.whole_model(config):
        return str(violation)
    for check in checks_of(RULES, Needs.actor, config):
        for found in check.run(config, policy):
            return str(found)
    return None


def _fits(space: Space, config: PPOConfig, policy: Architecture, usage: Usage) -> bool:
    """Return whether an engine fits on a device, and its share holds the weights and a row of cache."""
    share = engine_share(config)
    if share is not None and usage.parameters + row_cache(config, policy) > share:
        return False
    return usage.total <= space.device_bytes
