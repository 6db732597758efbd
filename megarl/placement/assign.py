"""Assign devices to pools and to the groups in them: first fit, node by node.

A tensor-parallel group is always on one node. Only engines span several, with equally many devices on each.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.placement.placement_plan import GroupPlan, ProcessPlan
from megarl.placement.requests import GroupRequest, PoolRequest

_Device = tuple[int, int]  # node, number
_Place = tuple[int, tuple[int, ...]]  # node, numbers


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
    if pool.devices_on_nodes is not None:
        wanted = list(enumerate(pool.devices_on_nodes))
    else:
        found = _chunks(pool, used, devices_per_node)
        if found is None:
            return None
        wanted = found

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
