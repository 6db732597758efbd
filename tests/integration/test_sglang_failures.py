"""A real SGLang replica that is killed in the middle of a batch: the batch is whole, the weights are right, the run goes on."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from megarl.config.schema import Device, DType, ModelConfig, RolloutConfig, RolloutEngineKind
from megarl.rollout.interface import RolloutEngineSpec, SamplingParameters, plan_requests
from megarl.weights.checksum import checksum
from megarl.workers.engines import build_engine
from tests.rollout_replicas import push_of, started_rollout
from tests.unit.rollout.models import random_model


@pytest.mark.slow
def test_a_killed_scheduler_costs_no_sample(ray_cluster: None, tmp_path: Path) -> None:
    model = random_model()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    model.generation_config.save_pretrained(tmp_path)
    rollout_config = RolloutConfig(engine=RolloutEngineKind.sglang, max_concurrency=8, health_limit_s=60.0)
    spec = RolloutEngineSpec(model=ModelConfig(path=str(tmp_path), dtype=DType.float32), rollout=rollout_config, device=Device.cpu)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    requests = plan_requests([[number + 1] for number in range(40)], SamplingParameters(max_new_tokens=10, seed=3))
    with started_rollout(partial(build_engine, spec), num_replicas=1, restart_limit=1, max_concurrency=8) as rollout:
        rollout.update_weights(push_of(weights, 4))
        expected = dict(rollout.stream(requests))
        worker, *schedulers = rollout.replicas[0].process_ids()
        assert worker == rollout.replicas[0].pids[0]
        found = {}
        for number, finished in enumerate(rollout.stream(requests)):
            assert finished.request_id not in found
            found[finished.request_id] = finished.sample
            if number == 10:
                os.kill(schedulers[0], signal.SIGKILL)
        metrics = rollout.drain_metrics()
        assert metrics["rollout/num_restarts"] == 1
        assert 1 <= metrics["rollout/num_resent"] <= 8
        assert {key: sample.token_ids for key, sample in found.items()} == {key: sample.token_ids for key, sample in expected.items()}
        assert rollout.replicas[0].checksums() == {name: checksum(tensor) for name, tensor in weights.items()}
        rollout.update_weights(push_of(weights, 5))
        assert {sample.weight_versions for _, sample in rollout.stream(requests[:3])} == {(5,)}
