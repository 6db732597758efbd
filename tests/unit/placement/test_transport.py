"""The way of the weights in each placement, on each device, and what is said where a way does not exist."""

from __future__ import annotations

import pytest

from megarl.config.errors import ConfigError
from megarl.config.schema import (
    ActorConfig,
    Device,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    ReshardingConfig,
    RolloutConfig,
    Transport,
)
from megarl.placement.plan import plan_placement
from megarl.placement.transport import choose_transport, transports

SPLIT, HYBRID = PlacementStrategy.split_collocate, PlacementStrategy.hybrid
COLOCATED, BROADCAST, DISK, AUTO = Transport.colocated, Transport.broadcast, Transport.disk, Transport.auto


def config(strategy: PlacementStrategy, num_nodes: int, transport: Transport = AUTO, device: Device = Device.auto) -> PPOConfig:
    """An actor of two ranks, a critic, two engines: on two nodes the actor fills the first."""
    return PPOConfig(
        actor=ActorConfig(parallel=ParallelConfig(tensor_parallel_size=2, data_parallel_size=num_nodes)),
        rollout=RolloutConfig(num_replicas=2),
        placement=PlacementConfig(strategy=strategy, num_nodes=num_nodes, devices_per_node=8 if num_nodes == 1 else 3),
        resharding=ReshardingConfig(transport=transport),
        device=device,
    )


@pytest.mark.parametrize(
    ("strategy", "num_nodes", "device", "expected"),
    [
        (SPLIT, 1, Device.cpu, COLOCATED),
        (SPLIT, 1, Device.cuda, BROADCAST),
        (SPLIT, 3, Device.cpu, BROADCAST),
        (SPLIT, 3, Device.cuda, BROADCAST),
        (HYBRID, 1, Device.cpu, COLOCATED),
        (HYBRID, 1, Device.cuda, COLOCATED),
        (HYBRID, 3, Device.cpu, BROADCAST),
        (HYBRID, 3, Device.cuda, DISK),
    ],
)
def test_auto(strategy: PlacementStrategy, num_nodes: int, device: Device, expected: Transport) -> None:
    run = config(strategy, num_nodes)
    plan = plan_placement(run)
    assert choose_transport(run, plan, device) is expected
    forced = config(strategy, num_nodes, expected)
    assert choose_transport(forced, plan, device) is expected
    assert choose_transport(config(strategy, num_nodes, DISK), plan, device) is DISK


@pytest.mark.parametrize(
    ("strategy", "num_nodes", "transport", "device", "said"),
    [
        (SPLIT, 3, COLOCATED, Device.cpu, "is colocated, but actor and rollout are on 3 nodes, and .*; use broadcast or disk, or auto"),
        (SPLIT, 1, COLOCATED, Device.cuda, "in the placement 'split_collocate' actor and rollout have no device in common"),
        (HYBRID, 1, BROADCAST, Device.cuda, "is broadcast, but actor and rollout share devices, and .*; use colocated or disk, or auto"),
        (HYBRID, 3, COLOCATED, Device.cuda, "; use disk, or auto"),
    ],
)
def test_a_way_that_does_not_exist(strategy: PlacementStrategy, num_nodes: int, transport: Transport, device: Device, said: str) -> None:
    run = config(strategy, num_nodes, transport, device)
    with pytest.raises(ConfigError, match=said) as error:
        choose_transport(run, plan_placement(run), device)
    assert error.value.problems[0].startswith("resharding.transport, placement.strategy: ")
    with pytest.raises(ConfigError):
        transports(run, plan_placement(run))


def test_a_device_that_is_not_known_yet() -> None:
    run = config(SPLIT, 1)
    assert transports(run, plan_placement(run)) == {Device.cpu: COLOCATED, Device.cuda: BROADCAST}
    forced = config(SPLIT, 1, COLOCATED)
    assert transports(forced, plan_placement(forced)) == {Device.cpu: COLOCATED}
