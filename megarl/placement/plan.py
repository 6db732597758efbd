"""Which role runs in which process on which device: a pure plan, made from the configuration and printed before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megarl.config.errors import ConfigError
from megarl.config.roles import REWARD_MODEL, needs_critic, needs_reference, needs_reward_model
from megarl.config.schema import PlacementStrategy, PPOConfig, SFTConfig

_Place = tuple[int, tuple[int, ...]]  # node, its devices


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """One process. `devices`: their numbers on the node, none for a process that only needs a CPU, several for an engine that cuts
    its model over them."""

    pool: str
    group: str
    rank: int
    roles: tuple[str, ...]
    node: int
    devices: tuple[int, ...]

    @property
    def place(self) -> str:
        if not self.devices:
            return "cpu"
        return f"device{'s' if len(self.devices) > 1 else ''} {', '.join(map(str, self.devices))}"

    def __str__(self) -> str:
        return f"{self.pool}/{self.group}[{self.rank}] {'+'.join(self.roles)} on node {self.node}, {self.place}"


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """Processes that hold the same roles with one layout. `shares`: the group whose devices they use, None: devices of their own."""

    name: str
    pool: str
    roles: tuple[str, ...]
    processes: tuple[ProcessPlan, ...]
    shares: str | None = None

    @property
    def uses_devices(self) -> bool:
        return bool(self.processes[0].devices)

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset(process.node for process in self.processes)

    @property
    def processes_on_nodes(self) -> list[int]:
        """How many processes each node has, in the order of ranks; nodes without one are left out."""
        nodes = [process.node for process in self.processes]
        return [nodes.count(node) for node in dict.fromkeys(nodes)]


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """Pools share no device, so they work at the same time; the groups of a pool stand side by side in it, and one that shares
    another's devices takes turns with it."""

    strategy: PlacementStrategy
    num_nodes: int
    devices_per_node: int
    groups: tuple[GroupPlan, ...]

    @property
    def processes(self) -> tuple[ProcessPlan, ...]:
        return tuple(process for group in self.groups for process in group.processes)

    @property
    def num_devices(self) -> int:
        return sum(self.pools.values())

    @property
    def pools(self) -> dict[str, int]:
        """Pool name -> devices."""
        devices: dict[str, set[tuple[int, int]]] = {group.pool: set() for group in self.groups}
        for process in self.processes:
            devices[process.pool] |= {(process.node, device) for device in process.devices}
        return {pool: len(places) for pool, places in devices.items()}

    @property
    def num_processes(self) -> int:
        return len(self.processes)

    @property
    def reservations(self) -> tuple[GroupPlan, ...]:
        """The groups that have devices, or CPUs, of their own: each is one reservation, with a bundle per process."""
        return tuple(group for group in self.groups if group.shares is None)

    @property
    def process_on_nodes(self) -> dict[str, list[int]]:
        """Reservation -> bundles on each of its nodes."""
        return {group.name: group.processes_on_nodes for group in self.reservations}

    @property
    def devices_per_process(self) -> dict[str, int]:
        """Reservation -> devices of a bundle; 0 where it is a CPU."""
        return {group.name: len(group.processes[0].devices) for group in self.reservations}

    @property
    def colocate_counts(self) -> dict[str, int]:
        """Reservation -> groups whose processes share its bundles."""
        sharing = [group.shares for group in self.groups]
        return {group.name: 1 + sharing.count(group.name) for group in self.reservations}

    @property
    def num_cpus(self) -> int:
        """Ray's logical CPUs that the reservations count: one for each process that a bundle may hold."""
        return sum(len(group.processes) * self.colocate_counts[group.name] for group in self.reservations)

    @property
    def role_pools(self) -> dict[str, str]:
        """Role -> the reservation that it runs in, a key of `process_on_nodes`."""
        return {role: group.shares or group.name for group in self.groups for role in group.roles}

    def bundles(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Of each process of a group, the bundles in its reservation whose devices it has; its own is the first."""
        group = self.group(name)
        owners = self.group(group.shares or name).processes
        if not group.uses_devices:
            return tuple((rank,) for rank in range(len(owners)))
        return tuple(
            tuple(owner.rank for owner in owners if owner.node == process.node and set(owner.devices) & set(process.devices))
            for process in group.processes
        )

    def group(self, name: str) -> GroupPlan:
        return next(group for group in self.groups if group.name == name)

    def __str__(self) -> str:
        return "\n".join(str(process) for process in self.processes)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A group to place. `together`: devices (of a tensor-parallel group) that must be on one node; 0: CPU processes.

    `devices_per_process`: consecutive ones that a process has. `shares`: another request, whose devices are used.
    """

    name: str
    pool: str
    roles: tuple[str, ...]
    num_processes: int
    together: int
    devices_per_process: int = 1
    shares: str | None = None

    @property
    def num_devices(self) -> int:
        """That it has for itself."""
        return self.num_processes * self.devices_per_process if self.together and self.shares is None else 0


def plan_placement(config: PPOConfig | SFTConfig) -> PlacementPlan:
    """The plan of a valid configuration; the same configuration gives the same plan.

    Without `placement.devices_per_node`, nodes are as large as the roles need.
    Raises ConfigError when the devices that the configuration states are too few, or a tensor-parallel group has no node to fit.
    """
    placement = config.placement
    requests = _sft(config) if isinstance(config, SFTConfig) else _STRATEGIES[placement.strategy](config)
    needed = sum(request.num_devices for request in requests)
    smallest = -(-needed // placement.num_nodes)
    sizes = [placement.devices_per_node] if placement.devices_per_node is not None else range(smallest, needed + 1)
    for devices_per_node in sizes:
        groups = _assign(requests, placement.num_nodes, devices_per_node)
        if groups is not None:
            return PlacementPlan(
                strategy=placement.strategy, num_nodes=placement.num_nodes, devices_per_node=devices_per_node, groups=groups
            )
    roles = ", ".join(f"{'+'.join(request.roles)} {request.num_devices}" for request in requests if request.num_devices)
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
    """Actor and reference in one set of processes, the critic in another, rollout in a third, a process per replica. The reward is a
    CPU process beside the critic, or in a pool of its own where there is none. So is a reward model: in the critic's processes where
    their layouts are the same, else in processes of its own on the critic's devices."""
    rollout = config.rollout
    engines = _Request(
        name="rollout",
        pool="rollout",
        roles=("rollout",),
        num_processes=rollout.num_replicas,
        together=rollout.tensor_parallel_size,
        devices_per_process=rollout.tensor_parallel_size,
    )
    return [*_trainers(config), engines]


def _hybrid(config: PPOConfig) -> list[_Request]:
    """As split_collocate, but the rollout has the actor's devices."""
    *trainers, engines = _split_collocate(config)
    assert engines.num_processes * engines.together <= config.actor.parallel.world_size, "validate() refuses it"
    return [*trainers, replace(engines, pool="actor", shares="actor")]


def _trainers(config: PPOConfig) -> list[_Request]:
    actor, critic = config.actor.parallel, config.critic.parallel
    requests = [
        _Request(
            name="actor", pool="actor", roles=_policy_roles(config), num_processes=actor.world_size, together=actor.tensor_parallel_size
        )
    ]
    fused = needs_reward_model(config) and needs_critic(config) and config.reward.model.parallel == critic
    if needs_critic(config):
        roles = ("critic", REWARD_MODEL) if fused else ("critic",)
        requests.append(
            _Request(name="critic", pool="critic", roles=roles, num_processes=critic.world_size, together=critic.tensor_parallel_size)
        )
    beside = "critic" if needs_critic(config) else "reward"
    if needs_reward_model(config) and not fused:
        requests.append(_reward_model(config, pool=beside, shares="critic" if needs_critic(config) else None))
    return [*requests, _Request(name="reward", pool=beside, roles=("reward",), num_processes=1, together=0)]


def _reward_model(config: PPOConfig, pool: str, shares: str | None) -> _Request:
    """In processes of its own: frozen, it can stay in memory beside whoever has the same devices."""
    parallel = config.reward.model.parallel
    assert shares is None or parallel.world_size <= config.critic.parallel.world_size, "validate() refuses it"
    return _Request(
        name=REWARD_MODEL,
        pool=pool,
        roles=(REWARD_MODEL,),
        num_processes=parallel.world_size,
        together=parallel.tensor_parallel_size,
        shares=shares,
    )


def _sft(config: SFTConfig) -> list[_Request]:
    parallel = config.actor.parallel
    return [
        _Request(name="actor", pool="actor", roles=("actor",), num_processes=parallel.world_size, together=parallel.tensor_parallel_size)
    ]


_STRATEGIES: dict[PlacementStrategy, Callable[[PPOConfig], list[_Request]]] = {
    PlacementStrategy.split_collocate: _split_collocate,
    PlacementStrategy.hybrid: _hybrid,
}


def _assign(requests: list[_Request], num_nodes: int, devices_per_node: int) -> tuple[GroupPlan, ...] | None:
    """First fit, in the order of the requests; None: it does not fit.

    The tensor-parallel groups of a request are of one size, so its ranks fill the nodes in order: what was full stays full.
    """
    used = [0] * num_nodes
    groups: dict[str, GroupPlan] = {}
    for request in requests:
        if request.shares is not None:
            places = _shared(request, groups[request.shares])
        elif request.together:
            places = _own(request, used, devices_per_node)
        else:
            beside = next((group for group in groups.values() if group.pool == request.pool), None)
            places = [(beside.processes[0].node if beside else 0, ())] * request.num_processes
        if places is None:
            return None
        processes = tuple(
            ProcessPlan(pool=request.pool, group=request.name, rank=rank, roles=request.roles, node=node, devices=devices)
            for rank, (node, devices) in enumerate(places)
        )
        groups[request.name] = GroupPlan(
            name=request.name, pool=request.pool, roles=request.roles, processes=processes, shares=request.shares
        )
    return tuple(groups.values())


def _own(request: _Request, used: list[int], devices_per_node: int) -> list[_Place] | None:
    """Takes the next free devices; `used` counts those of each node."""
    places: list[_Place] = []
    while len(places) < request.num_processes:
        node = next((index for index, count in enumerate(used) if count + request.together <= devices_per_node), None)
        if node is None:
            return None
        places += _cut(node, range(used[node], used[node] + request.together), request.devices_per_process)
        used[node] += request.together
    return places


def _shared(request: _Request, owner: GroupPlan) -> list[_Place] | None:
    """Takes the devices of the owner, node by node, in the order of its ranks."""
    places: list[_Place] = []
    for node in sorted(owner.nodes):
        devices = [device for process in owner.processes if process.node == node for device in process.devices]
        whole = len(devices) // request.together * request.together  # no group over two nodes
        places += _cut(node, devices[:whole], request.devices_per_process)
    return places[: request.num_processes] if len(places) >= request.num_processes else None


def _cut(node: int, devices: Sequence[int], size: int) -> list[_Place]:
    """Whole processes only: the rest of the devices stays without one."""
    return [(node, tuple(devices[first : first + size])) for first in range(0, len(devices) - size + 1, size)]
