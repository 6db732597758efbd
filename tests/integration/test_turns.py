"""Test engines that sleep while other roles use their memory, on real Ray: whichever process dies, all sleep,
and all have the weights afterwards."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from megarl.config.schema import Device, DType, ModelConfig, RolloutConfig
from megarl.controller.futures import gather
from megarl.rollout.driver.rollout import Rollout
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import RolloutEngineSpec
from megarl.rollout.worker.rollout_worker import RolloutWorker
from tests.fake_engine import MANIFEST, FakeEngine, FakeSpec, Misdeed, What, random_weights, recorded_calls
from tests.rollout_replicas import started_rollout
from tests.unit.engine.models import save_large_model

pytestmark = pytest.mark.usefixtures("ray_cluster")

WEIGHTS = random_weights(MANIFEST, seed=1)


def methods(folder: Path) -> list[tuple[int, str]]:
    return [
        (call["pid"], call["method"])
        for call in recorded_calls(folder)
        if call["method"] in ("sleep", "wake", "end_weight_update")
    ]


def pids(rollout: Rollout) -> list[int]:
    return [replica.call(RolloutWorker.process_ids)[0] for replica in rollout.replicas]


def test_a_replica_that_died_is_replaced_before_all_sleep(tmp_path: Path) -> None:
    with started_rollout(partial(FakeEngine, FakeSpec(folder=tmp_path, manifest=MANIFEST)), 2) as rollout:
        rollout.send(WEIGHTS, 5, wakes=True)
        first, second = pids(rollout)
        os.kill(second, signal.SIGKILL)
        rollout.sleep()
        again, third = pids(rollout)
        assert again == first
        assert third != second
        asleep = methods(tmp_path)[4:]
        assert {(first, "sleep"), (third, "sleep")} <= set(asleep)
        assert rollout.drain_metrics()["rollout/num_restarts"] == 1
        rollout.send(WEIGHTS, 6, wakes=True)
        assert [replica.call(RolloutWorker.weight_version) for replica in rollout.replicas] == [6, 6]
        assert set(methods(tmp_path)[4 + len(asleep) :]) == {
            (pid, method) for pid in (first, third) for method in ("wake", "end_weight_update")
        }


def test_an_engine_that_fails_to_sleep_is_not_hidden(tmp_path: Path) -> None:
    spec = FakeSpec(folder=tmp_path, manifest=MANIFEST, script=(Misdeed("sleep", 1, What.raise_error),))
    with started_rollout(partial(FakeEngine, spec), 2) as rollout:
        rollout.send(WEIGHTS, 5, wakes=True)
        with pytest.raises(Exception, match="sleep"):
            rollout.sleep()


def test_a_replica_that_dies_asleep_is_replaced_when_weights_come(tmp_path: Path) -> None:
    with started_rollout(partial(FakeEngine, FakeSpec(folder=tmp_path, manifest=MANIFEST)), 2) as rollout:
        rollout.send(WEIGHTS, 5, wakes=True)
        rollout.sleep()
        os.kill(pids(rollout)[0], signal.SIGKILL)
        assert rollout.resident_memory_gb() > 0  # of the remaining one
        rollout.send(WEIGHTS, 6, wakes=True)
        rollout.settle()
        assert [replica.call(RolloutWorker.weight_version) for replica in rollout.replicas] == [6, 6]


def test_a_sleeping_engine_gives_its_memory_back(tmp_path: Path) -> None:
    """Use the reference engine, with tensors that the heap would keep."""
    model = save_large_model(tmp_path)
    policy = ModelConfig(path=str(tmp_path), dtype=DType.float32)
    build = partial(
        HFEngine, RolloutEngineSpec(model=policy, rollout=RolloutConfig(max_concurrency=8), device=Device.cpu)
    )
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    size_gb = sum(weight.nbytes for weight in weights.values()) / 1e9

    with started_rollout(build, 1) as rollout:
        rollout.send(weights, 1)
        awake_gb = rollout.resident_memory_gb()
        rollout.sleep()
        assert awake_gb - rollout.resident_memory_gb() > 0.8 * size_gb
        gather(*(replica.call_all(RolloutWorker.wake) for replica in rollout.replicas))
        rollout.send(weights, 2)
        assert rollout.resident_memory_gb() > awake_gb - 0.2 * size_gb
