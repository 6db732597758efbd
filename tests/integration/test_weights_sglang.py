"""Test weight sync into real SGLang of each size: each family from each trainer layout, alternating
transports, twice, and one engine that is killed."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from megarl.config.schema import Transport
from megarl.rollout.driver.replicas import Replicas
from megarl.rollout.interface import SamplingParameters, plan_requests
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.weights.checksum import checksum
from tests.integration.weight_matrix import (
    LAYOUTS,
    MATRIX,
    MORTAL,
    OVER_NODES,
    SGLANG,
    EngineCase,
    Trained,
    Trainers,
    push_twice,
    started_engine,
    started_trainers,
    two_of_each_family,
    versions,
)
from tests.rollout_replicas import RULES, StartedRollout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trained]]:
    return two_of_each_family(tmp_path_factory.mktemp("models"))


# Processes that stay for the next test of their layout. Those of one layout, four at most, work at a time.
MOST_TRAINER_RANKS = 8


class Running:
    """Keep one engine, and the trainers of the last layouts.

    pytest itself would restart them for each test if they were two of several parameters.
    """

    def __init__(self, models: dict[str, list[Trained]]) -> None:
        self._models = models
        self._stack = ExitStack()
        self._engine: EngineCase | None = None
        self._replicas: Replicas | None = None
        self._trainers: dict[str, tuple[Trainers, ExitStack]] = {}  # the oldest first

    def of(self, engine: EngineCase) -> Replicas:
        if self._replicas is None or engine != self._engine:
            self.close()
            self._engine, self._replicas = (
                engine,
                self._stack.enter_context(started_engine(engine, self._models)),
            )
        return self._replicas

    def trainers(self, layout: str) -> Trainers:
        if layout not in self._trainers:
            wanted = LAYOUTS[layout].world_size
            while wanted + sum(LAYOUTS[name].world_size for name in self._trainers) > MOST_TRAINER_RANKS:
                self._close_trainers(next(iter(self._trainers)))
            stack = ExitStack()
            self._trainers[layout] = stack.enter_context(started_trainers(layout, self._models)), stack
        return self._trainers[layout][0]

    def _close_trainers(self, layout: str) -> None:
        _, stack = self._trainers.pop(layout)
        stack.close()

    def close(self) -> None:
        self._replicas = None
        self._stack.close()

    def close_all(self) -> None:
        self.close()
        for layout in list(self._trainers):
            self._close_trainers(layout)


@pytest.fixture(scope="module")
def running(ray_cluster: None, models: dict[str, list[Trained]]) -> Iterator[Running]:
    made = Running(models)
    yield made
    made.close_all()


# Every other engine has the same layouts, so that their trainers stay.
@pytest.mark.parametrize(
    ("engine", "layout", "transport"),
    sorted((case for case in MATRIX if case[0].mode is not None), key=lambda case: SGLANG.index(case[0]) % 2),
    ids=lambda value: str(getattr(value, "value", value)),
)
def test_the_engine_writes_what_hugging_face_writes_with_the_pushed_weights(
    running: Running,
    models: dict[str, list[Trained]],
    engine: EngineCase,
    layout: str,
    transport: Transport,
    tmp_path: Path,
) -> None:
    trainers = running.trainers(layout)
    push_twice(trainers, running.of(engine), models[engine.family], engine, transport, tmp_path)


def test_a_killed_scheduler_costs_no_sample(running: Running, models: dict[str, list[Trained]]) -> None:
    """The kill is in the middle of a batch: the batch is complete, the weights are right, the run
    continues."""
    running.close()
    version, later = itertools.islice(versions, 2)

    with started_engine(MORTAL, models, restart_limit=1) as replicas:
        weights = {
            name: parameter.detach() for name, parameter in models[MORTAL.family][0].model.named_parameters()
        }
        check_that_it_is_survived(replicas, weights, version, later)


def check_that_it_is_survived(
    replicas: Replicas, weights: dict[str, torch.Tensor], version: int, later: int
) -> None:
    rollout = StartedRollout(replicas, RULES)
    requests = plan_requests(
        [[number + 1] for number in range(40)], SamplingParameters(max_new_tokens=10, seed=3)
    )
    rollout.send(weights, version)
    expected = dict(rollout.stream(requests))
    worker, *schedulers = rollout.replicas[0].call(RolloutWorker.process_ids)
    assert worker == rollout.replicas[0].pids[0]
    found = {}

    for number, (request_id, sample) in enumerate(rollout.stream(requests)):
        assert request_id not in found
        found[request_id] = sample
        if number == 10:
            os.kill(schedulers[0], signal.SIGKILL)

    metrics = rollout.drain_metrics()
    assert metrics["rollout/num_restarts"] == 1
    assert 1 <= metrics["rollout/num_resent"] <= 8
    assert {key: sample.token_ids.tolist() for key, sample in found.items()} == {
        key: sample.token_ids.tolist() for key, sample in expected.items()
    }
    assert rollout.replicas[0].call(RolloutWorker.checksums) == {
        name: checksum(tensor) for name, tensor in weights.items()
    }
    rollout.send(weights, later)
    assert {sample.weight_versions for _, sample in rollout.stream(requests[:3])} == {(later,)}


def test_the_end_of_one_node_of_an_engine_costs_no_sample(
    running: Running, models: dict[str, list[Trained]]
) -> None:
    """A scheduler of the second node is killed, then the worker of that node, then the engine sleeps and
    wakes."""
    running.close()
    weights = {
        name: parameter.detach() for name, parameter in models[OVER_NODES.family][0].model.named_parameters()
    }
    requests = plan_requests(
        [[number + 1] for number in range(24)], SamplingParameters(max_new_tokens=10, seed=3)
    )

    with started_engine(OVER_NODES, models, restart_limit=2) as replicas:
        rollout = StartedRollout(replicas, RULES)
        rollout.send(weights, next(versions))
        expected = {key: sample.token_ids.tolist() for key, sample in rollout.stream(requests)}

        for victim in (1, 0):
            second_node = replicas.groups[0].call_rank(1, RolloutWorker.process_ids).get()
            assert len(second_node) == 2  # the worker, and the scheduler of one rank
            found = {}
            for number, (request_id, sample) in enumerate(rollout.stream(requests)):
                found[request_id] = sample.token_ids.tolist()
                if number == 5:
                    # It could finish all samples before the end of its worker is noticed.
                    os.kill(second_node[1], signal.SIGSTOP)
                    os.kill(second_node[victim], signal.SIGKILL)
            assert found == expected
            assert rollout.drain_metrics()["rollout/num_restarts"] == 1
            assert rollout.replicas[0].call(RolloutWorker.checksums) == {
                name: checksum(tensor) for name, tensor in weights.items()
            }

        rollout.sleep()
        rollout.send(weights, version := next(versions), wakes=True)
        replicas.wake_cache(replicas.all)
        again = dict(rollout.stream(requests))
        assert {key: sample.token_ids.tolist() for key, sample in again.items()} == expected
        assert {sample.weight_versions for sample in again.values()} == {(version,)}
