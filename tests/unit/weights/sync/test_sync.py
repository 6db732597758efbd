"""Test weight syncs from real Megatron ranks to real engines on Ray by every transport, and syncs in which an
engine dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.config.schema import Device, DType, ModelConfig, ParallelConfig, RolloutConfig, Transport, Verify
from megarl.controller.dispatch import Mesh
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import gather
from megarl.controller.group import RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs, register
from megarl.models.families import read_architecture
from megarl.roles.megatron_worker import MegatronWorker, megatron_mesh
from megarl.rollout.driver.replicas import ReplicaPlace, Replicas
from megarl.rollout.engines import build_engine
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import RolloutEngine, RolloutEngineSpec
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.weights import patch
from megarl.weights.checksum import WeightMismatchError, checksum
from megarl.weights.patch import Patch, make_patch
from megarl.weights.shard_layout import layouts_of, shard_shapes
from megarl.weights.shards import Shards
from megarl.weights.sync.source import WeightSource
from megarl.weights.sync.sync import WeightSync
from megarl.weights.sync.worker import WeightExport
from megarl.weights.tensors import Part
from megarl.weights.transfer import SendReport
from tests.rollout_replicas import sync_of
from tests.unit.engine.models import save_model
from tests.unit.roles.groups import model_spec, started
from tests.unit.weights.kept_tensors import INDEX, SHAPES, indexed, same_bits, write_original

FAMILY = "qwen2-tied"
BUCKET_BYTES = 20_000  # smaller than the embedding, which is split
LAYOUT = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
PIPELINE = ParallelConfig(pipeline_parallel_size=2)
TRANSPORTS = (Transport.device, Transport.group, Transport.folder)
IN_MEMORY = (Transport.device, Transport.group)


class Folders(NamedTuple):
    trained: Path
    initial: Path


class Trainer(NamedTuple):
    group: RoleGroup
    folder: Path

    def source(self, parallel: ParallelConfig = LAYOUT) -> WeightSource:
        return WeightSource(
            group=self.group,
            architecture=read_architecture(str(self.folder)),
            parallel=parallel,
            dtype=DType.float32,
            bucket_bytes=BUCKET_BYTES,
        )

    def sync(
        self,
        transport: Transport,
        scratch: Path,
        verify: Verify = Verify.always,
        parallel: ParallelConfig = LAYOUT,
        num_replicas: int = 2,
    ) -> WeightSync:
        source = self.source(parallel)
        return sync_of(source, transport, scratch, self.folder, num_replicas=num_replicas, verify=verify)


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
    """Engine that dies in the middle of the first update, if `marker` does not exist yet. With `lie`, it
    changes an element that it received."""

    marker: Path | None = None
    lie = False
    num_parts = 0

    def places_of(self, part: Part) -> list[torch.Tensor]:
        self.num_parts += 1
        if self.marker is not None and self.num_parts == 10:
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().places_of(part)

    def end_weight_update(self, version: int) -> None:
        super().end_weight_update(version)
        if self.lie:
            self.model.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 5] += 1e-3


def faulty_engine(path: str, marker: Path | None, lie: bool) -> RolloutEngine:
    engine = FaultyEngine(
        RolloutEngineSpec(
            model=ModelConfig(path=path, dtype=DType.float32),
            rollout=RolloutConfig(max_concurrency=4),
            device=Device.cpu,
        )
    )
    engine.marker = marker if marker is not None and not marker.exists() else None
    engine.lie = lie

    return engine


@pytest.fixture
def replicas_of(ray_cluster: None) -> Iterator:
    started_pools = []
    started_replicas = []

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
    policy = ModelConfig(path=str(folders.initial), dtype=DType.float32)
    spec = RolloutEngineSpec(model=policy, rollout=RolloutConfig(max_concurrency=4), device=Device.cpu)
    return partial(build_engine, spec)


def true_checksums(folder: Path) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}


def test_every_transport_gives_all_replicas_the_weights(
    trainer: Trainer, folders: Folders, replicas_of, tmp_path: Path
) -> None:
    replicas = replicas_of(good_engine(folders), 2)
    nbytes = sum(tensor.nbytes for tensor in load_file(folders.trained / "model.safetensors").values())

    for version, transport in enumerate([*TRANSPORTS, *TRANSPORTS], start=1):
        sync = trainer.sync(transport, tmp_path / "scratch")
        # the second time with what the first has left
        pushed = [sync.push(replicas.all, version) for _ in range(2)]
        sync.close()
        for group in replicas.groups:
            assert group.call(RolloutWorker.weight_version) == version
            assert group.call(RolloutWorker.checksums) == true_checksums(folders.trained)
        for report, lost in pushed:
            assert lost == {}
            assert report.nbytes == nbytes * (1 if transport is Transport.folder else 2)
            assert report.metrics()["resharding/gb_per_s"] > 0
            assert 0 < report.load_s <= report.seconds
        # planned bytes, and what a kernel counts in pages, which sometimes lag
        if transport is not Transport.folder:
            assert min(report.extra_bytes for report, _ in pushed) <= 4 * BUCKET_BYTES + 2**20

    assert list((tmp_path / "scratch").iterdir()) == []


def test_two_trainers_cannot_have_an_engine_at_once(
    trainer: Trainer, folders: Folders, replicas_of, tmp_path: Path
) -> None:
    """The second trainer takes over the engine. The first one gets an error, and does not wait for an engine
    that is connected to another."""
    replicas = replicas_of(good_engine(folders), 1)
    first, second = (trainer.sync(transport, tmp_path / "scratch", num_replicas=1) for transport in IN_MEMORY)
    first.push(replicas.all, 1)
    first.close()
    second.push(replicas.all, 2)
    third = trainer.sync(Transport.folder, tmp_path / "scratch", num_replicas=1)
    third.push(replicas.all, 3)  # needs nothing from the engine

    with pytest.raises(WorkerError):
        # would take it over
        replicas.groups[0].call_rank(0, RolloutWorker.join_weights, [], "another's").get()

    report, lost = second.push(replicas.all, 4)
    assert report is None
    assert "joined another trainer" in str(lost[0])
    assert second.push(replicas.all, 5)[1] == {}  # joined again
    assert replicas.groups[0].call(RolloutWorker.weight_version) == 5
    second.close()


def test_an_engine_with_other_weights_is_named_with_the_tensor(
    trainer: Trainer, folders: Folders, replicas_of, tmp_path: Path
) -> None:
    replicas = replicas_of(partial(faulty_engine, str(folders.initial), None, True), 1)
    first = trainer.sync(Transport.device, tmp_path, Verify.first, num_replicas=1)

    with pytest.raises(
        WeightMismatchError,
        match=r"the rollout replica with pid \d+ does not hold.*1 of \d+ "
        r"tensors.*model\.layers\.1\.mlp\.up_proj\.weight",
    ):
        first.push(replicas.all, 1)

    first.close()
    unverified = trainer.sync(Transport.device, tmp_path, Verify.off, num_replicas=1)
    assert unverified.push(replicas.all, 2)[1] == {}
    unverified.close()


@pytest.mark.parametrize("transport", IN_MEMORY)
def test_one_that_lies_among_others_is_lost_alone(
    trainer: Trainer, folders: Folders, replicas_of, tmp_path: Path, transport: Transport
) -> None:
    honest = replicas_of(good_engine(folders), 1)
    liar = replicas_of(partial(faulty_engine, str(folders.initial), None, True), 1)
    sync = trainer.sync(transport, tmp_path, Verify.first)
    report, lost = sync.push({0: honest.groups[0], 1: liar.groups[0]}, 1)
    assert report is not None
    assert list(lost) == [1]
    assert isinstance(lost[1], WeightMismatchError)
    assert honest.groups[0].call(RolloutWorker.checksums) == true_checksums(folders.trained)
    sync.close()


@pytest.mark.parametrize("transport", IN_MEMORY)
def test_an_engine_that_dies_in_a_push_is_lost_alone(
    trainer: Trainer, folders: Folders, replicas_of, tmp_path: Path, transport: Transport
) -> None:
    """The other engine has the weights when the sync ends. The replacement gets them while the other keeps
    its own."""
    replicas = replicas_of(
        partial(faulty_engine, str(folders.initial), tmp_path / "died", False), 2, restart_limit=2
    )
    sync = trainer.sync(transport, tmp_path / "scratch", Verify.first)

    for version in (1, 2):  # both may die in the first
        report, lost = sync.push(replicas.all, version)
        for number, group in replicas.all.items():
            if number not in lost:
                assert group.call(RolloutWorker.weight_version) == version
                assert group.call(RolloutWorker.checksums) == true_checksums(folders.trained)
        if lost:
            assert all("ended (killed" in str(error) for error in lost.values())
            replicas.replace(lost)
            alone, lost_again = sync.push({number: replicas.groups[number] for number in lost}, version)
            assert alone is not None
            assert lost_again == {}

    assert 1 <= replicas.num_restarts <= 2
    assert [group.call(RolloutWorker.weight_version) for group in replicas.groups] == [2, 2]
    sync.close()


@pytest.mark.parametrize("transport", IN_MEMORY)
def test_a_first_push_in_which_nobody_lives_names_the_dead(
    trainer: Trainer, folders: Folders, replicas_of, tmp_path: Path, transport: Transport
) -> None:
    """The engines die before any has joined; the replacement gets the weights."""
    replicas = replicas_of(good_engine(folders), 1, restart_limit=1)
    os.kill(replicas.groups[0].call(RolloutWorker.process_ids)[0], signal.SIGKILL)
    sync = trainer.sync(transport, tmp_path, num_replicas=1)
    report, lost = sync.push(replicas.all, 1)
    assert (report, list(lost)) == (None, [0])
    replicas.restart(0, "a test")
    assert sync.push(replicas.all, 1)[1] == {}
    assert replicas.groups[0].call(RolloutWorker.checksums) == true_checksums(folders.trained)
    sync.close()


@pytest.mark.parametrize("transport", IN_MEMORY)
def test_what_is_kept_from_push_to_push_outlives_sleep_offload_and_restarts(
    trainer: Trainer, folders: Folders, replicas_of, tmp_path: Path, transport: Transport
) -> None:
    replicas = replicas_of(good_engine(folders), 2, restart_limit=1)
    sync = trainer.sync(transport, tmp_path / "scratch")  # every sync compares checksums
    sync.push(replicas.all, 1)
    gather(*(group.call_all(RolloutWorker.sleep) for group in replicas.groups))

    # not part of the state, but the buffers of the weight sync
    trainer.group.call(MegatronWorker.offload_state, ()).get()
    gather(*(group.call_all(RolloutWorker.wake) for group in replicas.groups))
    sync.push(replicas.all, 2)
    replicas.restart(1, "a test")
    assert sync.push({1: replicas.groups[1]}, 2)[1] == {}  # like a restarted one
    assert sync.push(replicas.all, 3)[1] == {}
    assert [group.call(RolloutWorker.weight_version) for group in replicas.groups] == [3, 3]
    sync.close()


class StubTrainer(WeightExport):
    """Tensor-parallel rank with weights only."""

    def __init__(self, folder: Path, parallel: ParallelConfig) -> None:
        super().__init__()
        dist.init_process_group("gloo", init_method="env://")
        architecture = read_architecture(str(folder))
        layout = layouts_of(architecture, parallel)[self.rank]
        parameters = {name: torch.ones(shape) for name, shape in shard_shapes(architecture, layout).items()}
        self._own = Shards(parameters=parameters, architecture=architecture, layout=layout)
        self._dies = False

    @classmethod
    def mesh(cls, world_size: int, folder: Path, parallel: ParallelConfig) -> Mesh:
        return megatron_mesh(parallel)

    def _shards(self) -> Shards:
        return self._own

    @register()
    def die_in_the_next_push(self) -> None:
        self._dies = True

    @register()
    def change(self, period: int) -> None:
        """Change the first of every `period` elements."""
        for parameter in self._own.parameters.values():
            parameter.view(-1)[::period] *= -1.5

    @register()
    def send_wrong_patches(self) -> None:
        """Change an element of every patch that this process makes from now on."""

        def wrong_patch(old: torch.Tensor, new: torch.Tensor) -> Patch:
            wrong = new.clone()
            wrong[0] += 1
            return make_patch(old, wrong)

        patch.make_patch = wrong_patch

    def send_weights(
        self, replicas: Sequence[int], first_round: int = 0, folder: str | None = None
    ) -> SendReport | None:
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().send_weights(replicas, first_round, folder)


@pytest.mark.parametrize("transport", IN_MEMORY)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_rank_that_dies_in_a_push(
    folders: Folders, replicas_of, tmp_path: Path, rank: int, transport: Transport
) -> None:
    replicas = replicas_of(good_engine(folders), 1)
    parallel = ParallelConfig(tensor_parallel_size=2)

    with started(
        "stubs", 2, {"actor": RayClassWithInitArgs(StubTrainer, folders.trained, parallel)}
    ) as groups:
        sync = Trainer(groups["actor"], folders.trained).sync(
            transport, tmp_path, Verify.off, parallel, num_replicas=1
        )
        sync.push(replicas.all, 1)
        assert replicas.groups[0].call(RolloutWorker.weight_version) == 1
        groups["actor"].call_rank(rank, StubTrainer.die_in_the_next_push).get()
        start_s = time.monotonic()
        with pytest.raises(WorkerError, match=rf"actor.*rank {rank}.*send_weights.*ended \(killed"):
            sync.push(replicas.all, 2)
        assert time.monotonic() - start_s < 60


def test_only_what_changed_is_sent_to_those_that_have_the_rest(
    folders: Folders, replicas_of, tmp_path: Path
) -> None:
    """Every sync compares the checksums of all tensors."""
    replicas = replicas_of(good_engine(folders), 2, restart_limit=1)
    parallel = ParallelConfig(tensor_parallel_size=2)
    worker = RayClassWithInitArgs(StubTrainer, folders.trained, parallel)

    with started("stubs", 2, {"actor": worker}) as groups:
        source = Trainer(groups["actor"], folders.trained).source(parallel)
        sync = sync_of(source, Transport.group, tmp_path, folders.trained, num_replicas=2, sends_changes=True)

        def shares(*versions: int, to: Sequence[int] = (0, 1), period: int = 100) -> list[float]:
            found = []
            for version in versions:
                if period:
                    groups["actor"].call(StubTrainer.change, period)
                report, lost = sync.push({number: replicas.groups[number] for number in to}, version)
                assert lost == {}
                found.append(report.metrics()["resharding/sent_share"])
            return found

        first, second, third = shares(1, 2, 7)  # versions may be skipped
        assert 1 < first < 1.05
        assert 0.01 < second < 0.05
        assert 0.01 < third < 0.05
        assert shares(7, period=0) < [0.01]

        # An engine that slept, or was loaded from a folder, gets everything; the other one what changed.
        replicas.groups[0].call_all(RolloutWorker.sleep).get()
        replicas.groups[0].call_all(RolloutWorker.wake).get()
        assert [round(share, 1) for share in shares(8, 9)] == [0.5, 0.0]
        replicas.groups[1].call_rank(0, RolloutWorker.load_folder, str(folders.initial), 9).get()
        assert [round(share, 1) for share in shares(10, 11)] == [0.5, 0.0]

        # So does one that was restarted, before the next version or for it.
        os.kill(replicas.groups[1].call(RolloutWorker.process_ids)[0], signal.SIGKILL)
        report, lost = sync.push(replicas.all, 12)
        assert list(lost) == [1]
        replicas.replace(lost)
        assert [round(share, 1) for share in shares(12, to=[1], period=0)] == [1.0]
        assert [round(share, 1) for share in shares(13, 14)] == [0.0, 0.0]
        assert [round(share, 1) for share in shares(15, to=[0])] == [0.0]
        assert [round(share, 1) for share in shares(16, 17)] == [1.0, 0.0]  # 1 has version 14

        groups["actor"].call(StubTrainer.send_wrong_patches)
        with pytest.raises(WeightMismatchError, match="does not hold the trainer's weights"):
            shares(18)
        sync.close()


def test_save_hf_by_all_stages(trainer: Trainer, folders: Folders, tmp_path: Path) -> None:
    trainer.source().save_hf(tmp_path / "saved", folders.trained)
    names = sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors"))
    # one of each stage
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    saved = {name: tensor for file in names for name, tensor in load_file(tmp_path / "saved" / file).items()}
    assert {name: checksum(tensor) for name, tensor in saved.items()} == true_checksums(folders.trained)


def test_a_rank_that_stops_in_a_weight_export_is_noticed(
    ray_cluster: None, folders: Folders, tmp_path: Path
) -> None:
    """Rank 0 waits for tensors of rank 1. It returns every second and is called again, so that calls end all
    the time."""
    parallel = ParallelConfig(tensor_parallel_size=2)
    worker = RayClassWithInitArgs(StubTrainer, folders.trained, parallel)
    with started("stubs", 2, {"actor": worker}) as groups:
        group = groups["actor"]
        source = Trainer(group, folders.trained).source(parallel)
        source.save_hf(tmp_path / "whole", folders.trained)
        os.kill(group.pids[1], signal.SIGSTOP)
        group.limits.fixed_s = 4.0
        with pytest.raises(PhaseTimeoutError) as caught:
            source.save_hf(tmp_path / "partial", folders.trained)
    assert (caught.value.role, caught.value.rank) == ("actor", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_save_hf_keeps_frozen_layers_of_the_original(
    ray_cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trained weights are others than those of the original folder, which predicts further tokens."""
    trained = write_original(tmp_path / "trained", "glm4_moe", seed=1)
    original = write_original(tmp_path / "original", "glm4_moe")
    worker = RayClassWithInitArgs(MegatronWorker, model_spec(tmp_path / "trained", PIPELINE, optim=None))
    with started("trainers", PIPELINE.world_size, {"actor": worker}) as groups:
        source = Trainer(groups["actor"], tmp_path / "trained").source(PIPELINE)
        source.save_hf(tmp_path / "saved", tmp_path / "original")
        source.write_hf(tmp_path / "for_engines", tmp_path / "original")
        assert caplog.messages == []
        (tmp_path / "original" / INDEX).unlink()
        source.save_hf(tmp_path / "without", tmp_path / "original")
        (message,) = caplog.messages
        assert "without is written without the layers that predict further tokens: " in message

    saved = indexed(tmp_path / "saved")
    frozen = {name: original[name] for name in SHAPES["glm4_moe"]}
    assert same_bits({name: saved[name] for name in frozen}, frozen)
    changed = {name: value.float() for name, value in trained.items() if name not in frozen}
    assert same_bits({name: saved[name] for name in saved if name not in frozen}, changed)
    fields = [
        json.loads((tmp_path / name / "config.json").read_text())["num_nextn_predict_layers"]
        for name in ("saved", "for_engines", "without")
    ]
    assert fields == [1, 0, 0]
    assert all(indexed(tmp_path / name).keys() == changed.keys() for name in ("for_engines", "without"))
