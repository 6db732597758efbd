"""Devices as pools: a pool is a Ray placement group per node, and is refused at once when the cluster cannot hold it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

_CPU, _GPU = "CPU", "GPU"
NO_EXCEPTIONS: Mapping[str, int] = MappingProxyType({})


class InsufficientResourcesError(ValueError):
    """The cluster does not have, or does not free, what a pool asks for; the message sets requested beside available, per node."""


class Bundle(NamedTuple):
    """One process's share of a pool. `local_rank` counts within its node."""

    placement_group: PlacementGroup
    number: int
    local_rank: int


class RayResourcePool:
    """`process_on_nodes[i]` processes, each with `gpus_per_process` devices of its own, together on one node, for every i.

    `max_colocate_count` worker groups may share the pool: each process then takes that fraction of a GPU.
    On CPU a process takes one of Ray's logical CPUs, which `start_ray(num_cpus=...)` counts as the run needs them.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        name: str = "pool",
        max_colocate_count: int = 1,
        wait_limit_s: float = 60.0,
        gpus_per_process: int = 1,
    ) -> None:
        if not process_on_nodes or min(*process_on_nodes, max_colocate_count, gpus_per_process) < 1:
            raise ValueError(
                f"pool {name!r}: process_on_nodes={list(process_on_nodes)}, max_colocate_count={max_colocate_count} and "
                f"gpus_per_process={gpus_per_process} must be at least 1"
            )
        self.process_on_nodes = tuple(process_on_nodes)
        self.use_gpu = use_gpu
        self.name = name
        self.max_colocate_count = max_colocate_count
        self.wait_limit_s = wait_limit_s
        self.gpus_per_process = gpus_per_process
        self._groups: list[PlacementGroup] = []

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    def resources_per_process(self) -> dict[str, float]:
        return {_CPU: self.max_colocate_count, **({_GPU: self.gpus_per_process} if self.use_gpu else {})}

    def bundles(self) -> list[Bundle]:
        """In the order of ranks; reserves them on the first call. Raises InsufficientResourcesError, at once when it can never
        be, and after `wait_limit_s` when others hold what is needed."""
        if not self._groups:
            check_fits([self])
            share = self.resources_per_process()
            self._groups = [placement_group([dict(share)] * count, strategy="STRICT_PACK") for count in self.process_on_nodes]
            deadline_s = time.monotonic() + self.wait_limit_s
            if not all(group.wait(max(0.0, deadline_s - time.monotonic())) for group in self._groups):
                self.release()
                raise InsufficientResourcesError(_explain([self], _free_per_node(), f"still not free after {self.wait_limit_s:g} s"))
        return [
            Bundle(group, index, index) for group, count in zip(self._groups, self.process_on_nodes, strict=True) for index in range(count)
        ]

    def split(self) -> list[RayResourcePool]:
        """One pool for each process, on the bundles of this one: for groups that are ended and started anew one by one."""
        return [self.part([rank]) for rank in range(self.world_size)]

    def part(self, ranks: Sequence[int]) -> RayResourcePool:
        """A pool on some of the bundles of this one, which keeps the reservation: for a group that shares those devices with others."""
        return _PoolPart(self, ranks)

    def release(self) -> None:
        """Gives the devices back; ends the processes that still use them."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []


class _PoolPart(RayResourcePool):
    """Some processes of `whole`, which holds the reservation."""

    def __init__(self, whole: RayResourcePool, ranks: Sequence[int]) -> None:
        nodes = [node for node, count in enumerate(whole.process_on_nodes) for _ in range(count)]
        counts = Counter(nodes[rank] for rank in ranks)
        super().__init__(
            [counts[node] for node in sorted(counts)],
            whole.use_gpu,
            whole.name,
            whole.max_colocate_count,
            whole.wait_limit_s,
            whole.gpus_per_process,
        )
        self._whole = whole
        self.ranks = tuple(sorted(ranks))

    def bundles(self) -> list[Bundle]:
        local_ranks = [rank for count in self.process_on_nodes for rank in range(count)]
        whole = self._whole.bundles()
        return [whole[rank]._replace(local_rank=local) for rank, local in zip(self.ranks, local_ranks, strict=True)]

    def release(self) -> None:
        raise ValueError(f"pool {self.name!r}: a part of a pool cannot be released; release the whole pool")


class ResourcePoolManager:
    """The pools of a run, and which role runs on which.

    `resource_pool_spec`: pool name -> processes on each node; `mapping`: role -> pool name; `gpus_per_process`: pool name -> GPUs
    of each process where `use_gpu`, 1 for those that it does not name, 0 for processes that need none; `max_colocate_counts`: pool
    name -> worker groups that share it, 1 for those that it does not name.
    Raises ValueError for a role whose pool does not exist.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[str, str],
        use_gpu: bool = True,
        gpus_per_process: Mapping[str, int] = NO_EXCEPTIONS,
        max_colocate_counts: Mapping[str, int] = NO_EXCEPTIONS,
    ) -> None:
        for role, pool in mapping.items():
            if pool not in resource_pool_spec:
                raise ValueError(f"role {role!r} is mapped to the pool {pool!r}; there are {sorted(resource_pool_spec)}")
        self.resource_pools = {
            name: RayResourcePool(
                counts,
                use_gpu and gpus_per_process.get(name, 1) > 0,
                name,
                max_colocate_counts.get(name, 1),
                gpus_per_process=gpus_per_process.get(name, 1) or 1,
            )
            for name, counts in resource_pool_spec.items()
        }
        self._mapping = dict(mapping)

    def create_resource_pool(self) -> None:
        """Reserves all pools. Raises InsufficientResourcesError before reserving any when they do not fit together."""
        check_fits(list(self.resource_pools.values()))
        for pool in self.resource_pools.values():
            pool.bundles()

    def get_resource_pool(self, role: str) -> RayResourcePool:
        if role not in self._mapping:
            raise ValueError(f"role {role!r} has no pool; there are {sorted(self._mapping)}")
        return self.resource_pools[self._mapping[role]]

    def release(self) -> None:
        for pool in self.resource_pools.values():
            pool.release()


class NodeResources(NamedTuple):
    node: str
    resources: Mapping[str, float]


def check_fits(pools: Sequence[RayResourcePool]) -> None:
    """Raises InsufficientResourcesError when the nodes that are alive could not hold the pools even if they were empty."""
    nodes = [NodeResources(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    if not fits([_demand(pool, count) for pool in pools for count in pool.process_on_nodes], nodes):
        raise InsufficientResourcesError(_explain(pools, nodes, "more than the cluster has"))


def fits(demands: Sequence[Mapping[str, float]], nodes: Sequence[NodeResources]) -> bool:
    """Whether each demand finds a node: the largest first, each on the node where it leaves least."""
    left = [dict(node.resources) for node in nodes]
    for demand in sorted(demands, key=lambda demand: (demand.get(_GPU, 0), demand[_CPU]), reverse=True):
        able = [room for room in left if all(room.get(kind, 0) >= amount for kind, amount in demand.items())]
        if not able:
            return False
        best = min(able, key=lambda room: (room.get(_GPU, 0), room[_CPU]))
        for kind, amount in demand.items():
            best[kind] -= amount
    return True


def _demand(pool: RayResourcePool, count: int) -> dict[str, float]:
    return {kind: amount * count for kind, amount in pool.resources_per_process().items()}


def _free_per_node() -> list[NodeResources]:
    # Ray has no public call for this that works without its dashboard.
    free = ray._private.state.available_resources_per_node()
    return [NodeResources(node["NodeManagerAddress"], free.get(node["NodeID"], {})) for node in ray.nodes() if node["Alive"]]


def _explain(pools: Sequence[RayResourcePool], nodes: Sequence[NodeResources], problem: str) -> str:
    requested = [f"  pool {pool.name!r}: {_amounts(_demand(pool, count))} on one node" for pool in pools for count in pool.process_on_nodes]
    available = [f"  node {node.node}: {_amounts(node.resources)}" for node in nodes]
    return "\n".join(
        [f"the pools ask for what is {problem}. Requested:", *requested, "Available:", *available]
        + ["Add nodes or devices, or give the roles smaller parallel sizes or a shared pool."]
    )


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in (_GPU, _CPU))
