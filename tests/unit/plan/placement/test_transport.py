"""The transport of weights in each placement, on each device, and the error if there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.schema import (
    ActorConfig,
    EngineDType,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    ReshardingConfig,
    RolloutConfig,
    RolloutEngineKind,
    SGLangConfig,
    Transport,
)
from megarl.machine.errors import ConfigError
from megarl.plan.placement.plan import plan_placement
from megarl.plan.placement.transport import choose_transport

SPLIT = PlacementStrategy.split_collocate
HYBRID = PlacementStrategy.hybrid
COLLOCATE = PlacementStrategy.fully_collocate
DEVICE = Transport.device
GROUP = Transport.group
FOLDER = Transport.folder
AUTO = Transport.auto


def config(
    strategy: PlacementStrategy, num_nodes: int, transport: Transport = AUTO, num_replicas: int = 2
) -> PPOConfig:
    """Return an actor with two ranks, a critic and two engines. On two nodes, the actor fills the first."""
    return PPOConfig(
        actor=ActorConfig(parallel=ParallelConfig(tensor_parallel_size=2, data_parallel_size=num_nodes)),
        rollout=RolloutConfig(num_replicas=num_replicas),
        placement=PlacementConfig(
            strategy=strategy, num_nodes=num_nodes, devices_per_node=8 if num_nodes == 1 else 3
        ),
        resharding=ReshardingConfig(transport=transport),
    )


@pytest.mark.parametrize(
    ("strategy", "num_nodes", "expected"),
    [(SPLIT, 1, GROUP), (SPLIT, 3, GROUP), (HYBRID, 1, DEVICE), (HYBRID, 3, DEVICE), (COLLOCATE, 1, DEVICE)],
)
def test_auto(strategy: PlacementStrategy, num_nodes: int, expected: Transport) -> None:
    run = config(strategy, num_nodes)
    plan = plan_placement(run)
    assert choose_transport(run, plan) is expected
    assert choose_transport(config(strategy, num_nodes, expected), plan) is expected
    assert choose_transport(config(strategy, num_nodes, FOLDER), plan) is FOLDER


@pytest.mark.parametrize("transport", [FOLDER, AUTO])
def test_a_folder_is_refused_where_engines_have_a_draft_model(transport: Transport) -> None:
    """SGLang loads a folder into all of its models."""
    drafted = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "drafts/eagle"}
    run = config(COLLOCATE, 1, transport, num_replicas=8 if transport is AUTO else 2)
    plan = plan_placement(run)
    assert choose_transport(run, plan) is FOLDER
    for server_args, is_refused in ((drafted, True), ({"speculative_algorithm": "NGRAM"}, False)):
        rollout = replace(
            run.rollout, engine=RolloutEngineKind.sglang, sglang=SGLangConfig(server_args=server_args)
        )
        engines = replace(run, rollout=rollout)
        if not is_refused:
            assert choose_transport(engines, plan) is FOLDER
            continue
        with pytest.raises(ConfigError, match=r"speculative_draft_model_path.* load into the draft model"):
            choose_transport(engines, plan)


@pytest.mark.parametrize(
    ("strategy", "num_nodes", "transport", "said"),
    [
        (
            SPLIT,
            3,
            DEVICE,
            "is device, but in the placement 'split_collocate' engines run on devices that have no actor "
            "rank.*; use group or",
        ),
        (
            SPLIT,
            1,
            DEVICE,
            "that have no actor rank .device 3 of node 0, 4 of node 0.; use group or folder, or auto",
        ),
        (
            HYBRID,
            1,
            GROUP,
            "is group, but actor and rollout share devices .*, and NCCL does not allow .*; use device or folder, "
            "or auto",
        ),
        (HYBRID, 3, GROUP, "; use device or folder, or auto"),
    ],
)
def test_an_impossible_transport_is_refused(
    strategy: PlacementStrategy, num_nodes: int, transport: Transport, said: str
) -> None:
    run = config(strategy, num_nodes, transport)
    with pytest.raises(ConfigError, match=said) as error:
        choose_transport(run, plan_placement(run))
    assert error.value.problems[0].startswith("resharding.transport, placement.strategy: ")


@pytest.mark.parametrize(
    ("strategy", "transport", "said"),
    [
        (HYBRID, Transport.auto, "weights do not leave their device .*, which is chosen in .* 'hybrid'"),
        (HYBRID, DEVICE, "which is configured in the placement 'hybrid'; use resharding.delta=false, or"),
    ],
)
def test_weights_that_do_not_leave_their_device_are_all_sent(
    strategy: PlacementStrategy, transport: Transport, said: str
) -> None:
    run = config(strategy, 1, transport)
    run = replace(run, resharding=replace(run.resharding, delta=True))
    with pytest.raises(ConfigError, match=said) as error:
        choose_transport(run, plan_placement(run))
    (problem,) = error.value.problems
    assert problem.startswith("resharding.delta, resharding.transport, placement.strategy: is true, but ")


@pytest.mark.parametrize(("given", "chosen"), [(Transport.auto, GROUP), (FOLDER, FOLDER)])
def test_a_group_and_a_folder_send_what_changed(given: Transport, chosen: Transport) -> None:
    run = config(SPLIT, 1, given)
    run = replace(run, resharding=replace(run.resharding, delta=True))
    assert choose_transport(run, plan_placement(run)) is chosen


def test_fp8_is_not_sent_through_a_folder() -> None:
    # Of the three engines, two share the actor's devices and one has its own: only a folder reaches all.
    run = PPOConfig(
        actor=ActorConfig(parallel=ParallelConfig(tensor_parallel_size=2)),
        rollout=RolloutConfig(num_replicas=3),
        placement=PlacementConfig(strategy=HYBRID, devices_per_node=4),
    )
    plan = plan_placement(run)
    assert choose_transport(run, plan) is FOLDER

    in_fp8 = replace(run, rollout=replace(run.rollout, dtype=EngineDType.fp8))
    with pytest.raises(ConfigError) as error:
        choose_transport(in_fp8, plan)
    (problem,) = error.value.problems
    assert problem.startswith(
        "resharding.transport, rollout.dtype, placement.strategy: is auto, and only a folder"
    )
    assert problem.endswith("use another placement, or rollout.dtype=model")
