"""Which role runs in which process on which device: a pure plan, made from the configuration and printed before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megarl.config.errors import ConfigError
from megarl.config.roles import needs_critic, needs_reference
from megarl.config.schema import PlacementStrategy, PPOConfig, SFTConfig


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """One process. `device`: its number on the node, None for a process that only needs a CPU."""

    pool: str
    group: str
    rank: int
    roles: tuple[str, ...]
    node: int
    device: int | None

    def __str__(self) -> str:
        place = "cpu" if self.device is None else f"device {self.device}"
        return f"{self.pool}/{self.group}[{self.rank}] {'+'.join(self.roles)} on node {self.node}, {place}"


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """Processes that hold the same roles with one layout: one worker group."""

    name: str
    pool: str
    roles: tuple[str, ...]
    processes: tuple[ProcessPlan, ...]

    @property
    def uses_devices(self) -> bool:
        return self.processes[0].device is not None

    @property
    def processes_on_nodes(self) -> list[int]:
        """How many processes each node has, in the order of ranks; nodes without one are left out."""
        nodes = [process.node for process in self.processes]
        return [nodes.count(node) for node in dict.fromkeys(nodes)]


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """Pools share no device, so they work at the same time; the groups of a pool stand side by side in it."""

    strategy: PlacementStrategy
    num_nodes: int
    devices_per_node: int
    groups: tuple[GroupPlan, ...]

    @property
    def processes(self) -> tuple[ProcessPlan, ...]:
        return tuple(process for group in self.groups for process in group.processes)

    @property
    def num_devices(self) -> int:
        return sum(process.device is not None for process in self.processes)

    @property
    def pools(self) -> dict[str, int]:
        """Pool name -> devices."""
        counts = dict.fromkeys((group.pool for group in self.groups), 0)
        for process in self.processes:
            counts[process.pool] += process.device is not None
        return counts

    @property
    def num_processes(self) -> int:
        return len(self.processes)

    @property
    def process_on_nodes(self) -> dict[str, list[int]]:
        """Group -> processes on each of its nodes, as the executor reserves them: a group is one reservation."""
        return {group.name: group.processes_on_nodes for group in self.groups}

    @property
    def role_pools(self) -> dict[str, str]:
        """Role -> the group that holds it, a key of `process_on_nodes`."""
        return {role: group.name for group in self.groups for role in group.roles}

    def group(self, name: str) -> GroupPlan:
        return next(group for group in self.groups if group.name == name)

    def __str__(self) -> str:
        return "\n".join(str(process) for process in self.processes)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A group to place. `together`: so many consecutive ranks (a tensor-parallel group) must be on one node; 0: a CPU process."""

    name: str
    pool: str
    roles: tuple[str, ...]
    num_processes: int
    together: int


def plan_placement(config: PPOConfig | SFTConfig) -> PlacementPlan:
    """The plan of a valid configuration; the same configuration gives the same plan.

    Without `placement.devices_per_node`, nodes are as large as the roles need.
    Raises ConfigError when the devices that the configuration states are too few, or a tensor-parallel group has no node to fit.
    """
    placement = config.placement
    requests = _sft(config) if isinstance(config, SFTConfig) else _STRATEGIES[placement.strategy](config)
    needed = sum(request.num_processes for request in requests if request.together)
    smallest = -(-needed // placement.num_nodes)
    sizes = [placement.devices_per_node] if placement.devices_per_node is not None else range(smallest, needed + 1)
    for devices_per_node in sizes:
        groups = _assign(requests, placement.num_nodes, devices_per_node)
        if groups is not None:
            return PlacementPlan(
                strategy=placement.strategy, num_nodes=placement.num_nodes, devices_per_node=devices_per_node, groups=groups
            )
    roles = ", ".join(f"{'+'.join(request.roles)} {request.num_processes}" for request in requests if request.together)
    fits_by_count = needed <= placement.num_nodes * sizes[0]
    split = ", and a tensor-parallel group must fit on one node" if fits_by_count else ""
    problem = (
        f"placement.num_nodes, placement.devices_per_node: {placement.num_nodes} x {sizes[0]} = {placement.num_nodes * sizes[0]} devices, "
        f"but the roles need {needed} ({roles}){split}; use devices_per_node {_devices_that_work(requests, placement.num_nodes)} or more, "
        "more nodes, or smaller parallel sizes"
    )
    raise ConfigError("placement", [problem])


def _devices_that_work(requests: list[_Request], num_nodes: int) -> int:
    """All roles fit on one node of this size, so the search ends."""
    devices = 1
    while _assign(requests, num_nodes, devices) is None:
        devices += 1
    return devices


def _policy_roles(config: PPOConfig) -> tuple[str, ...]:
    return ("actor", "reference") if needs_reference(config) else ("actor",)


def _split_collocate(config: PPOConfig) -> list[_Request]:
    """Actor and reference in one set of processes, the critic in another, rollout in a third. The reward is a CPU process beside
    the critic, or in a pool of its own where there is none."""
    actor, critic, rollout = config.actor.parallel, config.critic.parallel, config.rollout
    requests = [
        _Request(
            name="actor", pool="actor", roles=_policy_roles(config), num_processes=actor.world_size, together=actor.tensor_parallel_size
        )
    ]
    if needs_critic(config):
        requests.append(
            _Request(name="critic", pool="critic", roles=("critic",), num_processes=critic.world_size, together=critic.tensor_parallel_size)
        )
    num_engines = rollout.num_replicas * rollout.tensor_parallel_size
    beside = "critic" if needs_critic(config) else "reward"
    return [
        *requests,
        _Request(name="reward", pool=beside, roles=("reward",), num_processes=1, together=0),
        _Request(name="rollout", pool="rollout", roles=("rollout",), num_processes=num_engines, together=rollout.tensor_parallel_size),
    ]


def _sft(config: SFTConfig) -> list[_Request]:
    parallel = config.actor.parallel
    return [
        _Request(name="actor", pool="actor", roles=("actor",), num_processes=parallel.world_size, together=parallel.tensor_parallel_size)
    ]


_STRATEGIES: dict[PlacementStrategy, Callable[[PPOConfig], list[_Request]]] = {
    PlacementStrategy.split_collocate: _split_collocate,
}


def _assign(requests: list[_Request], num_nodes: int, devices_per_node: int) -> tuple[GroupPlan, ...] | None:
    """First fit, in the order of the requests; None: it does not fit.

    The tensor-parallel groups of a request are of one size, so its ranks fill the nodes in order: what was full stays full.
    """
    used = [0] * num_nodes
    node_of_pool: dict[str, int] = {}
    groups = []
    for request in requests:
        processes: list[ProcessPlan] = []
        node = node_of_pool.get(request.pool, 0) if request.together == 0 else 0
        for rank in range(request.num_processes):
            if request.together and rank % request.together == 0:
                node = next((index for index in range(num_nodes) if used[index] + request.together <= devices_per_node), -1)
                if node < 0:
                    return None
                used[node] += request.together
            device = used[node] - request.together + rank % request.together if request.together else None
            processes.append(ProcessPlan(pool=request.pool, group=request.name, rank=rank, roles=request.roles, node=node, device=device))
        node_of_pool.setdefault(request.pool, processes[0].node)
        groups.append(GroupPlan(name=request.name, pool=request.pool, roles=request.roles, processes=tuple(processes)))
    return tuple(groups)
