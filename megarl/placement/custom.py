"""Validate `placement.roles` and `placement.pools`: the user's map from roles to pools and to devices."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping

from megarl.config.roles import WITHOUT_DEVICES, judge_roles, model_roles
from megarl.config.schema import PlacementConfig, PlacementStrategy, PPOConfig, RunConfig
from megarl.machine.wording import counted
from megarl.placement.assign import fits_alone
from megarl.placement.requests import GroupRequest, group_requests

_ROLES = "placement.roles"
_POOLS = "placement.pools"


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
