"""Plan which role runs in which process on which device: first fit, node by node. Pure.

A tensor-parallel group is always on one node. Only engines span several, with equally many devices on each.
`placement.roles` and `placement.pools`, the user's map of roles to pools and devices, are validated here.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence

from megarl.config.roles import WITHOUT_DEVICES, judge_roles, model_roles
from megarl.config.schema import PlacementConfig, PlacementStrategy, PPOConfig, RunConfig
from megarl.machine.errors import ConfigError, counted
from megarl.plan.placement.placement_plan import GroupPlan, PlacementPlan, ProcessPlan
from megarl.plan.placement.requests import (
    GroupRequest,
    PoolRequest,
    attention_problems,
    base_roles,
    engine_problems,
    group_requests,
    pool_requests,
)

_ROLES = "placement.roles"
_POOLS = "placement.pools"
_Device = tuple[int, int]  # node, number
_Place = tuple[int, tuple[int, ...]]  # node, numbers


def plan_placement(config: RunConfig) -> PlacementPlan:
    """Return the plan of a valid configuration. Equal configurations give equal plans.

    Without `placement.devices_per_node`, nodes are as large as the roles need.

    Raises:
        ConfigError: There are too few devices, a tensor-parallel group does not fit on a node, an engine does
            not divide over its nodes, a custom pool is invalid, or roles in one process differ in attention.
    """
    placement = config.placement
    if problems := engine_problems(config) or custom_problems(config):
        raise ConfigError("placement", problems)
    pools = pool_requests(config)
    if problems := attention_problems(config, pools):
        raise ConfigError("placement", problems)

    # Without a configured size, use the smallest nodes that all groups fit on.
    for devices_per_node in _node_sizes(config, pools):
        groups = assign(pools, placement.num_nodes, devices_per_node)
        if groups is not None:
            return PlacementPlan(
                strategy=placement.strategy,
                num_nodes=placement.num_nodes,
                devices_per_node=devices_per_node,
                groups=groups,
                bases=tuple(base_roles(config).items()),
            )

    raise ConfigError("placement", [_does_not_fit(config, pools)])


def _node_sizes(config: RunConfig, pools: Sequence[PoolRequest]) -> Sequence[int]:
    """Return the node sizes to try, in order."""
    placement = config.placement
    if placement.devices_per_node is not None:
        return [placement.devices_per_node]

    # A custom placement fixes the devices of each node, so the fullest node determines the size.
    if placement.strategy is PlacementStrategy.custom:
        counts = [pool.devices_on_nodes or () for pool in pools]
        return [
            max(
                1,
                *(
                    sum(each[node] for each in counts if node < len(each))
                    for node in range(placement.num_nodes)
                ),
            )
        ]

    # At least an even share of the devices per node, and at most all of them on one node.
    needed = sum(pool.num_devices for pool in pools)
    return range(-(-needed // placement.num_nodes), needed + 1)


def _does_not_fit(config: RunConfig, pools: Sequence[PoolRequest]) -> str:
    placement = config.placement
    size = _node_sizes(config, pools)[0]
    needed = sum(pool.num_devices for pool in pools)
    roles = ", ".join(_described(pool) for pool in pools if pool.num_devices)
    # If there are enough devices in total, a tensor-parallel group is what does not fit.
    split = (
        ", and a tensor-parallel group must fit on one node" if needed <= placement.num_nodes * size else ""
    )

    return (
        f"placement.num_nodes, placement.devices_per_node: {placement.num_nodes} x {size} = "
        f"{counted(placement.num_nodes * size, 'device')}, but the roles need {needed} ({roles}){split}; use "
        f"devices_per_node {_devices_that_work(pools, placement.num_nodes)} or more, more nodes, or smaller "
        f"parallel sizes"
    )


def _described(pool: PoolRequest) -> str:
    """Describe the groups that share devices, with the number of devices of the largest."""
    names = ["+".join(group.roles) for group in pool.groups if group.together]
    return f"{' and '.join(names)} {pool.num_devices}"


def _devices_that_work(pools: Sequence[PoolRequest], num_nodes: int) -> int:
    """Return the smallest sufficient node size. The search ends, since all roles fit on one large node."""
    devices = 1
    while assign(pools, num_nodes, devices) is None:
        devices += 1
    return devices


def custom_problems(config: RunConfig) -> list[str]:
    """Return all problems, one line each. Other strategies read neither key, which a rule refuses."""
    placement = config.placement
    if placement.strategy is not PlacementStrategy.custom:
        return []

    if not isinstance(config, PPOConfig):
        return [
            f"placement.strategy: is custom, but a run of kind {config.kind.value} has only the actor; leave "
            "placement.strategy at its default"
        ]

    requests = group_requests(config)
    # Sizes can only be checked once every role has a pool and every pool is valid.
    problems = [
        *_role_problems(placement, requests),
        *_judge_problems(placement, judge_roles(config)),
        *_pool_problems(placement),
    ]
    keys = {role.name: role.parallel_key for role in model_roles(config)}
    return problems or list(_sizes(placement, requests, keys))


def _role_problems(placement: PlacementConfig, requests: Collection[GroupRequest]) -> Iterator[str]:
    needed = [role for request in requests for role in request.roles]
    for role in needed:
        if role not in placement.roles and role not in WITHOUT_DEVICES:
            pools = " or ".join(placement.pools) or "a pool"
            yield f"{_ROLES}: the role {role!r} has no pool; assign one, such as {_ROLES}.{role}={pools}"

    for role, pool in placement.roles.items():
        if role not in needed:
            yield (
                f"{_ROLES}: this run has no role {role!r}; it has {', '.join(needed)}{_nearest(role, needed)}"
            )
        if pool not in placement.pools:
            known = f"there are {', '.join(placement.pools)}" if placement.pools else "no pools are defined"
            yield (
                f"{_ROLES}.{role}, {_POOLS}: there is no pool {pool!r}; "
                f"{known}{_nearest(pool, placement.pools)}; define its devices per node, such as "
                f"{_POOLS}.{pool}=[4]"
            )


def _judge_problems(placement: PlacementConfig, judges: Collection[str]) -> Iterator[str]:
    for judge in judges:
        pool = placement.roles.get(judge)
        others = [role for role, other in placement.roles.items() if other == pool and role != judge]
        if pool is not None and others:
            yield (
                f"{_ROLES}.{judge}: the pool {pool!r} is also that of {', '.join(others)}, but a judge that "
                "the run serves always uses its devices; give it a pool of its own"
            )


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _pool_problems(placement: PlacementConfig) -> Iterator[str]:
    used = set(placement.roles.values())
    for pool, counts in placement.pools.items():
        key = f"{_POOLS}.{pool}"
        if pool not in used:
            yield f"{key}: no role runs in it; map a role to it in {_ROLES}, or remove it"
        if any(count < 0 for count in counts) or not any(counts):
            yield f"{key}: is {counts}, but must list the devices on each node, such as [4] or [0, 4]"
        if len(counts) > placement.num_nodes:
            yield (
                f"{key}, placement.num_nodes: names {counted(len(counts), 'node')}, but num_nodes is "
                f"{placement.num_nodes}; use {counted(len(counts), 'node')}"
            )

    # Without a configured size, nodes are as large as the pools need.
    if placement.devices_per_node is None:
        return
    for node in range(placement.num_nodes):
        asked = {
            pool: counts[node]
            for pool, counts in placement.pools.items()
            if node < len(counts) and counts[node] > 0
        }
        if sum(asked.values()) > placement.devices_per_node:
            parts = ", ".join(f"{pool} {count}" for pool, count in asked.items())
            yield (
                f"{_POOLS}, placement.devices_per_node: on node {node} the pools have {sum(asked.values())} "
                f"devices ({parts}), but devices_per_node is {placement.devices_per_node}; use smaller pools "
                f"there, another node, or let roles share a pool"
            )


def _sizes(
    placement: PlacementConfig, requests: Collection[GroupRequest], parallel_keys: Mapping[str, str]
) -> Iterator[str]:
    """Check each role separately, since roles in one pool take turns on the same devices."""
    for request in requests:
        pool = placement.roles.get(request.name)
        if pool is None or request.together == 0 or fits_alone(request, counts := placement.pools[pool]):
            continue
        key = f"{_POOLS}.{pool}"
        needed = request.num_devices
        if sum(counts) < needed:
            given = counted(sum(counts), "device")
            reason = f"has {given}, but {request.name} needs {needed}; use {needed} or more"
        else:
            reason = (
                f"is {counts}: {request.name} needs {counted(needed, 'device')} in groups of "
                f"{request.together}, each on one node; use a multiple of {request.together} on each node"
            )
        yield f"{key}, {_keys_of(request, parallel_keys)}: {reason}, or smaller sizes of {request.name}"


def _keys_of(request: GroupRequest, parallel_keys: Mapping[str, str]) -> str:
    if request.name == "rollout":
        return "rollout.num_replicas, rollout.tensor_parallel_size, rollout.pipeline_parallel_size"
    if request.parallel is None:
        return "num_replicas and tensor_parallel_size of the judge in reward.judges"
    return parallel_keys[request.name]


def assign(
    pools: Sequence[PoolRequest], num_nodes: int, devices_per_node: int
) -> tuple[GroupPlan, ...] | None:
    """Return the groups in the order of the requests, None if they do not fit.

    Ranks are in the order of nodes and devices.
    """
    used = [0] * num_nodes
    groups: list[GroupPlan] = []

    for pool in pools:
        devices = _take(pool, used, devices_per_node)
        if devices is None:
            return None
        # Groups with devices share the pool's reservation and take turns.
        owner = next((group.name for group in pool.groups if group.together), None)
        for request in pool.groups:
            places = _places(request, devices)
            if places is None:
                return None
            reservation = owner if request.together and owner is not None else request.name
            groups.append(_group(pool, request, places, reservation))

    return tuple(groups)


def fits_alone(request: GroupRequest, devices_on_nodes: Sequence[int]) -> bool:
    """Return whether a group can run on this number of devices on each node."""
    devices = [(node, number) for node, count in enumerate(devices_on_nodes) for number in range(count)]
    return _places(request, devices) is not None


def _group(pool: PoolRequest, request: GroupRequest, places: Sequence[_Place], reservation: str) -> GroupPlan:
    processes = tuple(
        ProcessPlan(
            pool=pool.name, group=request.name, rank=rank, roles=request.roles, node=node, devices=devices
        )
        for rank, (node, devices) in enumerate(places)
    )
    return GroupPlan(
        name=request.name,
        pool=pool.name,
        roles=request.roles,
        processes=processes,
        reservation=reservation,
        nodes_per_engine=request.nodes_per_engine,
    )


def _take(pool: PoolRequest, used: list[int], devices_per_node: int) -> list[_Device] | None:
    """Take the next free devices in node order. `used` counts the devices taken on each node."""
    if pool.together == 0:
        return []
    wanted = (
        _chunks(pool, used, devices_per_node)
        if pool.devices_on_nodes is None
        else list(enumerate(pool.devices_on_nodes))
    )
    if wanted is None:
        return None

    devices = []
    # Devices of a node are assigned in order, so counting them is enough.
    for node, count in wanted:
        if node >= len(used) or used[node] + count > devices_per_node:
            return None
        devices += [(node, number) for number in range(used[node], used[node] + count)]
        used[node] += count

    return sorted(devices)


def _chunks(pool: PoolRequest, used: Sequence[int], devices_per_node: int) -> list[tuple[int, int]] | None:
    """Return (node, number of devices) of chunks that are on one node each.

    All chunks except the last have the same size, so a node that is full for one is full for all.
    """
    free = [devices_per_node - count for count in used]
    whole, rest = divmod(pool.num_devices, pool.together)
    taken: list[tuple[int, int]] = []
    node = 0

    # Fill the nodes in order with whole tensor-parallel groups.
    while len(taken) < whole and node < len(free):
        if free[node] >= pool.together:
            free[node] -= pool.together
            taken.append((node, pool.together))
        else:
            node += 1

    if len(taken) < whole:
        return None
    # The last, smaller chunk may fill a gap on an earlier node.
    if rest:
        last = next((index for index, count in enumerate(free) if count >= rest), None)
        if last is None:
            return None
        taken.append((last, rest))

    return taken


def _places(request: GroupRequest, devices: Sequence[_Device]) -> list[_Place] | None:
    """Return the pool's first devices in whole tensor-parallel groups. Remainders stay unused."""
    # Processes without devices run on the pool's first node, or on node 0.
    if request.together == 0:
        return [(devices[0][0] if devices else 0, ())] * request.num_processes
    on_nodes: dict[int, list[int]] = {}
    for node, number in devices:
        on_nodes.setdefault(node, []).append(number)
    places: list[_Place] = []

    for node, numbers in on_nodes.items():
        usable = len(numbers) - len(numbers) % request.together
        size = request.devices_per_process
        places += [(node, tuple(numbers[first : first + size])) for first in range(0, usable, size)]

    return places[: request.num_processes] if len(places) >= request.num_processes else None
