"""Find the values of other keys with which a placement fits into the memory of its devices. Pure.

Each change is planned like the run itself, so a message names only what is allowed and known to fit, with the
memory that it needs. If no change alone is enough, the one that frees the most is kept, and the next ones are
tried on top of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from megarl.config.batch_arithmetic import room_of_longest_row
from megarl.config.dotted import with_value
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import PlacementStrategy, PPOConfig, Recomputation, Recompute, RunConfig
from megarl.config.validate import validate
from megarl.machine.errors import ConfigError, counted, sized, written
from megarl.models.architecture import Architecture
from megarl.plan.placement.memory import budget_problems, plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.placement.requests import pool_requests
from megarl.plan.placement.transport import choose_transport

_MOST_CHANGES = 6  # changes that are made together
_MOST_SHOWN = 2
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size")
_REPLICAS = "data_parallel_size"
_ENGINE = "rollout.tensor_parallel_size"
_NODES = "placement.num_nodes"
_MODULES = Recomputation().modules
_CHUNK = "engine.log_prob_chunk_tokens"

# The values of a change, by their keys.
_Values = dict[str, Any]
# The bytes by which the fullest device of each pool exceeds its budget, those of the fullest device of all,
# and the number of devices.
_Outcome = tuple[int, int, int]


def memory_remedies(config: RunConfig, architectures: Mapping[str, Architecture]) -> str:
    """Return the changes with which a run fits into `placement.device_memory_gb`, as a sentence.

    Args:
        config: A run without errors, except that its placement exceeds the budget.
    """
    now = _outcome(config, architectures)
    assert now is not None, "the placement of a run without errors can be planned"
    num_devices = now[2]

    on_same, least = _search(config, architectures, now, num_devices)
    with_more, _ = _search(config, architectures, now, None)
    said = [f"{_written(values)} ({sized(peak)})" for values, (_, peak, _) in on_same]
    said += [
        f"{_written(values)} ({sized(peak)}, on {counted(devices, 'device')} instead of {num_devices})"
        for values, (_, peak, devices) in with_more
        if devices > num_devices
    ]
    if said:
        return f"one of these fits: {'; '.join(said)}; or start anyway with placement.over_budget=warn"

    closest = ""
    if least is not None:
        values, (_, peak, _) = least
        closest = f"; the closest, {_written(values)}, needs {sized(peak)}"
    return (
        f"no layout, recomputation, micro-batch or placement that was tried fits{closest}; use devices with "
        "more memory, shorter rows (data.max_response_length) or a smaller model, or start anyway with "
        "placement.over_budget=warn"
    )


def _search(
    config: RunConfig, architectures: Mapping[str, Architecture], now: _Outcome, most_devices: int | None
) -> tuple[list[tuple[_Values, _Outcome]], tuple[_Values, _Outcome] | None]:
    """Return the changes that fit with the fewest values, and otherwise the one that helps most.

    Args:
        most_devices: None to try only changes that need more devices.
    """
    best: tuple[_Values, _Outcome] = ({}, now)

    for _ in range(_MOST_CHANGES):
        changed = with_values(config, best[0])
        tried = [
            ({**best[0], **values}, outcome)
            for change in _changes(changed, needs_more=most_devices is None)
            for values, outcome in _tried(changed, change, architectures, most_devices)
        ]
        if fitting := [(values, outcome) for values, outcome in tried if outcome[0] == 0]:
            return fitting[:_MOST_SHOWN], None
        closest = min(tried, key=lambda each: each[1], default=best)
        if closest[1][0] >= best[1][0]:
            break
        best = closest

    return [], best if best[0] else None


def _tried(
    config: RunConfig, values: _Values, architectures: Mapping[str, Architecture], most_devices: int | None
) -> Iterator[tuple[_Values, _Outcome]]:
    """Yield a change with its outcome, if it is valid. It may need more nodes, too."""
    per_node = config.placement.devices_per_node
    if most_devices is None and per_node is not None:
        needed = sum(pool.num_devices for pool in pool_requests(with_values(config, values)))
        if (num_nodes := -(-needed // per_node)) > config.placement.num_nodes:
            values = {**values, _NODES: num_nodes}
    outcome = _outcome(with_values(config, values), architectures)
    if outcome is not None and (most_devices is None or outcome[2] <= most_devices):
        yield values, outcome


def _outcome(config: RunConfig, architectures: Mapping[str, Architecture]) -> _Outcome | None:
    """Plan the memory of a run. None if the run is not valid."""
    if next(iter(validate(config)), None) is not None:
        return None
    try:
        plan = plan_placement(config)
        if isinstance(config, PPOConfig):
            choose_transport(config, plan)
        devices = plan_memory(config, plan, architectures)
    except ConfigError:
        return None

    assert config.placement.device_memory_gb is not None
    limit = int(config.placement.device_memory_gb * 2**30)
    of_pools: dict[str, int] = {}
    # Devices with the same roles and stages have one record of their phases.
    for device in {(each.pool, id(each.phases)): each for each in devices}.values():
        of_pools[device.pool] = max(device.peak, of_pools.get(device.pool, 0))
    over = sum(max(0, peak - limit) for peak in of_pools.values())
    # An engine's share may be too small for a row on a device that is not full.
    if over == 0 and budget_problems(config, devices):
        over = 1
    return over, max(of_pools.values()), plan.num_devices


def with_values[Run: RunConfig](config: Run, values: _Values) -> Run:
    """Return the run with other values of some keys."""
    for key, value in values.items():
        config = with_value(config, key, value)
    return config


def _written(values: _Values) -> str:
    return " ".join(f"{key}={written(value)}" for key, value in values.items())


# ---- the changes that are tried


def _changes(config: RunConfig, *, needs_more: bool) -> Iterator[_Values]:
    """Yield changes of one step each, those first that cost the least time."""
    # Roles that share a section are changed together.
    layouts = {role.parallel_key: role for role in reversed(model_roles(config))}
    if needs_more:
        for key, role in layouts.items():
            yield {f"{key}.{_REPLICAS}": 2 * role.parallel.data_parallel_size}
            for name in _SIZES:
                yield {f"{key}.{name}": 2 * getattr(role.parallel, name)} | _sequences(role, name)
        if isinstance(config, PPOConfig):
            yield {_ENGINE: 2 * config.rollout.tensor_parallel_size}
        return

    for key, role in {role.micro_batch_key: role for role in model_roles(config)}.items():
        yield from _micro_batches(config, key, role)
    for role in layouts.values():
        yield from _recomputation(role)
    for key, role in layouts.items():
        yield from _same_devices(key, role)
    if isinstance(config, PPOConfig):
        yield from _engines(config)
        for strategy in PlacementStrategy:
            if strategy not in (PlacementStrategy.custom, config.placement.strategy):
                yield {"placement.strategy": strategy}
    if (tokens := config.engine.log_prob_chunk_tokens or 1024) > 128:
        yield {_CHUNK: tokens // 2}


def _micro_batches(config: RunConfig, key: str, role: ModelRole) -> Iterator[_Values]:
    limit = role.micro_batch
    if limit.sequences is not None:
        if limit.sequences > 1:
            yield {f"{key}.sequences": max(1, limit.sequences // 2)}
        return
    # A micro-batch holds at least the longest row, of which each context-parallel rank has its part.
    least = -(-room_of_longest_row(config, role) // role.parallel.context_parallel_size)
    if limit.max_tokens is not None and limit.max_tokens > least:
        yield {f"{key}.max_tokens": max(least, limit.max_tokens // 2)}


def _recomputation(role: ModelRole) -> Iterator[_Values]:
    key = f"{role.trained_key}.recompute"
    how, modules, num_layers = role.recomputation
    if role.trained_key is None:
        return
    if how is Recompute.full and num_layers is not None:
        yield {f"{key}_num_layers": None}
    if how is not Recompute.full:
        # Full recomputation refuses the modules of selective recomputation.
        unset = {} if modules == _MODULES else {f"{key}_modules": list(_MODULES)}
        yield {key: Recompute.full} | unset


def _sequences(role: ModelRole, name: str) -> _Values:
    """Return what a layout with more ranks sets, too.

    Tensor-parallel ranks shard activations as well, and more stages need another layout.
    """
    if name == "pipeline_parallel_size" and role.parallel.pipeline_layout is not None:
        return {f"{role.parallel_key}.pipeline_layout": None}
    if name != "tensor_parallel_size" or role.parallel.sequence_parallel:
        return {}
    return {f"{role.parallel_key}.sequence_parallel": True}


def _same_devices(key: str, role: ModelRole) -> Iterator[_Values]:
    """Yield layouts that shard the model further, over ranks of other replicas."""
    parallel = role.parallel
    if parallel.tensor_parallel_size > 1 and not parallel.sequence_parallel:
        yield {f"{key}.sequence_parallel": True}
    for name in _SIZES:
        size = {f"{key}.{name}": 2 * getattr(parallel, name)} | _sequences(role, name)
        if name == "expert_parallel_size":
            yield size
        elif parallel.data_parallel_size % 2 == 0:
            yield size | {f"{key}.{_REPLICAS}": parallel.data_parallel_size // 2}


def _engines(config: PPOConfig) -> Iterator[_Values]:
    rollout = config.rollout
    key = rollout.engine.needs.memory_key
    share = rollout.memory_share_of(rollout.engine)
    if key is not None and isinstance(share, int | float):
        for percent in (-10, -20, -40, 10, 20, 40):
            changed = ceil(100 * share + percent) / 100
            if 0 < changed < 1:
                yield {key: changed}
    size = {_ENGINE: 2 * rollout.tensor_parallel_size}
    if rollout.num_replicas % 2 == 0:
        yield size | {"rollout.num_replicas": rollout.num_replicas // 2}
