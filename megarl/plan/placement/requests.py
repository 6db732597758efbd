"""The requests of a placement strategy: pools, and the groups of processes in each.

A strategy is a table from roles to pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.config.roles import ENVIRONMENT, WITHOUT_DEVICES, judge_roles, model_roles, needs_critic
from megarl.config.schema import ParallelConfig, PlacementStrategy, PPOConfig, RunConfig
from megarl.machine.errors import counted, written

# Megatron's options of attention that it writes into the environment, with their defaults.
_ATTENTION = {"attention_backend": "auto", "flash_attention_version": None}


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """Processes to place.

    Attributes:
        roles: The roles that each process holds.
        together: The number of devices (of a tensor-parallel group) that must be on one node; 0 for CPU
            processes.
        devices_per_process: The number of consecutive devices of each process.
        nodes_per_engine: The number of consecutive processes, each on its own node, that are one engine.
        parallel: The layout, which roles fused in one process share. None if it cannot be shared.
    """

    roles: tuple[str, ...]
    num_processes: int
    together: int
    devices_per_process: int = 1
    nodes_per_engine: int = 1
    parallel: ParallelConfig | None = None

    @property
    def name(self) -> str:
        return self.roles[0]

    @property
    def num_devices(self) -> int:
        return self.num_processes * self.devices_per_process if self.together else 0


@dataclass(frozen=True, kw_only=True)
class PoolRequest:
    """Groups that start at the same device.

    Attributes:
        devices_on_nodes: The number of devices per node as configured by the user. None: as many as the
            largest group needs.
    """

    name: str
    groups: tuple[GroupRequest, ...]
    devices_on_nodes: tuple[int, ...] | None = None

    @property
    def num_devices(self) -> int:
        if self.devices_on_nodes is not None:
            return sum(self.devices_on_nodes)
        return max(group.num_devices for group in self.groups)

    @property
    def together(self) -> int:
        """The largest `together` of the groups; 0 for a pool without devices."""
        return max(group.together for group in self.groups)


def pool_requests(config: RunConfig) -> list[PoolRequest]:
    """Return the pools in role order. Roles with one pool and one layout are fused in one group."""
    # Supervised fine-tuning has no strategy: its only role is the actor.
    names = _pool_names(config) if isinstance(config, PPOConfig) else {"actor": "actor"}
    counts = config.placement.pools if config.placement.strategy is PlacementStrategy.custom else {}
    bases = base_roles(config)
    groups: dict[str, tuple[GroupRequest, ...]] = {}

    for need in group_requests(config):
        # A model without its adapters is in the processes that train them.
        pool = names[bases.get(need.name, need.name)]
        groups[pool] = _joined(groups.get(pool, ()), need)

    return [
        PoolRequest(name=name, groups=held, devices_on_nodes=tuple(counts[name]) if name in counts else None)
        for name, held in groups.items()
    ]


def base_roles(config: RunConfig) -> dict[str, str]:
    """Return the roles that are another role's model without its adapters, with that role."""
    return {role.name: role.base_of for role in model_roles(config) if role.base_of is not None}


def _joined(groups: tuple[GroupRequest, ...], new: GroupRequest) -> tuple[GroupRequest, ...]:
    for index, group in enumerate(groups):
        # Equal layouts mean equal ranks, so one process can hold both models.
        if new.parallel is not None and group.parallel == new.parallel:
            return (*groups[:index], replace(group, roles=(*group.roles, *new.roles)), *groups[index + 1 :])
    return (*groups, new)


def group_requests(config: RunConfig) -> list[GroupRequest]:
    """Return one request for each role that takes part in a step.

    These are the roles with a model, the reward functions and an agent's environments on CPUs, the engines
    with one process on each node of a replica, and the servers of judges.
    """
    requests = [
        GroupRequest(
            roles=(role.name,),
            num_processes=role.parallel.world_size,
            together=role.parallel.tensor_parallel_size,
            parallel=role.parallel,
        )
        for role in model_roles(config)
        if not role.before_training
    ]

    if isinstance(config, PPOConfig):
        rollout = config.rollout
        num_nodes = nodes_per_engine(config)
        on_node = rollout.devices_per_engine // num_nodes

        requests.append(GroupRequest(roles=("reward",), num_processes=1, together=0))
        if config.agent.is_used:
            requests.append(
                GroupRequest(roles=(ENVIRONMENT,), num_processes=config.agent.num_workers, together=0)
            )

        requests.append(
            GroupRequest(
                roles=("rollout",),
                num_processes=rollout.num_replicas * num_nodes,
                together=on_node,
                devices_per_process=on_node,
                nodes_per_engine=num_nodes,
            )
        )

        requests += [
            GroupRequest(
                roles=(name,),
                num_processes=judge.settings.num_replicas,
                together=judge.settings.tensor_parallel_size,
                devices_per_process=judge.settings.tensor_parallel_size,
            )
            for name, judge in judge_roles(config).items()
        ]

    return requests


def nodes_per_engine(config: PPOConfig) -> int:
    """Return the number of nodes of an engine: as few as have its devices.

    Without `placement.devices_per_node`, nodes are as large as an engine.
    """
    most = _devices_of_a_node(config)
    return 1 if most is None else -(-config.rollout.devices_per_engine // most)


def engine_problems(config: RunConfig) -> list[str]:
    """Return the problem of engines that have more devices on one node than on another, if any."""
    if not isinstance(config, PPOConfig):
        return []
    rollout = config.rollout
    size = rollout.devices_per_engine
    num_nodes = nodes_per_engine(config)
    most = _devices_of_a_node(config)
    if rollout.pipeline_parallel_size > 1:
        return _stage_problems(config, num_nodes)
    if size % num_nodes == 0:
        return []

    less = (num_nodes - 1) * most if most else size  # whole nodes
    more = -(-size // num_nodes) * num_nodes
    return [
        f"rollout.tensor_parallel_size, placement.devices_per_node: an engine of {size} devices on nodes of "
        f"{most} spans {num_nodes} nodes, and must have equally many devices on each; use "
        f"tensor_parallel_size {less} or {more}"
    ]


def attention_problems(config: RunConfig, pools: Sequence[PoolRequest]) -> list[str]:
    """Return the problems of roles in one process whose attention differs.

    Megatron writes it into the environment of the process, where a second model must find its own.
    """
    roles = {role.name: role for role in model_roles(config)}
    fused = [group.roles for pool in pools for group in pool.groups if len(group.roles) > 1]
    problems = []
    for option, default in _ATTENTION.items():
        for first, *others in fused:
            given = roles[first].megatron.transformer.get(option, default)
            problems += [
                f"{roles[first].megatron_key}.transformer.{option}, {roles[other].megatron_key}.transformer."
                f"{option}: are {written(given)} and {written(own)}, but {first} and {other} share their "
                f"processes, which have one {option}; set the same for both, or give them different layouts"
                for other in others
                if (own := roles[other].megatron.transformer.get(option, default)) != given
            ]

    return problems


def _stage_problems(config: PPOConfig, num_nodes: int) -> list[str]:
    """Return the problem of an engine whose stages SGLang cannot distribute over its nodes, if any.

    Each node has whole stages, or each stage has whole nodes.
    """
    tensor = config.rollout.tensor_parallel_size
    stages = config.rollout.pipeline_parallel_size
    nodes_per_stage, rest = divmod(num_nodes, stages)
    if stages % num_nodes == 0 or (rest == 0 and tensor % nodes_per_stage == 0):
        return []
    return [
        "rollout.tensor_parallel_size, rollout.pipeline_parallel_size, placement.devices_per_node: an "
        f"engine of {stages} stages of {counted(tensor, 'device')} on nodes of {_devices_of_a_node(config)} "
        f"spans {num_nodes} nodes, but each node must have equally many whole stages, or each stage equally "
        "many whole nodes; use a tensor_parallel_size that divides the devices of a node, and a "
        "pipeline_parallel_size that is a multiple of the nodes"
    ]


def _devices_of_a_node(config: PPOConfig) -> int | None:
    """Return the most devices that an engine can have on one node, None if nodes are as large as needed."""
    placement = config.placement
    pool = placement.pools.get(placement.roles.get("rollout", ""))
    if placement.strategy is PlacementStrategy.custom and pool:
        return max(*pool, 1)
    return placement.devices_per_node


def _pool_names(config: PPOConfig) -> dict[str, str]:
    """Return the pool of each role with the run's strategy."""
    placement = config.placement
    roles = [role for request in group_requests(config) for role in request.roles]
    # SGLang takes all memory of a device, and judges always serve, so each has a pool of its own.
    judges = {role: role for role in judge_roles(config)}

    # Reward functions and environments need no device and may be omitted. Their pool is then called `reward`,
    # and is the configured one if there is a pool of this name.
    if placement.strategy is PlacementStrategy.custom:
        return {**dict.fromkeys(WITHOUT_DEVICES, "reward"), **placement.roles}
    if placement.strategy is PlacementStrategy.stand_alone:
        return {role: role for role in roles}
    if placement.strategy is PlacementStrategy.fully_collocate:
        return {**dict.fromkeys(roles, "all"), **judges}

    # Actor and reference, critic and reward, and rollout have three separate pools; with `hybrid`, the
    # rollout is on the actor's devices. A reward model is placed with the critic: in the same processes if
    # their layouts are equal, and otherwise in separate processes on the same devices.
    models = {role.name: role.shares_with or role.name for role in model_roles(config)}
    functions = "critic" if needs_critic(config) else "reward"
    rollout = "actor" if placement.strategy is PlacementStrategy.hybrid else "rollout"
    return {**models, "reward": functions, ENVIRONMENT: functions, "rollout": rollout, **judges}
