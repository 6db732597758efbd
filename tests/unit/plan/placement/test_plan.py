"""Placement plans against ones worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.schema import (
    ActorConfig,
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    CriticConfig,
    JudgeConfig,
    KLConfig,
    KLWhere,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    SFTConfig,
)
from megarl.machine.errors import ConfigError
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.placement.plan import plan_placement


def ppo(
    *,
    actor: ParallelConfig,
    critic: ParallelConfig,
    rollout: RolloutConfig,
    placement: PlacementConfig,
    **sections: object,
) -> PPOConfig:
    return PPOConfig(
        actor=ActorConfig(parallel=actor),
        critic=CriticConfig(parallel=critic),
        rollout=rollout,
        placement=placement,
        **sections,
    )  # type: ignore[arg-type]


def places(plan: PlacementPlan, group: str) -> list[tuple[int, ...]]:
    """Return the node and the devices of each process."""
    return [(process.node, *process.devices) for process in plan.group(group).processes]


QUICKSTART = {
    "actor": ParallelConfig(tensor_parallel_size=2),
    "critic": ParallelConfig(),
    "rollout": RolloutConfig(num_replicas=1),
    "placement": PlacementConfig(),
}


def listed(plan: PlacementPlan) -> list[str]:
    """Return a line for each process: its pool, group, rank and roles, and where it runs."""
    return [
        f"{process.pool}/{process.group}[{process.rank}] {'+'.join(process.roles)} on node {process.node}, "
        + (f"device {', '.join(map(str, process.devices))}" if process.devices else "cpu")
        for process in plan.processes
    ]


def test_split_collocate_on_one_node() -> None:
    plan = plan_placement(ppo(**QUICKSTART))  # type: ignore[arg-type]
    assert listed(plan) == [
        "actor/actor[0] actor+reference on node 0, device 0",
        "actor/actor[1] actor+reference on node 0, device 1",
        "critic/critic[0] critic on node 0, device 2",
        "critic/reward[0] reward on node 0, cpu",
        "rollout/rollout[0] rollout on node 0, device 3",
    ]
    assert plan.pools == {"actor": 2, "critic": 1, "rollout": 1}
    assert (plan.devices_per_node, plan.num_devices, len(plan.processes)) == (4, 4, 5)
    assert plan.process_on_nodes == {"actor": [2], "critic": [1], "reward": [1], "rollout": [1]}
    assert plan.moving_order == ("actor", "critic", "rollout", "reward")
    assert plan.role_pools == {
        "actor": "actor",
        "reference": "actor",
        "critic": "critic",
        "reward": "reward",
        "rollout": "rollout",
    }
    assert [plan.group(name).uses_devices for name in ("actor", "critic", "reward", "rollout")] == [
        True,
        True,
        False,
        True,
    ]
    assert plan == plan_placement(ppo(**QUICKSTART))  # type: ignore[arg-type]


def test_without_critic_and_reference() -> None:
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=KLConfig(where=KLWhere.none)
    )
    plan = plan_placement(ppo(**QUICKSTART, algorithm=algorithm))  # type: ignore[arg-type]
    assert plan.pools == {"actor": 2, "reward": 0, "rollout": 1}
    assert plan.role_pools == {"actor": "actor", "reward": "reward", "rollout": "rollout"}


def test_two_nodes_keep_a_tensor_parallel_group_together() -> None:
    # Actor: 6 ranks in pairs on node 0. The critic's group of 4 does not fit on the 2 remaining devices; the
    # rollout does.
    config = ppo(
        actor=ParallelConfig(tensor_parallel_size=2, data_parallel_size=3),
        critic=ParallelConfig(tensor_parallel_size=4),
        rollout=RolloutConfig(num_replicas=3),
        placement=PlacementConfig(num_nodes=2, devices_per_node=8),
    )
    plan = plan_placement(config)
    assert places(plan, "actor") == [(0, device) for device in range(6)]
    assert places(plan, "critic") == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert places(plan, "reward") == [(1,)]
    assert places(plan, "rollout") == [(0, 6), (0, 7), (1, 4)]
    assert plan.process_on_nodes == {"actor": [6], "critic": [4], "reward": [1], "rollout": [2, 1]}


def test_a_replica_is_one_process_with_a_device_for_each_tensor_parallel_rank() -> None:
    # Node 0 has one device left after the actor's three, too few for a replica of two.
    config = ppo(
        actor=ParallelConfig(data_parallel_size=3),
        critic=ParallelConfig(),
        rollout=RolloutConfig(num_replicas=3, tensor_parallel_size=2),
        placement=PlacementConfig(num_nodes=3, devices_per_node=4),
    )
    plan = plan_placement(config)
    assert places(plan, "rollout") == [(1, 0, 1), (1, 2, 3), (2, 0, 1)]
    assert "rollout/rollout[1] rollout on node 1, device 2, 3" in listed(plan)
    assert plan.process_on_nodes["rollout"] == [2, 1]
    assert plan.devices_per_process == {"actor": 1, "critic": 1, "reward": 0, "rollout": 2}
    assert (plan.pools["rollout"], plan.num_devices, len(plan.processes)) == (6, 10, 8)


def test_no_device_is_given_twice() -> None:
    config = ppo(
        actor=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2),
        critic=ParallelConfig(data_parallel_size=3),
        rollout=RolloutConfig(num_replicas=5),
        placement=PlacementConfig(num_nodes=4, devices_per_node=4),
    )
    plan = plan_placement(config)
    devices = [(process.node, device) for process in plan.processes for device in process.devices]
    assert len(devices) == len(set(devices)) == 16


def large_cluster() -> PPOConfig:
    """64 nodes x 8 devices: 256 for the actor, 128 for the critic, 128 for engines of four devices."""
    return ppo(
        actor=ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=4, data_parallel_size=8),
        critic=ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=2, data_parallel_size=8),
        rollout=RolloutConfig(num_replicas=32, tensor_parallel_size=4),
        placement=PlacementConfig(num_nodes=64, devices_per_node=8),
    )


def test_sixty_four_nodes() -> None:
    """How long the plan takes: benchmarks/placement.py."""
    plan = plan_placement(large_cluster())
    assert places(plan, "actor") == [(rank // 8, rank % 8) for rank in range(256)]
    assert places(plan, "critic") == [(32 + rank // 8, rank % 8) for rank in range(128)]
    assert places(plan, "rollout") == [
        (48 + replica // 2, *range(replica % 2 * 4, replica % 2 * 4 + 4)) for replica in range(32)
    ]
    assert plan.num_devices == 512


def test_nodes_are_as_large_as_needed_when_nothing_is_said() -> None:
    # 4 + 3 + 1 = 8 devices over 2 nodes: 4 each are enough, and fit.
    config = ppo(
        actor=ParallelConfig(tensor_parallel_size=4),
        critic=ParallelConfig(data_parallel_size=3),
        rollout=RolloutConfig(),
        placement=PlacementConfig(num_nodes=2),
    )
    assert plan_placement(config).devices_per_node == 4

    # 3 + 3 = 6 devices over 2 nodes: 3 each are not enough, because two groups of 2 and one more need 4 on
    # one node.
    config = ppo(
        actor=ParallelConfig(tensor_parallel_size=2),
        critic=ParallelConfig(tensor_parallel_size=2),
        rollout=RolloutConfig(num_replicas=1, tensor_parallel_size=2),
        placement=PlacementConfig(num_nodes=2),
    )
    assert plan_placement(config).devices_per_node == 4


def test_too_few_devices_is_an_error_with_the_count_that_works() -> None:
    config = ppo(**{**QUICKSTART, "placement": PlacementConfig(devices_per_node=3)})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        plan_placement(config)
    assert error.value.problems == (
        "placement.num_nodes, placement.devices_per_node: 1 x 3 = 3 devices, but the roles need 4 "
        "(actor+reference 2, critic 1, rollout 1); use devices_per_node 4 or more, more nodes, or smaller "
        "parallel sizes",
    )


def test_a_group_that_fits_on_no_node_is_an_error() -> None:
    config = ppo(**{**QUICKSTART, "placement": PlacementConfig(num_nodes=4, devices_per_node=1)})  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="a tensor-parallel group must fit on one node; use devices_per_node 2 or more"
    ):
        plan_placement(config)


def test_sft_is_the_actor_alone() -> None:
    config = SFTConfig(actor=ActorConfig(parallel=ParallelConfig(pipeline_parallel_size=2)))
    plan = plan_placement(config)
    assert plan.process_on_nodes == {"actor": [2]}
    assert plan.role_pools == {"actor": "actor"}


def hybrid(actor: ParallelConfig, rollout: RolloutConfig, **placement: object) -> PPOConfig:
    config = PlacementConfig(strategy=PlacementStrategy.hybrid, **placement)  # type: ignore[arg-type]
    return ppo(actor=actor, critic=ParallelConfig(), rollout=rollout, placement=config)


def test_hybrid_engines_have_the_devices_of_the_actor() -> None:
    plan = plan_placement(
        hybrid(ParallelConfig(tensor_parallel_size=2, data_parallel_size=2), RolloutConfig(num_replicas=4))
    )
    assert listed(plan) == [
        *(f"actor/actor[{rank}] actor+reference on node 0, device {rank}" for rank in range(4)),
        *(f"actor/rollout[{rank}] rollout on node 0, device {rank}" for rank in range(4)),
        "critic/critic[0] critic on node 0, device 4",
        "critic/reward[0] reward on node 0, cpu",
    ]
    assert (plan.pools, plan.num_devices, len(plan.processes)) == ({"actor": 4, "critic": 1}, 5, 10)
    assert plan.role_pools["rollout"] == "actor"
    assert plan.process_on_nodes == {"actor": [4], "critic": [1], "reward": [1]}
    assert plan.colocate_counts == {"actor": 2, "critic": 1, "reward": 1}
    assert plan.num_cpus == 4 * 2 + 2
    assert plan.bundles("rollout") == plan.bundles("actor") == ((0,), (1,), (2,), (3,))


def test_hybrid_replicas_of_several_devices_stay_on_a_node() -> None:
    # Nodes with 4 and 2 actor devices: with 3 each, one device per node would be unused.
    actor = ParallelConfig(tensor_parallel_size=2, data_parallel_size=3)
    rollout = RolloutConfig(num_replicas=2, tensor_parallel_size=2)
    plan = plan_placement(hybrid(actor, rollout, num_nodes=2, devices_per_node=4))
    assert places(plan, "actor") == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert places(plan, "rollout") == [(0, 0, 1), (0, 2, 3)]
    assert plan.bundles("rollout") == ((0, 1), (2, 3))
    assert places(plan, "critic") == [(1, 2)]


def test_a_hybrid_replica_spans_the_nodes_of_the_actor() -> None:
    config = hybrid(
        ParallelConfig(pipeline_parallel_size=2),
        RolloutConfig(tensor_parallel_size=2),
        num_nodes=3,
        devices_per_node=1,
    )
    plan = plan_placement(config)
    assert places(plan, "rollout") == [(0, 0), (1, 0)]
    assert len(plan.group("rollout").engines) == 1


def test_a_reservation_is_a_bundle_for_each_process() -> None:
    plan = plan_placement(
        ppo(**{**QUICKSTART, "rollout": RolloutConfig(num_replicas=2, tensor_parallel_size=2)})
    )  # type: ignore[arg-type]
    assert plan.bundles("rollout") == ((0,), (1,))
    assert plan.bundles("reward") == ((0,),)
    assert plan.num_cpus == len(plan.processes) == 6


def with_reward_model(
    parallel: ParallelConfig, strategy: PlacementStrategy, **sections: object
) -> PlacementPlan:
    reward = RewardConfig(model=RewardModelConfig(path="judge", parallel=parallel))
    critic = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    placed = {**QUICKSTART, "critic": critic, "placement": PlacementConfig(strategy=strategy)}
    return plan_placement(ppo(**placed, reward=reward, **sections))  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", [PlacementStrategy.split_collocate, PlacementStrategy.hybrid])
def test_a_reward_model_is_with_the_critic(strategy: PlacementStrategy) -> None:
    fused = with_reward_model(ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2), strategy)
    assert fused.group("critic").roles == ("critic", "reward_model")
    assert fused.colocate_counts["critic"] == 1
    beside = with_reward_model(ParallelConfig(pipeline_parallel_size=2), strategy)
    assert beside.group("critic").roles == ("critic",)
    assert places(beside, "reward_model") == places(beside, "critic")[:2] == [(0, 2), (0, 3)]
    assert beside.role_pools["reward_model"] == "critic"
    assert beside.bundles("reward_model") == ((0,), (1,))
    assert beside.colocate_counts["critic"] == 2
    assert fused.num_devices == beside.num_devices
    larger = with_reward_model(ParallelConfig(tensor_parallel_size=2, data_parallel_size=3), strategy)
    assert (places(larger, "critic"), larger.pools["critic"]) == (places(larger, "reward_model")[:4], 6)
    assert larger.bundles("critic") == ((0,), (1,), (2,), (3,))


def test_a_reward_model_without_a_critic_has_a_pool_of_its_own() -> None:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo))
    plan = with_reward_model(
        ParallelConfig(tensor_parallel_size=2), PlacementStrategy.split_collocate, algorithm=algorithm
    )
    assert places(plan, "reward_model") == [(0, 2), (0, 3)]
    assert plan.pools == {"actor": 2, "reward": 2, "rollout": 1}
    assert [process.devices for process in plan.group("reward").processes] == [()]


def test_fully_collocated_roles_begin_at_the_same_device() -> None:
    config = ppo(
        actor=ParallelConfig(tensor_parallel_size=2, data_parallel_size=2),
        critic=ParallelConfig(data_parallel_size=3),
        rollout=RolloutConfig(num_replicas=2),
        placement=PlacementConfig(strategy=PlacementStrategy.fully_collocate),
    )
    plan = plan_placement(config)
    assert listed(plan) == [
        *(f"all/actor[{rank}] actor+reference on node 0, device {rank}" for rank in range(4)),
        *(f"all/critic[{rank}] critic on node 0, device {rank}" for rank in range(3)),
        "all/reward[0] reward on node 0, cpu",
        *(f"all/rollout[{rank}] rollout on node 0, device {rank}" for rank in range(2)),
    ]
    assert plan.pools == {"all": 4}
    assert (plan.process_on_nodes, plan.colocate_counts) == (
        {"actor": [4], "reward": [1]},
        {"actor": 3, "reward": 1},
    )
    assert plan.on_same_devices("critic") == ("actor", "reference", "rollout")
    assert plan.bundles("critic") == ((0,), (1,), (2,))


def test_roles_of_one_layout_and_pool_are_fused_in_one_process() -> None:
    config = ppo(
        **{
            **QUICKSTART,
            "critic": QUICKSTART["actor"],
            "placement": PlacementConfig(strategy=PlacementStrategy.fully_collocate),
        }
    )  # type: ignore[arg-type]
    plan = plan_placement(config)
    assert [(group.name, group.roles) for group in plan.groups] == [
        ("actor", ("actor", "reference", "critic")),
        ("reward", ("reward",)),
        ("rollout", ("rollout",)),
    ]


def test_stand_alone_roles_share_nothing() -> None:
    plan = plan_placement(
        ppo(**{**QUICKSTART, "placement": PlacementConfig(strategy=PlacementStrategy.stand_alone)})
    )  # type: ignore[arg-type]
    assert plan.pools == {"actor": 2, "reference": 2, "critic": 1, "reward": 0, "rollout": 1}
    assert plan.num_devices == 6
    assert not any(plan.on_same_devices(role) for role in plan.roles)


def custom(roles: dict[str, str], pools: dict[str, list[int]], **placement: object) -> PPOConfig:
    config = PlacementConfig(strategy=PlacementStrategy.custom, roles=roles, pools=pools, **placement)  # type: ignore[arg-type]
    return ppo(**{**QUICKSTART, "placement": config})  # type: ignore[arg-type]


SPREAD = {"actor": "one", "reference": "two", "critic": "one", "rollout": "two"}


def test_custom_pools_are_where_they_are_said_to_be() -> None:
    plan = plan_placement(custom(SPREAD, {"one": [0, 4], "two": [2, 2]}, num_nodes=2))
    assert places(plan, "actor") == [(1, 0), (1, 1)]
    assert places(plan, "critic") == [(1, 0)]
    assert places(plan, "reference") == places(plan, "rollout") + [(0, 1)] == [(0, 0), (0, 1)]
    assert plan.nodes == {"actor": (1,), "reference": (0,), "reward": (0,)}
    assert plan.devices_per_node == 6
    assert plan.role_pools["rollout"] == "reference"


def test_a_pool_called_reward_has_its_devices_without_the_role_of_this_name() -> None:
    roles = {**SPREAD, "rollout": "reward"}
    plan = plan_placement(custom(roles, {"one": [0, 4], "two": [2, 0], "reward": [0, 2]}, num_nodes=2))
    assert places(plan, "rollout") == [(1, 4)]
    assert plan.devices_per_node == 6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"roles": {"actor": "one", "reference": "one", "critic": "one"}},
            "placement.roles: the role 'rollout' has no pool",
        ),
        ({"roles": {**SPREAD, "critik": "one"}}, "this run has no role 'critik'; .*did you mean critic?"),
        (
            {"roles": {**SPREAD, "critic": "ones"}},
            "placement.roles.critic, placement.pools: there is no pool 'ones'; .*did you mean one?",
        ),
        ({"pools": {"one": [2], "two": [2], "three": [1]}}, "placement.pools.three: no role runs in it"),
        (
            {"pools": {"one": [0], "two": [2]}},
            "placement.pools.one: is \\[0\\], but must list the devices",
        ),
        (
            {"pools": {"one": [2], "two": [1, 1]}},
            "placement.pools.two, placement.num_nodes: names 2 nodes, but num_nodes is 1; use 2 nodes",
        ),
        (
            {"devices_per_node": 3},
            "on node 0 the pools have 4 devices \\(one 2, two 2\\), but devices_per_node is 3; use smaller "
            "pools",
        ),
        (
            {"pools": {"one": [1], "two": [2]}},
            "placement.pools.one, actor.parallel: has 1 device, but actor needs 2; use 2 or more",
        ),
        (
            {"pools": {"one": [1, 1], "two": [2]}, "num_nodes": 2},
            "actor needs 2 devices in groups of 2, each on one node; use a multiple of 2",
        ),
    ],
)
def test_custom_pools_that_cannot_be(change: dict[str, object], said: str) -> None:
    settings: dict[str, object] = {"roles": SPREAD, "pools": {"one": [2], "two": [2]}, **change}
    with pytest.raises(ConfigError, match=said):
        plan_placement(custom(**settings))  # type: ignore[arg-type]


def with_judges(config: PPOConfig) -> PPOConfig:
    """Return the run with a judge of two servers on two devices each, and one on a server elsewhere."""
    judges = [
        JudgeConfig(name="own", path="folder", num_replicas=2, tensor_parallel_size=2),
        JudgeConfig(name="other", url="http://host/v1", model="m"),
    ]
    return replace(config, reward=replace(config.reward, judges=judges))


@pytest.mark.parametrize("strategy", [each for each in PlacementStrategy if each.value != "custom"])
def test_a_judge_that_the_run_serves_has_devices_of_its_own(strategy: PlacementStrategy) -> None:
    plain = ppo(**{**QUICKSTART, "placement": PlacementConfig(strategy=strategy)})  # type: ignore[arg-type]
    plan = plan_placement(with_judges(plain))
    judge = plan.group("judge_own")
    assert [len(process.devices) for process in judge.processes] == [2, 2]
    assert plan.on_same_devices("judge_own") == ()
    assert plan.pools == plan_placement(plain).pools | {"judge_own": 4}
    assert plan.moving_order[-2:] == ("judge_own", "reward")


def test_the_pool_of_a_judge_is_not_shared() -> None:
    def problems(roles: dict[str, str]) -> list[str]:
        pools = {"one": [2], "two": [4], "three": [4]}
        with pytest.raises(ConfigError) as raised:
            plan_placement(with_judges(custom({**SPREAD, **roles}, pools)))
        return raised.value.problems

    assert "placement.roles: the role 'judge_own' has no pool" in problems({})[0]
    assert problems({"judge_own": "two"})[0] == (
        "placement.roles.judge_own: the pool 'two' is also that of reference, rollout, but a judge that the run "
        "serves always uses its devices; give it a pool of its own"
    )
    alone = custom({**SPREAD, "judge_own": "three"}, {"one": [2], "two": [2], "three": [4]})
    assert plan_placement(with_judges(alone)).pools["three"] == 4
    small = custom({**SPREAD, "judge_own": "three"}, {"one": [2], "two": [2], "three": [3]})
    with pytest.raises(
        ConfigError, match="tensor_parallel_size of the judge in reward.judges: has 3 devices"
    ):
        plan_placement(with_judges(small))


def engine_over(size: int, stages: int = 1, **placement: object) -> PPOConfig:
    return ppo(
        actor=ParallelConfig(),
        critic=ParallelConfig(),
        rollout=RolloutConfig(num_replicas=2, tensor_parallel_size=size, pipeline_parallel_size=stages),
        placement=PlacementConfig(**placement),  # type: ignore[arg-type]
    )


def test_an_engine_that_is_larger_than_a_node_has_a_process_on_each_of_its_nodes() -> None:
    plan = plan_placement(engine_over(4, num_nodes=5, devices_per_node=2))
    assert places(plan, "rollout") == [(1, 0, 1), (2, 0, 1), (3, 0, 1), (4, 0, 1)]
    assert [[process.node for process in engine] for engine in plan.group("rollout").engines] == [
        [1, 2],
        [3, 4],
    ]
    assert plan.devices_per_process["rollout"] == 2


def test_an_engine_leaves_the_rest_of_its_nodes_to_others() -> None:
    """Six devices on nodes of four: three on each of two."""
    plan = plan_placement(engine_over(6, num_nodes=5, devices_per_node=4))
    assert places(plan, "rollout") == [(node, 0, 1, 2) for node in (1, 2, 3, 4)]


def test_an_engine_spans_the_nodes_of_a_custom_pool() -> None:
    roles = {"actor": "trainer", "critic": "trainer", "reference": "trainer", "rollout": "engines"}
    pools = {"trainer": [1], "engines": [0, 1, 1, 1, 1]}
    custom = PlacementStrategy.custom
    plan = plan_placement(engine_over(2, num_nodes=5, strategy=custom, roles=roles, pools=pools))
    assert places(plan, "rollout") == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert len(plan.group("rollout").engines) == 2


def test_without_a_size_nodes_are_as_large_as_an_engine() -> None:
    plan = plan_placement(engine_over(4, num_nodes=3))
    assert plan.group("rollout").nodes_per_engine == 1


def test_an_engine_with_more_devices_on_one_node_than_on_another_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="an engine of 5 devices on nodes of 4 spans 2 nodes.*use tensor_parallel_size 4 or 6",
    ):
        plan_placement(engine_over(5, num_nodes=8, devices_per_node=4))


@pytest.mark.parametrize(("tensor", "stages", "num_nodes"), [(4, 2, 2), (2, 4, 2), (8, 2, 4), (2, 2, 1)])
def test_stages_of_an_engine_are_on_consecutive_nodes(tensor: int, stages: int, num_nodes: int) -> None:
    """Nodes have four devices: each has whole stages, or each stage whole nodes."""
    plan = plan_placement(engine_over(tensor, stages, num_nodes=9, devices_per_node=4))
    of_engine = plan.group("rollout").engines[0]
    assert len(of_engine) == num_nodes
    assert [len(process.devices) for process in of_engine] == [tensor * stages // num_nodes] * num_nodes


def test_stages_that_would_be_split_between_nodes_are_refused() -> None:
    """Three stages of two devices on two nodes of four."""
    with pytest.raises(
        ConfigError,
        match="an engine of 3 stages of 2 devices on nodes of 4 spans 2 nodes, but each node must have",
    ):
        plan_placement(engine_over(2, 3, num_nodes=8, devices_per_node=4))
