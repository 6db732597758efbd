"""Rollouts of any engine on real Ray, with weights that the test itself sends."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.agents.trajectory import Sample
from megarl.config.schema import Transport, Verify
from megarl.controller.group import RoleGroup, results_of
from megarl.controller.resource_pool import RayResourcePool
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.rollout.driver.replicas import ReplicaPlace, Replicas
from megarl.rollout.driver.rollout import Rollout, TokenRules
from megarl.rollout.driver.rollout_weights import RolloutWeights
from megarl.rollout.driver.scheduler import RequestScheduler
from megarl.rollout.interface import GenerationRequest, RolloutEngine
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.weights.plan import RankLocation
from megarl.weights.sync.session import is_lost
from megarl.weights.sync.source import WeightSource
from megarl.weights.sync.sync import WeightSync

RULES = TokenRules(pad_token_id=0, stop_token_ids=(1, 2, 3), max_response_length=12)


@dataclass(frozen=True)
class Push:
    """Send `weights` to replicas from a folder of this process. Returns lost replicas, with the reason.
    `wakes`: they may be asleep."""

    weights: Mapping[str, torch.Tensor]
    version: int
    wakes: bool = False

    def __call__(self, replicas: Mapping[int, RoleGroup]) -> dict[int, Exception]:
        lost: dict[int, Exception] = {}

        if self.wakes:
            results_of(
                {number: replica.call_rank(0, RolloutWorker.wake) for number, replica in replicas.items()},
                lost,
                is_lost,
            )

        with tempfile.TemporaryDirectory() as folder:
            save_file(
                {name: tensor.contiguous() for name, tensor in self.weights.items()},
                Path(folder) / "model.safetensors",
            )
            loading = {
                number: replica.call_rank(0, RolloutWorker.load_folder, folder, self.version)
                for number, replica in replicas.items()
                if number not in lost
            }
            results_of(loading, lost, is_lost)

        return lost


class TestsPusher:
    """Stub for WeightSync."""

    current: Callable[[Mapping[int, RoleGroup]], dict[int, Exception]]

    def push(self, replicas: Mapping[int, RoleGroup], version: int) -> tuple[None, dict[int, Exception]]:
        return None, self.current(replicas)


class StartedRollout(Rollout):
    """A rollout to which a test sends weights, and on whose replicas it performs the roles' operations."""

    def __init__(
        self,
        replicas: Replicas,
        rules: TokenRules,
        *,
        max_concurrency: int = 8,
        answer_limit_s: float = 60.0,
        sample_limit_s: float = 60.0,
        seed: int = 0,
    ) -> None:
        self._pusher = TestsPusher()
        self.weights = weights = RolloutWeights(self._pusher, replicas, OffloadSchedule())
        scheduler = RequestScheduler(
            replicas,
            weights.readmit,
            max_concurrency=max_concurrency,
            answer_limit_s=answer_limit_s,
            sample_limit_s=sample_limit_s,
            can_readmit=weights.can_readmit,
        )
        super().__init__(scheduler, weights, rules, seed)

    def update_weights(
        self, push: Callable[[Mapping[int, RoleGroup]], dict[int, Exception]], version: int
    ) -> None:
        self._pusher.current = push
        self.weights.resume(version)
        self.weights.push()

    def send(self, weights: Mapping[str, torch.Tensor], version: int, wakes: bool = False) -> None:
        self.update_weights(Push(weights, version, wakes), version)

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Sample]]:
        """Yield samples as they finish. Closing the iterator cancels the rest."""
        self._weights.bring_in()
        arrived: list[tuple[int, Sample]] = []

        def deliver(request_id: int, replica: int, sample: Sample) -> None:
            arrived.append((request_id, sample))

        with self._replicas.exclusive():
            delivers = [partial(deliver, request.request_id) for request in requests]
            numbers = self.scheduler.begin(requests, delivers, first=True)
            missing = len(requests)
            try:
                while missing:
                    self.scheduler.poll()
                    missing -= len(arrived)
                    yield from arrived
                    arrived.clear()
            finally:
                self.scheduler.cancel(numbers)

    def settle(self) -> None:
        self.weights.settle()

    def sleep(self) -> None:
        self._replicas.sleep()

    def resident_memory_gb(self) -> float:
        return self._replicas.resident_memory_gb()


@contextmanager
def started_rollout(
    build_engine: Callable[[], RolloutEngine],
    num_replicas: int,
    *,
    rules: TokenRules = RULES,
    restart_limit: int = 3,
    **options: Any,
) -> Iterator[StartedRollout]:
    """Start a rollout, whose processes end with the block.

    Args:
        options: Of StartedRollout.
    """
    pool = RayResourcePool([num_replicas], use_gpu=False, name="rollout")
    places = [ReplicaPlace(part) for part in pool.split()]
    replicas = Replicas(places, build_engine, restart_limit=restart_limit, phase_time_limit_s=480)

    try:
        yield StartedRollout(replicas, rules, **options)
    finally:
        replicas.shutdown()
        pool.release()


def sync_of(
    source: WeightSource,
    transport: Transport,
    scratch_dir: Path,
    config_dir: Path,
    *,
    num_replicas: int = 1,
    num_ranks: int = 1,
    verify: Verify = Verify.always,
    sends_changes: bool = False,
) -> WeightSync:
    """Build a sync to replicas of `num_ranks` ranks each. With the transport `device` they are on the
    trainers' devices, in order; otherwise on their own."""
    name = "device" if transport is Transport.device else "engine-device"
    return WeightSync(
        source,
        [RankLocation("node", f"device-{rank}") for rank in range(len(source.group.mesh))],
        [
            [RankLocation("node", f"{name}-{replica * num_ranks + rank}") for rank in range(num_ranks)]
            for replica in range(num_replicas)
        ],
        transport=transport,
        verify=verify,
        scratch_dir=scratch_dir,
        config_dir=config_dir,
        limit_s=120.0,
        sends_changes=sends_changes,
    )
