"""Weights pushed from real Megatron ranks to real engines on Ray, by every transport; what a push does when an engine goes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.architecture import read_architecture
from megarl.config.schema import Device, DType, ParallelConfig, RolloutConfig, Transport, Verify
from megarl.controller.errors import WorkerError
from megarl.controller.group import RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker_class import RayClassWithInitArgs
from megarl.protocol.checksum import checksum
from megarl.protocol.parcels import Parcel
from megarl.resharding.verify import WeightMismatchError
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import RolloutEngine
from megarl.workers.engines import EngineSpec, build_engine
from megarl.workers.megatron import MegatronWorker
from megarl.workers.replicas import ReplicaPlace, Replicas
from megarl.workers.weight_sync import WeightSource, WeightSync
from tests.unit.engine.models import save_model
from tests.unit.workers.groups import model_spec, started

FAMILY = "qwen2-tied"
BUCKET_BYTES = 20_000  # less than the embedding: it is split
LAYOUT = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
TRANSPORTS = (Transport.colocated, Transport.broadcast, Transport.disk)


class Folders(NamedTuple):
    trained: Path
    initial: Path


class Trainer(NamedTuple):
    group: RoleGroup
    folder: Path

    def sync(self, transport: Transport, scratch: Path, verify: Verify = Verify.always) -> WeightSync:
        source = WeightSource(
            group=self.group,
            architecture=read_architecture(str(self.folder)),
            parallel=LAYOUT,
            dtype=DType.float32,
            bucket_bytes=BUCKET_BYTES,
        )
        return WeightSync(source, transport=transport, verify=verify, scratch_dir=scratch, config_dir=self.folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("models")
    save_model(FAMILY, folder / "trained", seed=1)
    save_model(FAMILY, folder / "initial", seed=2)
    return Folders(folder / "trained", folder / "initial")


@pytest.fixture(scope="module")
def trainer(ray_cluster: None, folders: Folders) -> Iterator[Trainer]:
    worker = RayClassWithInitArgs(MegatronWorker, model_spec(folders.trained, LAYOUT, optim=None))
    with started("trainers", LAYOUT.world_size, {"actor": worker}) as groups:
        yield Trainer(groups["actor"], folders.trained)


class FaultyEngine(HFEngine):
    """Dies at the second bucket of the first update, where `marker` does not exist yet. `lie`: changes an element that it was sent."""

    marker: Path | None = None
    lie = False

    def load_weights(self, parcels: list[Parcel]) -> None:
        super().load_weights(parcels)
        if self.marker is not None and any(parcel.chunks[0].offset for parcel in parcels):
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def end_weight_update(self, version: int) -> None:
        super().end_weight_update(version)
        if self.lie:
            self._model.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 5] += 1e-3


def faulty_engine(path: str, marker: Path | None, lie: bool) -> RolloutEngine:
    engine = FaultyEngine(path, dtype=torch.float32, device=torch.device("cpu"), max_concurrency=4, trust_remote_code=False)
    engine.marker = marker if marker is not None and not marker.exists() else None
    engine.lie = lie
    return engine


@pytest.fixture
def replicas_of(ray_cluster: None) -> Iterator:
    started_pools, started_replicas = [], []

    def start(build, count: int, restart_limit: int = 0) -> Replicas:
        pool = RayResourcePool([count], use_gpu=False, name=f"rollout-{len(started_pools)}")
        started_pools.append(pool)
        places = [ReplicaPlace(part) for part in pool.split()]
        started_replicas.append(Replicas(places, build, restart_limit=restart_limit, phase_time_limit_s=120))
        return started_replicas[-1]

    yield start
    for replicas in started_replicas:
        replicas.shutdown()
    for pool in started_pools:
        pool.release()


def good_engine(folders: Folders) -> partial:
    spec = EngineSpec(path=str(folders.initial), dtype=DType.float32, device=Device.cpu, rollout=RolloutConfig(max_concurrency=4))
    return partial(build_engine, spec)


def true_checksums(folder: Path) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}


def test_every_transport_gives_all_replicas_the_weights(trainer: Trainer, folders: Folders, replicas_of, tmp_path: Path) -> None:
    replicas = replicas_of(good_engine(folders), 2)
    nbytes = sum(tensor.nbytes for tensor in load_file(folders.trained / "model.safetensors").values())
    for version, transport in enumerate([*TRANSPORTS, *TRANSPORTS], start=1):
        sync = trainer.sync(transport, tmp_path / "scratch")
        reports = [sync.push(replicas.groups, version) for _ in range(2)]  # the second time with what the first has left
        sync.close()
        for group in replicas.groups:
            assert group.weight_version() == version
            assert group.checksums() == true_checksums(folders.trained)
        for report in reports:
            assert report.nbytes == nbytes
            assert report.seconds > 0
            assert report.metrics()["resharding/gb_per_s"] > 0
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_lie_is_named(trainer: Trainer, folders: Folders, replicas_of, tmp_path: Path) -> None:
    replicas = replicas_of(partial(faulty_engine, str(folders.initial), None, True), 1)
    with pytest.raises(
        WeightMismatchError,
        match=r"the rollout replica with pid \d+ does not hold.*1 of \d+ tensors.*model\.layers\.1\.mlp\.up_proj\.weight",
    ):
        trainer.sync(Transport.colocated, tmp_path, Verify.first).push(replicas.groups, 1)
    trainer.sync(Transport.colocated, tmp_path, Verify.off).push(replicas.groups, 2)


@pytest.mark.parametrize("transport", TRANSPORTS[:2])
def test_a_push_can_be_made_again_after_an_engine_died_in_it(
    trainer: Trainer, folders: Folders, replicas_of, tmp_path: Path, transport: Transport
) -> None:
    replicas = replicas_of(partial(faulty_engine, str(folders.initial), tmp_path / "died", False), 2, restart_limit=2)
    sync = trainer.sync(transport, tmp_path / "scratch", Verify.first)
    failures = 0

    def push(groups) -> None:
        nonlocal failures
        try:
            sync.push(groups, 1)
        except WorkerError:
            failures += 1
            raise

    replicas.update_weights(push)
    assert failures >= 1
    assert 1 <= replicas.num_restarts <= 2
    for group in replicas.groups:
        assert group.checksums() == true_checksums(folders.trained)
    sync.push(replicas.groups, 2)
    assert [group.weight_version() for group in replicas.groups] == [2, 2]
    sync.close()


def test_save_hf_by_all_stages(trainer: Trainer, folders: Folders, tmp_path: Path) -> None:
    trainer.sync(Transport.disk, tmp_path)._source.save_hf(tmp_path / "saved", folders.trained)
    names = sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors"))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]  # one of each stage
    saved = {name: tensor for file in names for name, tensor in load_file(tmp_path / "saved" / file).items()}
    assert {name: checksum(tensor) for name, tensor in saved.items()} == true_checksums(folders.trained)
