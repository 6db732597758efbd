"""Plan which role runs in which process on which device. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.schema import PlacementStrategy, RunConfig
from megarl.machine.errors import ConfigError
from megarl.machine.wording import counted
from megarl.placement.assign import assign
from megarl.placement.custom import custom_problems
from megarl.placement.placement_plan import PlacementPlan, reserve
from megarl.placement.requests import PoolRequest, base_roles, engine_problems, pool_requests


def plan_placement(config: RunConfig) -> PlacementPlan:
    """Return the plan of a valid configuration. Equal configurations give equal plans.

    Without `placement.devices_per_node`, nodes are as large as the roles need.

    Raises:
        ConfigError: There are too few devices, a tensor-parallel group does not fit on a node, an engine does
            not divide over its nodes, or a custom pool is invalid.
    """
    placement = config.placement
    if problems := engine_problems(config) or custom_problems(config):
        raise ConfigError("placement", problems)
    pools = pool_requests(config)

    # Without a configured size, use the smallest nodes that all groups fit on.
    for devices_per_node in _node_sizes(config, pools):
        groups = assign(pools, placement.num_nodes, devices_per_node)
        if groups is not None:
            return PlacementPlan(
                strategy=placement.strategy,
                num_nodes=placement.num_nodes,
                devices_per_node=devices_per_node,
                groups=groups,
                reservations=tuple(reserve(groups)),
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
