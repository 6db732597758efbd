"""Device pools. A pool is one Ray placement group per node.

Pools that the cluster cannot hold are refused at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.controller import hints
from megarl.controller.node_resources import (
    CPU,
    GPU,
    NodeResources,
    amounts_in_words,
    fits,
    free_nodes,
    living_nodes,
    match,
    unused,
)
from megarl.machine.errors import HintedError
from megarl.plan.placement.placement_plan import PlacementPlan

_NODE_LABEL = "ray.io/node-id"  # a label that Ray sets on each node
_SETTLE_S = 5.0  # until resources that were just released appear as free
_log = logging.getLogger(__name__)
_moving = threading.Lock()


class InsufficientResourcesError(HintedError, ValueError):
    """The cluster does not have, or does not free, what a pool requests.

    The message lists requested and available resources per node.
    """

    hint = hints.NO_RESOURCES


class RayResourcePool:
    """A pool of devices with one process per bundle.

    On a CPU, a process takes one of Ray's logical CPUs, which `start_ray(num_cpus=...)` counts as the run
    needs them.

    Args:
        process_on_nodes: The number of processes on each node.
        use_gpu: Whether the processes get GPUs.
        name: The name in messages.
        max_colocate_count: The number of worker groups that may share the pool. Each process then takes that
            fraction of a GPU.
        wait_limit_s: How long to wait for resources that others hold, in seconds.
        gpus_per_process: The number of GPUs of each process.
        nodes: The numbers of the nodes in the run's plan. Pools of one ResourcePoolManager with the same
            number are on the same node. None: any nodes with free resources.
        excluded: Addresses of nodes that no pool may move to. All pools of a run share this set.
        before: Pools that take places on other nodes first if they lost nodes, too.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        name: str = "pool",
        max_colocate_count: int = 1,
        wait_limit_s: float = 60.0,
        gpus_per_process: int = 1,
        nodes: Sequence[int] | None = None,
        excluded: set[str] | None = None,
        before: Sequence[RayResourcePool] = (),
    ) -> None:
        if not process_on_nodes or min(*process_on_nodes, max_colocate_count, gpus_per_process) < 1:
            raise ValueError(
                f"pool {name!r}: process_on_nodes={list(process_on_nodes)}, "
                f"max_colocate_count={max_colocate_count} and gpus_per_process={gpus_per_process} must be at "
                "least 1"
            )

        self.process_on_nodes = tuple(process_on_nodes)
        self.local_ranks = [rank for count in process_on_nodes for rank in range(count)]  # within the nodes
        self.use_gpu = use_gpu
        self.name = name
        self.max_colocate_count = max_colocate_count
        self.wait_limit_s = wait_limit_s
        self.gpus_per_process = gpus_per_process
        self.nodes = None if nodes is None else tuple(nodes)
        self.excluded: set[str] = set() if excluded is None else excluded
        self._before = tuple(before)
        self._node_ids: list[str] = []  # Ray's ids of `nodes`; none before `pin`
        self._groups: list[PlacementGroup] = []
        self._reserved_on: list[str] = []  # Ray's ids of the nodes of `_groups`

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    def resources_per_process(self) -> dict[str, float]:
        return {CPU: self.max_colocate_count, **({GPU: self.gpus_per_process} if self.use_gpu else {})}

    def bundles(self) -> list[PlacementGroupSchedulingStrategy]:
        """Return the place of each process, its bundle, in rank order. The first call reserves the bundles.

        Raises:
            InsufficientResourcesError: The cluster can never hold them (raised at once), or others still hold
                them after `wait_limit_s`.
        """
        if not self._groups:
            # A reservation that can never be met would otherwise wait until the limit.
            check_fits([self])
            groups = self._reserve(dict(enumerate(self._node_ids or [None] * len(self.process_on_nodes))))
            if groups is None:
                raise InsufficientResourcesError(
                    explain([self], free_nodes(), f"still not free after {self.wait_limit_s:g} s")
                )
            self._groups = list(groups.values())
            # Keep the ids of the nodes, to recognize a lost node later.
            self._reserved_on = [
                placement_group_table(group)["bundles_to_node_id"][0] for group in self._groups
            ]
        return [
            PlacementGroupSchedulingStrategy(group, index)
            for group, count in zip(self._groups, self.process_on_nodes, strict=True)
            for index in range(count)
        ]

    def _reserve(self, places: Mapping[int, str | None]) -> dict[int, PlacementGroup] | None:
        """Reserve some of `process_on_nodes` on nodes, given by Ray's ids; None: any node.

        Returns:
            The placement groups. None if they are not free in time, and then nothing is reserved.
        """
        # One placement group per node keeps the node's processes together.
        groups = {
            index: _group_on_node(self.resources_per_process(), self.process_on_nodes[index], node_id)
            for index, node_id in places.items()
        }
        # All groups share one deadline. A partial reservation is released, because it would block others.
        deadline_s = time.monotonic() + self.wait_limit_s
        if all(group.wait(max(0.0, deadline_s - time.monotonic())) for group in groups.values()):
            return groups
        for group in groups.values():
            remove_placement_group(group)
        return None

    def split(self) -> list[RayResourcePool]:
        """Return one pool per process on this one's bundles, for groups that restart one by one."""
        return [self.part([rank]) for rank in range(self.world_size)]

    def part(self, bundles: Sequence[int]) -> RayResourcePool:
        """Return a pool of some of this one's bundles, for a group that shares it with others."""
        return _PoolPart(self, bundles)

    def pin(self, node_ids: Sequence[str]) -> None:
        """Reserve on these nodes, given by Ray's ids, one for each of `process_on_nodes`."""
        self._node_ids = list(node_ids)

    def lost_nodes(self) -> dict[int, str]:
        """Return the ranks whose node has left the cluster, with its address.

        A planned pool stays on its reserved nodes until `move_from_lost_nodes`. Ray moves another pool to any
        node with free resources.
        """
        # A pool that is not pinned can move, so nothing is lost while other nodes have free resources.
        if not self._node_ids and fits(node_demands([self]), living_nodes()):
            return {}
        gone = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if not node["Alive"]}
        return {rank: gone[node] for rank, node in enumerate(self.node_ids()) if node in gone}

    def node_ids(self) -> list[str]:
        """Return Ray's id of the node of each process, in rank order. The pool must be reserved."""
        return [
            node
            for node, count in zip(self._reserved_on, self.process_on_nodes, strict=True)
            for _ in range(count)
        ]

    def move_from_lost_nodes(self) -> dict[int, str]:
        """Reserve the bundles of lost nodes on other nodes with free resources, such as spare ones.

        Living nodes of the pool keep their bundles and processes.

        Returns:
            The ranks that no other node can hold, with the address of their node; see `lost_nodes`.
        """
        if not (lost := self.lost_nodes()) or not self._node_ids:
            return lost
        # If another run takes the node in the meantime, the ranks stay lost.
        return {} if self._move(self._lost_indices()) else lost

    def _lost_indices(self) -> list[int]:
        """Return the indices of `process_on_nodes` that have to move, because their node is lost."""
        if not self._node_ids:
            return []
        living = {node.identity for node in living_nodes()}
        return [index for index, node in enumerate(self._reserved_on) if node not in living]

    def excluded_ranks(self) -> list[int]:
        """Return the ranks on nodes that are excluded."""
        excluded = {node.identity for node in living_nodes() if node.node in self.excluded}
        return [rank for rank, node in enumerate(self.node_ids()) if node in excluded]

    def leave_excluded_nodes(self) -> bool:
        """Reserve the bundles of excluded nodes on other nodes, which ends all processes that use them.

        Returns whether it is done. The pool stays where it is if no other node has free resources.
        """
        excluded = {node.identity for node in living_nodes() if node.node in self.excluded}
        indices = [index for index, node in enumerate(self._reserved_on) if node in excluded]
        return bool(self._node_ids) and self._move(indices)

    def _move(self, indices: Sequence[int]) -> bool:
        """Reserve some of `process_on_nodes` on other nodes. Returns whether it is done."""
        # Pools move one after the other, so that each sees what the others have taken.
        with _moving:
            free = free_nodes()
            empty = {node.identity for node in unused(free)}
            places = self._choose(indices, self._left_by_others(free, empty), empty)
            return places is not None and self._move_to(places)

    def _left_by_others(self, nodes: Sequence[NodeResources], empty: Collection[str]) -> list[NodeResources]:
        """Return what nodes have without the places that the pools before this one will take."""
        left = {node.identity: node for node in nodes}
        for pool in self._before:
            able = dict(left)
            # One by one: the pool may have to wait for another node, but must not lose the first one.
            for index in pool._lost_indices():
                if places := pool._choose([index], list(able.values()), empty):
                    node = able.pop(places[index])
                    left[node.identity] = node.without(_demand(pool, pool.process_on_nodes[index]))
        return list(left.values())

    def _choose(
        self, indices: Sequence[int], nodes: Sequence[NodeResources], empty: Collection[str]
    ) -> dict[int, str] | None:
        """Choose a node with free resources for each of these `process_on_nodes`.

        Args:
            indices: The indices of `process_on_nodes`.
            nodes: What the nodes have.
            empty: Ray's ids of the nodes on which nothing runs yet.

        Returns:
            Ray's id of the node by index. None if not all of them fit.
        """
        spare = [
            node for node in nodes if node.identity not in self._node_ids and node.node not in self.excluded
        ]
        demands = [_demand(self, self.process_on_nodes[index]) for index in indices]
        # Empty nodes come first, so that what was on one node tends to stay together.
        for some in ([node for node in spare if node.identity in empty], spare):
            if (chosen := match(demands, some, apart=True)) is not None:
                return {index: some[number].identity for index, number in zip(indices, chosen, strict=True)}
        return None

    def _move_to(self, places: Mapping[int, str]) -> bool:
        """Reserve some of `process_on_nodes` on these nodes. Returns whether it is done."""
        # The pool keeps its place until then: another pool of the run may have taken the node meanwhile.
        new = self._reserve(dict(places))
        if new is None:
            return False

        for index, node_id in places.items():
            remove_placement_group(self._groups[index])
            self._groups[index] = new[index]
            self._node_ids[index] = self._reserved_on[index] = node_id
        return True

    def release(self) -> None:
        """Release the devices. This ends the processes that still use them."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []


class _PoolPart(RayResourcePool):
    """Some processes of `whole`, which holds the reservation."""

    def __init__(self, whole: RayResourcePool, ranks: Sequence[int]) -> None:
        # Count the processes of each node, in the order in which the part's ranks reach the nodes.
        node_of = [node for node, count in enumerate(whole.process_on_nodes) for _ in range(count)]
        nodes = [node_of[rank] for rank in ranks]
        super().__init__(
            [nodes.count(node) for node in dict.fromkeys(nodes)],
            whole.use_gpu,
            whole.name,
            whole.max_colocate_count,
            whole.wait_limit_s,
            whole.gpus_per_process,
            excluded=whole.excluded,
        )

        self._whole = whole
        self.ranks = tuple(ranks)

        # Local ranks count within this part, not within the whole pool.
        self.local_ranks = [nodes[:index].count(node) for index, node in enumerate(nodes)]

    def bundles(self) -> list[PlacementGroupSchedulingStrategy]:
        whole = self._whole.bundles()
        return [whole[rank] for rank in self.ranks]

    def node_ids(self) -> list[str]:
        whole = self._whole.node_ids()
        return [whole[rank] for rank in self.ranks]

    def lost_nodes(self) -> dict[int, str]:
        return self._own(self._whole.lost_nodes())

    def move_from_lost_nodes(self) -> dict[int, str]:
        return self._own(self._whole.move_from_lost_nodes())

    def leave_excluded_nodes(self) -> bool:
        return self._whole.leave_excluded_nodes()

    def _own(self, lost: Mapping[int, str]) -> dict[int, str]:
        """Translate ranks of the whole pool into ranks of this part."""
        return {index: lost[rank] for index, rank in enumerate(self.ranks) if rank in lost}

    def release(self) -> None:
        raise ValueError(f"pool {self.name!r}: a part of a pool cannot be released; release the whole pool")


class ResourcePoolManager:
    """The pools of a run, and which role runs on which pool.

    Args:
        resource_pool_spec: The number of processes on each node, by pool. After the loss of nodes, pools take
            places on others in this order.
        mapping: The pool of each role.
        use_gpu: Whether processes get GPUs.
        gpus_per_process: The number of GPUs of each process, by pool; 0 for processes without GPUs. Default
            1.
        max_colocate_counts: The number of worker groups that share a pool. Default 1.
        nodes: The numbers of its nodes by pool; see `RayResourcePool`.

    Raises:
        ValueError: A role is mapped to a pool that does not exist.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[str, str],
        use_gpu: bool = True,
        gpus_per_process: Mapping[str, int] = MappingProxyType({}),
        max_colocate_counts: Mapping[str, int] = MappingProxyType({}),
        nodes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        for role, pool in mapping.items():
            if pool not in resource_pool_spec:
                raise ValueError(
                    f"role {role!r} is mapped to pool {pool!r}; the pools are {sorted(resource_pool_spec)}"
                )

        # All pools share this set: a node excluded for one must not be used for another.
        excluded: set[str] = set()
        self.resource_pools: dict[str, RayResourcePool] = {}
        for name, counts in resource_pool_spec.items():
            self.resource_pools[name] = RayResourcePool(
                counts,
                use_gpu and gpus_per_process.get(name, 1) > 0,
                name,
                max_colocate_counts.get(name, 1),
                gpus_per_process=gpus_per_process.get(name, 1) or 1,
                nodes=nodes.get(name),
                excluded=excluded,
                before=tuple(self.resource_pools.values()),
            )
        self._mapping = dict(mapping)

    @classmethod
    def of_plan(cls, plan: PlacementPlan, use_gpu: bool) -> ResourcePoolManager:
        return cls(
            {name: plan.process_on_nodes[name] for name in plan.moving_order},
            plan.role_pools,
            use_gpu,
            gpus_per_process=plan.devices_per_process,
            max_colocate_counts=plan.colocate_counts,
            nodes=plan.nodes,
        )

    def create_resource_pool(self) -> None:
        """Reserve all pools.

        Raises:
            InsufficientResourcesError: The pools do not fit together. None is reserved then.
        """
        # Check and pin all pools together: one by one, the last might fail after others are reserved.
        pools = list(self.resource_pools.values())
        check_fits(pools)
        _pin(pools)
        for pool in pools:
            pool.bundles()

    def get_resource_pool(self, role: str) -> RayResourcePool:
        if role not in self._mapping:
            raise ValueError(f"role {role!r} has no pool; the roles are {sorted(self._mapping)}")
        return self.resource_pools[self._mapping[role]]

    def release(self) -> None:
        for pool in self.resource_pools.values():
            pool.release()


def check_fits(pools: Sequence[RayResourcePool]) -> None:
    """Check that the living nodes could hold the pools if they were empty.

    Raises:
        InsufficientResourcesError: They could not.
    """
    nodes = living_nodes()
    if not fits(node_demands(pools), nodes):
        raise InsufficientResourcesError(
            explain(pools, nodes, "more than the cluster has", _hint(pools, nodes))
        )


def _pin(pools: Sequence[RayResourcePool]) -> None:
    """Choose a node of the cluster for each node of the plan.

    Distinct nodes with free resources are preferred.
    """
    planned = [pool for pool in pools if pool.nodes is not None]
    numbers = _numbers(planned)
    demands = node_demands(planned)
    whole = living_nodes()
    free = free_nodes()

    # Resources that were just released take a moment to appear as free.
    if match(demands, whole, apart=True) is not None:
        deadline_s = time.monotonic() + _SETTLE_S
        while match(demands, free, apart=True) is None and time.monotonic() < deadline_s:
            time.sleep(_SETTLE_S / 20)
            free = free_nodes()

    # Prefer free nodes over occupied ones, and separate nodes over shared ones.
    for nodes, apart in ((free, True), (free, False), (whole, True), (whole, False)):
        if (chosen := match(demands, nodes, apart)) is not None:
            break
    else:
        return  # leave the decision to the reservation

    # The pools fit only once others release what they hold, which may take a while.
    if nodes is whole:
        _log.warning(
            "%s",
            explain(pools, free, f"held by others now; waiting up to {pools[0].wait_limit_s:g} s"),
        )

    # Pools with the same planned node get the same node of the cluster.
    identities = {number: nodes[index].identity for number, index in zip(numbers, chosen, strict=True)}
    for pool in planned:
        pool.pin([identities[number] for number in pool.nodes or ()])


def _numbers(pools: Sequence[RayResourcePool]) -> list[int]:
    return sorted({number for pool in pools for number in pool.nodes or ()})


def node_demands(pools: Sequence[RayResourcePool]) -> list[dict[str, float]]:
    """Return the demand on each planned node, in order, followed by those that may go to any node."""
    together: dict[int, dict[str, float]] = {number: {CPU: 0.0} for number in _numbers(pools)}
    alone: list[dict[str, float]] = []

    # Demands on the same planned node add up; a pool without a plan needs separate space.
    for pool in pools:
        for index, count in enumerate(pool.process_on_nodes):
            demand = _demand(pool, count)
            if pool.nodes is None:
                alone.append(demand)
                continue
            total = together[pool.nodes[index]]
            for kind, amount in demand.items():
                total[kind] = total.get(kind, 0) + amount

    return [*together.values(), *alone]


def _group_on_node(share: Mapping[str, float], count: int, node_id: str | None) -> PlacementGroup:
    labels = None if node_id is None else [{_NODE_LABEL: node_id}] * count
    bundles = [dict(share) for _ in range(count)]
    return placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=labels)


def _demand(pool: RayResourcePool, count: int) -> dict[str, float]:
    return {kind: amount * count for kind, amount in pool.resources_per_process().items()}


_SMALLER = "Add nodes or devices, use smaller parallel sizes, or let roles share a pool."


def _hint(pools: Sequence[RayResourcePool], whole_nodes: Sequence[NodeResources]) -> str:
    wants_gpus = any(GPU in pool.resources_per_process() for pool in pools)
    if wants_gpus and not any(node.resources.get(GPU) for node in whole_nodes):
        return "No node has a GPU: join a cluster with GPUs, or run on CPUs with device=cpu."
    return _SMALLER


def explain(
    pools: Sequence[RayResourcePool], nodes: Sequence[NodeResources], problem: str, hint: str = _SMALLER
) -> str:
    requested = [
        f"  pool {pool.name!r}: {amounts_in_words(_demand(pool, count))} on {_where(pool, index)}"
        for pool in pools
        for index, count in enumerate(pool.process_on_nodes)
    ]
    available = [f"  node {node.node}: {amounts_in_words(node.resources)}" for node in nodes]
    return "\n".join(
        [f"the requested resources are {problem}. Requested:", *requested, "Available:", *available, hint]
    )


def _where(pool: RayResourcePool, index: int) -> str:
    return "one node" if pool.nodes is None else f"node {pool.nodes[index]} of the plan"
