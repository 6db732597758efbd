"""Test the transport `folder` with patches.

Two trainer ranks and two engines are in one process. Their calls are made at once, and they meet in files only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import DType, ParallelConfig, Transport, Verify
from megarl.controller.futures import DerivedFuture
from megarl.machine.errors import CheckpointError
from megarl.roles.megatron_worker import megatron_mesh
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.weights.checksum import WeightMismatchError
from megarl.weights.manifest import manifest_of
from megarl.weights.plan import RankLocation
from megarl.weights.shard_layout import layouts_of, shard_shapes
from megarl.weights.shards import Shards
from megarl.weights.sync.source import WeightSource
from megarl.weights.sync.sync import PUSHED_FOLDERS, WeightSync
from megarl.weights.sync.worker import WeightExport
from megarl.weights.transports.delta import DeltaSender, PatchFiles
from megarl.weights.transports.interface import SendingRank
from tests.fake_engine import FakeEngine, FakeSpec
from tests.plain_trainer import no_trainers
from tests.unit.weights.models import architecture_of

POLICY = architecture_of("llama", tied=False)
PARALLEL = ParallelConfig(tensor_parallel_size=2)


class LocalTrainer(WeightExport):
    """Tensor-parallel rank with weights only, outside of a worker group."""

    def __init__(self, rank: int) -> None:
        layout = layouts_of(POLICY, PARALLEL)[rank]
        generator = torch.Generator().manual_seed(rank)
        parameters = {
            name: torch.randn(shape, generator=generator) if "norm" not in name else torch.ones(shape)
            for name, shape in shard_shapes(POLICY, layout).items()
        }
        self._own = Shards(parameters=parameters, architecture=POLICY, layout=layout)
        self._sender = DeltaSender(SendingRank(rank, "", "", torch.device("cpu"), no_trainers))

    def _shards(self) -> Shards:
        return self._own

    def change(self, period: int) -> None:
        """Change the first of every `period` elements."""
        for parameter in self._own.parameters.values():
            parameter.view(-1)[::period] *= -1.5


class LocalReplica(RolloutWorker):
    def __init__(self, engine: FakeEngine) -> None:
        self._joined = self._received = ""
        self._part = engine


class LocalGroup:
    """Group whose ranks are in this process. Calls are made at once."""

    has_ended = False
    pids = (0,)

    def __init__(self, workers: Sequence[Any], parallel: ParallelConfig) -> None:
        self.workers = workers
        self.mesh = megatron_mesh(parallel)

    def call_rank(self, rank: int, method: Any, *arguments: Any) -> DerivedFuture[Any]:
        answer = getattr(self.workers[rank], method.name)(*arguments)
        return DerivedFuture([], lambda _: answer)


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainers = [LocalTrainer(rank) for rank in range(2)]
        self.replicas: Any = {number: self.new_replica() for number in range(2)}
        group: Any = LocalGroup(self.trainers, PARALLEL)
        source = WeightSource(
            group=group,
            architecture=POLICY,
            parallel=PARALLEL,
            dtype=DType.float32,
            bucket_bytes=20_000,
        )
        self.sync = WeightSync(
            source,
            [RankLocation("node", f"device-{rank}") for rank in range(2)],
            [[RankLocation("node", f"engine-{number}")] for number in range(2)],
            transport=Transport.folder,
            verify=Verify.always,
            scratch_dir=folder / "scratch",
            config_dir=folder,
            limit_s=60.0,
            sends_changes=True,
        )

    def new_replica(self) -> LocalGroup:
        engine = FakeEngine(FakeSpec(folder=self.folder, manifest=manifest_of(POLICY, torch.float32)))
        return LocalGroup([LocalReplica(engine)], ParallelConfig())

    def shares(self, *versions: int, to: Sequence[int] = (0, 1), period: int = 100) -> list[float]:
        """Sync versions, and return what was written, relative to all weights."""
        found = []
        for version in versions:
            if period:
                for trainer in self.trainers:
                    trainer.change(period)
            report, lost = self.sync.push({number: self.replicas[number] for number in to}, version)
            assert lost == {}
            assert report is not None
            assert report.sent_share is not None
            found.append(report.sent_share)
            assert list((self.folder / "scratch").glob(PUSHED_FOLDERS)) == []
        return found


def test_only_what_changed_is_written_for_those_that_have_the_rest(tmp_path: Path) -> None:
    """Every sync compares the checksums of all tensors."""
    run = Run(tmp_path)
    first, second, third = run.shares(1, 2, 7)  # versions may be skipped
    assert 1 < first < 1.05
    assert 0.01 < second < 0.05
    assert 0.01 < third < 0.05
    assert run.shares(8, period=0) < [0.01]

    # A replica that slept or was replaced gets everything, the other one what changed.
    run.replicas[0].workers[0].sleep()
    run.replicas[0].workers[0].wake()
    assert [round(share, 1) for share in run.shares(9, 10)] == [0.5, 0.0]
    run.replicas[1] = run.new_replica()
    assert [round(share, 1) for share in run.shares(11, 12)] == [0.5, 0.0]

    # One that missed a version does not have what later changes refer to.
    assert [round(share, 1) for share in run.shares(13, to=[0])] == [0.0]
    assert [round(share, 1) for share in run.shares(14, 15)] == [1.0, 0.0]
    run.sync.close()


def test_wrong_patches_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.shares(1)
    write = DeltaSender.open

    # The shards that are written are others than those that checksums are computed from.
    def open_others(self: DeltaSender, shards: Shards, *arguments: Any) -> Any:
        others = {name: value + 1 for name, value in shards.parameters.items()}
        return write(self, Shards(parameters=others, architecture=POLICY, layout=shards.layout), *arguments)

    monkeypatch.setattr(DeltaSender, "open", open_others)
    with pytest.raises(WeightMismatchError, match="does not hold the trainer's weights"):
        run.shares(2)


def test_a_rank_that_cannot_write_is_named_while_others_add_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder cannot be removed then, because it does not stay empty."""
    run = Run(tmp_path)
    run.shares(1)

    def write(self: PatchFiles, *arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "0-to-0.patches")

    def remove(path: Any, **arguments: Any) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", path)

    with monkeypatch.context() as during:
        during.setattr(PatchFiles, "start", write)
        during.setattr(os, "rmdir", remove)
        with pytest.raises(CheckpointError, match="0-to-0.patches: cannot be written: No space left"):
            run.shares(2)

    (left,) = (tmp_path / "scratch").glob(PUSHED_FOLDERS)
    left.rmdir()
    # The rank that had begun, which has half of the weights, sends everything again.
    again, later = run.shares(3, 4)
    assert 0.45 < again < 0.6
    assert later < 0.05
