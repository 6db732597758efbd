"""The placement plan: pools, the groups of processes in them, and the devices of each process. Data only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import batched

from megarl.config.roles import is_model_role
from megarl.config.schema import PlacementStrategy

# Devices of one node that are reserved together: the node, and their numbers. Without devices, one CPU.
Bundle = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """One process.

    Attributes:
        group: The group of the process.
        roles: The roles that the process holds.
        devices: Device numbers on the node. Empty for a process that only needs a CPU; several for an engine
            that shards its model.
    """

    pool: str
    group: str
    rank: int
    roles: tuple[str, ...]
    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """Processes that hold the same roles with one layout.

    Attributes:
        roles: The roles that each process holds.
        reservation: The reservation whose bundles the processes run in.
        nodes_per_engine: The number of consecutive processes, each on its own node, that are one engine.
    """

    name: str
    pool: str
    roles: tuple[str, ...]
    processes: tuple[ProcessPlan, ...]
    reservation: str
    nodes_per_engine: int = 1

    @property
    def engines(self) -> tuple[tuple[ProcessPlan, ...], ...]:
        """The processes of each engine, one for each of its nodes."""
        return tuple(batched(self.processes, self.nodes_per_engine))

    @property
    def uses_devices(self) -> bool:
        return bool(self.processes[0].devices)

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset(process.node for process in self.processes)

    @cached_property
    def devices(self) -> frozenset[tuple[int, int]]:
        """The node and device number of each device."""
        return frozenset((process.node, device) for process in self.processes for device in process.devices)


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """The placement of a run.

    Pools share no devices, so they work at the same time. The groups of a pool start at its first device and
    take turns. What is requested from the cluster at once is a reservation: the devices of a pool, or a group
    without devices. It has the name of its first group.

    `bases` has pairs of roles: the first is the model of the second without its adapters, in its processes.
    """

    strategy: PlacementStrategy
    num_nodes: int
    devices_per_node: int
    groups: tuple[GroupPlan, ...]
    bases: tuple[tuple[str, str], ...] = ()

    @property
    def processes(self) -> tuple[ProcessPlan, ...]:
        return tuple(process for group in self.groups for process in group.processes)

    @property
    def num_devices(self) -> int:
        return sum(self.pools.values())

    @property
    def pools(self) -> dict[str, int]:
        """The number of devices by pool."""
        devices: dict[str, set[tuple[int, int]]] = {group.pool: set() for group in self.groups}
        for group in self.groups:
            devices[group.pool] |= group.devices
        return {pool: len(places) for pool, places in devices.items()}

    @cached_property
    def reserved(self) -> dict[str, tuple[Bundle, ...]]:
        """The bundles of each reservation, ordered by node and device."""
        sharing: dict[str, list[GroupPlan]] = {}
        for group in self.groups:
            sharing.setdefault(group.reservation, []).append(group)

        # Groups that share devices divide them differently, so each device gets its own bundle.
        return {
            name: tuple((process.node, process.devices) for process in groups[0].processes)
            if len(groups) == 1
            else tuple(
                (node, (device,))
                for node, device in sorted(frozenset().union(*(each.devices for each in groups)))
            )
            for name, groups in sharing.items()
        }

    @property
    def process_on_nodes(self) -> dict[str, list[int]]:
        """The number of bundles on each of a reservation's nodes, by reservation."""
        return {
            name: list(Counter(node for node, _ in bundles).values())
            for name, bundles in self.reserved.items()
        }

    @property
    def moving_order(self) -> tuple[str, ...]:
        """The reservations in the order in which they take places on other nodes when theirs are lost.

        Ranks of models come first, because they need the most; then engines and servers of judges; and last
        processes without devices, which find a place almost anywhere.
        """
        with_models = {name for role, name in self.role_pools.items() if is_model_role(role)}
        devices = self.devices_per_process
        return tuple(sorted(self.reserved, key=lambda name: (name not in with_models, not devices[name])))

    @property
    def nodes(self) -> dict[str, tuple[int, ...]]:
        """The numbers of a reservation's nodes, in the order of `process_on_nodes`, by reservation."""
        return {
            name: tuple(dict.fromkeys(node for node, _ in bundles)) for name, bundles in self.reserved.items()
        }

    @property
    def devices_per_process(self) -> dict[str, int]:
        """The number of devices per bundle by reservation; 0 for CPU bundles."""
        return {name: len(bundles[0][1]) for name, bundles in self.reserved.items()}

    @property
    def colocate_counts(self) -> dict[str, int]:
        """The number of groups whose processes share the bundles, by reservation."""
        return dict(Counter(group.reservation for group in self.groups))

    @property
    def num_cpus(self) -> int:
        """Ray's logical CPUs in the reservations: one for each process that a bundle may hold."""
        return sum(len(self.reserved[group.reservation]) for group in self.groups)

    @property
    def role_pools(self) -> dict[str, str]:
        """The reservation of each role, a key of `process_on_nodes`."""
        return {role: group.reservation for group in self.groups for role in group.roles}

    def bundles(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the bundles whose devices each process of a group uses. The first is its own."""
        group = self.group(name)
        # A group without devices has one bundle per process.
        if not group.uses_devices:
            return tuple((rank,) for rank in range(len(group.processes)))
        # Groups that share a reservation divide it differently, so bundles are looked up by device.
        numbers = {
            (node, device): number
            for number, (node, devices) in enumerate(self.reserved[group.reservation])
            for device in devices
        }

        return tuple(
            tuple(dict.fromkeys(numbers[process.node, device] for device in process.devices))
            for process in group.processes
        )

    def group(self, name: str) -> GroupPlan:
        return next(group for group in self.groups if group.name == name)

    def group_of(self, role: str) -> GroupPlan:
        """Return the group that runs `role`.

        Raises:
            ValueError: The run has no such role.
        """
        for group in self.groups:
            if role in group.roles:
                return group
        raise ValueError(f"the plan has no role {role!r}; it has {', '.join(self.roles)}")

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for group in self.groups for role in group.roles)

    def share_devices(self, role: str, other: str) -> bool:
        """Return whether two roles have a device in common, so that they take turns."""
        return bool(self.group_of(role).devices & self.group_of(other).devices)

    def on_same_devices(self, role: str) -> tuple[str, ...]:
        """Return the other roles that share a device with `role`."""
        return tuple(other for other in self.roles if other != role and self.share_devices(role, other))
