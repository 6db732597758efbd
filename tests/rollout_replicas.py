"""Rollouts of any engine on real Ray, with weights that the test itself sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from megarl.controller.futures import gather
from megarl.controller.group import RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.roles.replicas import ReplicaPlace, Replicas
from megarl.roles.rollout import Rollout, RolloutLimits, TokenRules
from megarl.roles.weights import RolloutWeights
from megarl.rollout.interface import RolloutEngine
from megarl.weights.bucket import ChunkMeta, Parcel
from megarl.weights.receipt import TensorMeta
from megarl.weights.shared_memory import Segment
from megarl.workers.rollout_worker import RolloutWorker

Push = Callable[[Sequence[RoleGroup]], None]  # gives replicas weights
RULES = TokenRules(pad_token_id=0, stop_token_ids=(1, 2, 3), max_response_length=12)


def push_of(weights: Mapping[str, torch.Tensor], version: int) -> Push:
    """Gives replicas these weights, from memory of this process."""

    def push(replicas: Sequence[RoleGroup]) -> None:
        manifest = {name: TensorMeta(tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
        flat = torch.cat([tensor.reshape(-1) for tensor in weights.values()])
        segment = Segment.create(flat.nbytes, flat.device)
        try:
            segment.tensor(flat.dtype, flat.numel()).copy_(flat)
            chunks = tuple(ChunkMeta(name, 0, tensor.numel()) for name, tensor in weights.items())
            gather(*(replica.call_rank(0, RolloutWorker.begin_weight_update, manifest) for replica in replicas))
            gather(*(replica.call(RolloutWorker.load_weights, [Parcel(chunks, flat.dtype, segment.handle)]) for replica in replicas))
            gather(*(replica.call_rank(0, RolloutWorker.end_weight_update, version) for replica in replicas))
        finally:
            segment.close()

    return push


def send(replicas: Replicas, push: Push) -> None:
    """All replicas get the weights of `push`; those that died are replaced, and all get them again."""

    def action(groups: Sequence[RoleGroup]) -> None:
        push(groups)
        replicas.accept(groups)

    replicas.on_all(action)


class TestsPusher:
    """Stands in for WeightSync."""

    current: Push

    def push(self, replicas: Sequence[RoleGroup], version: int) -> None:
        self.current(replicas)


class StartedRollout(Rollout):
    """A rollout to which a test sends weights, and on whose replicas it does what roles do."""

    def __init__(self, replicas: Replicas, rules: TokenRules, limits: RolloutLimits, seed: int) -> None:
        self._pusher = TestsPusher()
        self.weights = RolloutWeights(self._pusher, replicas, OffloadSchedule())
        super().__init__(replicas, self.weights, rules, limits, seed)

    def update_weights(self, push: Push) -> None:
        self._pusher.current = push
        self.weights.push()

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
    max_concurrency: int = 8,
    restart_limit: int = 3,
    answer_limit_s: float = 60.0,
    sample_limit_s: float = 60.0,
    seed: int = 0,
) -> Iterator[StartedRollout]:
    """Its processes end with the block."""
    pool = RayResourcePool([num_replicas], use_gpu=False, name="rollout")
    places = [ReplicaPlace(part) for part in pool.split()]
    replicas = Replicas(places, build_engine, restart_limit=restart_limit, phase_time_limit_s=480)
    limits = RolloutLimits(max_concurrency=max_concurrency, answer_limit_s=answer_limit_s, sample_limit_s=sample_limit_s)
    try:
        yield StartedRollout(replicas, rules, limits, seed)
    finally:
        replicas.shutdown()
        pool.release()
