"""Test which error ends a run whose rollout replica is on a lost node."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from megarl.controller import restarts
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.restarts import NodeLostError
from megarl.rollout.driver.replicas import ReplicaPlace, Replicas
from tests.fake_engine import MANIFEST, FakeEngine, FakeSpec


class PoolOnLostNode(RayResourcePool):
    def lost_nodes(self) -> dict[int, str]:
        return {0: "10.0.0.9"}

    def move_from_lost_nodes(self) -> dict[int, str]:
        return self.lost_nodes()


@pytest.mark.usefixtures("ray_cluster")
def test_a_lost_node_is_named_although_no_restart_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process has started this Ray itself, to which no other node could belong.
    monkeypatch.setattr(restarts, "ended_node", lambda: None)
    pool = PoolOnLostNode([1], use_gpu=False, name="rollout")
    spec = FakeSpec(folder=tmp_path, manifest=MANIFEST)
    replicas = Replicas(
        [ReplicaPlace(pool)], partial(FakeEngine, spec), restart_limit=0, phase_time_limit_s=60
    )
    try:
        with pytest.raises(
            NodeLostError, match=r"node 10\.0\.0\.9 is lost, and no other .* for rollout replica 0 of 1"
        ):
            replicas.restart(0, "its last words")
    finally:
        replicas.shutdown()
        pool.release()
