"""Test how often the driver calls each rank in a weight sync of a model with 70 billion parameters, with
groups that only count."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from megarl.config.schema import DType, ParallelConfig, Transport, Verify
from megarl.config.shipped import CONFIGS_DIR
from megarl.controller.futures import DerivedFuture
from megarl.models.families import read_architecture
from megarl.roles.megatron_worker import megatron_mesh
from megarl.weights.p2p import P2PAddress
from megarl.weights.plan import RankLocation, TensorSlices
from megarl.weights.sync.forecast import engine_slices
from megarl.weights.sync.source import WeightSource
from megarl.weights.sync.sync import WeightSync
from megarl.weights.transfer import SendReport

TRAINERS = ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=4, data_parallel_size=2)
NUM_REPLICAS = 8
SMALL_BYTES = 1_000
LARGE_BYTES = 20_000
ENGINE_SIZE = 8
ANSWERS: dict[str, Any] = {
    "publish_weight_address": P2PAddress("weights", "node", 1, 40, "gloo", 60.0),
    "send_weights": SendReport(
        packing_s=0.0,
        waiting_s=0.0,
        nbytes=1,
        full_bytes=1,
        planned_extra_bytes=0,
        measured_extra_bytes=0,
        lost={},
    ),
    "weights_are_on_cuda": True,
}


class CountingGroup:
    """Group whose calls have always completed."""

    def __init__(self, parallel: ParallelConfig, needed: list[TensorSlices] | None = None) -> None:
        self.mesh = megatron_mesh(parallel)
        self._answers = {**ANSWERS, "needed_slices": needed}
        self.has_ended = False
        self.calls: Counter[tuple[int, str]] = Counter()
        self.nbytes = 0  # of the arguments of all calls

    def call_rank(self, rank: int, method: Any, *arguments: Any) -> DerivedFuture[Any]:
        self.calls[rank, method.name] += 1
        self.nbytes += len(cloudpickle.dumps(arguments))
        return DerivedFuture([], lambda _: self._answers.get(method.name))


@pytest.mark.parametrize("transport", [Transport.device, Transport.group])
def test_a_push_is_one_call_to_each_rank(transport: Transport, tmp_path: Path) -> None:
    model = read_architecture(str(CONFIGS_DIR / "models" / "Meta-Llama-3-70B-Instruct"))
    needed = engine_slices(model, ENGINE_SIZE)
    trainers = CountingGroup(TRAINERS)
    replicas = [CountingGroup(ParallelConfig(), needed) for _ in range(NUM_REPLICAS)]
    source: Any = WeightSource(
        group=trainers,  # type: ignore[arg-type]
        architecture=model,
        parallel=TRAINERS,
        dtype=DType.bfloat16,
        bucket_bytes=2**30,
    )
    name = "device" if transport is Transport.device else "engine"
    sync = WeightSync(
        source,
        [RankLocation(f"node-{rank // 8}", f"device-{rank}") for rank in range(TRAINERS.world_size)],
        [
            [RankLocation(f"node-{replica}", f"{name}-{8 * replica + rank}") for rank in range(8)]
            for replica in range(NUM_REPLICAS)
        ],
        transport=transport,
        verify=Verify.off,
        scratch_dir=tmp_path,
        config_dir=tmp_path,
        limit_s=60.0,
    )
    to: Any = dict(enumerate(replicas))

    for version in range(3):
        report, lost = sync.push(to, version)
        assert report is not None
        assert report.nbytes == TRAINERS.world_size == 64
        assert lost == {}
        if version:  # the first sync connects them
            assert trainers.calls == Counter({(rank, "send_weights"): 1 for rank in range(64)})
            assert all(replica.calls == Counter({(0, "receive_weights"): 1}) for replica in replicas)
            assert all(replica.nbytes < SMALL_BYTES for replica in replicas)
        else:
            assert all(replica.nbytes > LARGE_BYTES for replica in replicas)
        for group in (trainers, *replicas):
            group.calls.clear()
            group.nbytes = 0
