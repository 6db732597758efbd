"""Test the planned host memory of snapshots, by hand here, and against real ranks in engine/test_snapshot.py."""

from __future__ import annotations

from megarl.config.schema import (
    ActorConfig,
    DType,
    ModelConfig,
    ParallelConfig,
    PlacementConfig,
    RecoveryConfig,
    SFTConfig,
)
from megarl.models.counts import num_parameters
from megarl.plan.placement.model_state import snapshot_bytes
from megarl.plan.placement.plan import plan_placement
from tests.unit.plan.placement.test_memory import QWEN_7B

NUM_PARAMETERS = num_parameters(QWEN_7B)
NUM_RANKS = 4


def planned(num_nodes: int, dtype: DType = DType.bfloat16, enabled: bool = True) -> dict[int, int]:
    config = SFTConfig(
        model=ModelConfig(dtype=dtype),
        actor=ActorConfig(parallel=ParallelConfig(data_parallel_size=NUM_RANKS)),
        placement=PlacementConfig(num_nodes=num_nodes, devices_per_node=NUM_RANKS // num_nodes),
        recovery=RecoveryConfig(enabled=enabled),
    )
    return snapshot_bytes(config, plan_placement(config), {"actor": QWEN_7B})


def test_a_node_holds_two_snapshots_of_its_ranks() -> None:
    """Each of four replicas has all weights, and a quarter of the moments and float32 masters."""
    assert planned(1) == {0: 2 * (NUM_RANKS * 2 * NUM_PARAMETERS + 12 * NUM_PARAMETERS)}
    assert planned(1, DType.float32) == {0: 2 * (NUM_RANKS * 4 * NUM_PARAMETERS + 12 * NUM_PARAMETERS)}


def test_on_several_nodes_it_also_holds_those_of_another_node() -> None:
    of_node = 2 * (2 * 2 * NUM_PARAMETERS + 2 * 12 * NUM_PARAMETERS // NUM_RANKS)
    assert planned(2) == {0: 2 * of_node, 1: 2 * of_node}


def test_without_recovery_there_are_none() -> None:
    assert planned(1, enabled=False) == {}
