"""The way of the weights: from the shards of a Megatron role, bucket by bucket, to engines or into a folder.

The driver passes parcels on, which say where the data lie; it never holds a weight. At most two buckets of a pipeline stage are
under way: while one is loaded the next is gathered.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from megarl.config.architecture import Architecture
from megarl.config.schema import DType, ParallelConfig, Transport, Verify
from megarl.controller.futures import WorkerFuture, gather
from megarl.controller.group import RoleGroup
from megarl.protocol.parcels import GroupAddress
from megarl.protocol.weights import Manifest
from megarl.resharding.export import plan_files, save_hf_folder
from megarl.resharding.families import Head
from megarl.resharding.gather import plan_buckets
from megarl.resharding.layout import ShardLayout, layouts_of
from megarl.resharding.manifest import manifest_of
from megarl.resharding.sender import SenderReport
from megarl.resharding.verify import add_checksums, compare_checksums

PUSHED_FOLDERS = ".weights-*"  # the transport `disk` has one while it works
_GROUP_LIMIT_S = 300.0  # for the members of a weight group to come, and for one broadcast


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """A trained model whose weights can be sent."""

    group: RoleGroup
    architecture: Architecture
    parallel: ParallelConfig
    dtype: DType
    bucket_bytes: int
    head: Head = "lm"

    @property
    def _torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype.value)

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self.architecture, self._torch_dtype, self.head)

    @property
    def exporters(self) -> list[int]:
        """The ranks of the first replica. The tensor-parallel ranks of a stage work in step, so all of them are asked for everything."""
        return [rank for rank, place in enumerate(self.group.mesh) if place.dp == 0]

    @property
    def stage_heads(self) -> list[int]:
        """Tensor-parallel rank 0 of each pipeline stage of the first replica, in the order of the stages."""
        heads = [(place.pp, rank) for rank, place in enumerate(self.group.mesh) if place.dp == 0 and place.tp == 0]
        return [rank for _, rank in sorted(heads)]

    def call(self, method: str, *arguments: object) -> list[WorkerFuture]:
        """On all exporters."""
        return [self.group.execute_rank_async(rank, method, *arguments) for rank in self.exporters]

    def num_rounds(self) -> int:
        """After so many parcels of every stage all weights were sent."""
        return max(len(plan_buckets(self.architecture, stage, self.bucket_bytes, self._torch_dtype, self.head)) for stage in self._stages())

    def _stages(self) -> Sequence[ShardLayout]:
        return layouts_of(self.architecture, self.parallel)[:: self.parallel.tensor_parallel_size]

    def save_hf(self, folder: Path, source_folder: str | Path) -> list[SenderReport]:
        """Writes a Hugging Face folder whose tokenizer and configuration are those of `source_folder`; all of it or nothing.

        Every stage writes its own files, so all nodes must see the folder. Raises as save_hf_folder.
        """
        files = plan_files(self.architecture, self._stages(), self._torch_dtype, self.head)
        reports: list[SenderReport] = []

        def write(partial: Path) -> None:
            gather(*self.call("begin_file_export", self.bucket_bytes, str(partial), files))
            gather(*self.call("send_all"))
            reports.extend(gather(*self.call("end_weight_export")))

        save_hf_folder(write, files, folder, source_folder)
        return reports


class PushReport(NamedTuple):
    """Of one push. Seconds of stages that work at the same time are those of the slowest rank, and add up to more than `seconds`.

    gather_s: waiting for other ranks' shards. convert_s: copying into Hugging Face's layout. transport_s: broadcasts, or writing
    files; 0 through shared memory. load_s: from telling the engines about a bucket until all have loaded it. verify_s: comparing
    checksums. nbytes: of all weights, once. extra_bytes: the most memory that a trainer rank took for it, as planned or as measured.
    """

    seconds: float
    gather_s: float
    convert_s: float
    transport_s: float
    load_s: float
    verify_s: float
    nbytes: int
    extra_bytes: int

    def metrics(self) -> dict[str, float]:
        """`resharding/<field>`, and `resharding/gb_per_s` of the push without its verification."""
        speed = self.nbytes / 1e9 / (self.seconds - self.verify_s)
        return {**{f"resharding/{name}": float(value) for name, value in self._asdict().items()}, "resharding/gb_per_s": speed}


class WeightSync:
    """Gives a model's weights to rollout replicas (workers/rollout_worker.py), one worker group of one process each.

    transport: not `auto`. verify: compare the checksum of every tensor, trainer and engine: never, when a replica gets its first
    weights, or always. scratch_dir: for the folder of the `disk` transport, seen by all nodes. config_dir: the Hugging Face folder
    of the model, whose configuration goes beside the weights.
    """

    def __init__(
        self, source: WeightSource, *, transport: Transport, verify: Verify, scratch_dir: str | Path, config_dir: str | Path
    ) -> None:
        if transport is Transport.auto:
            raise ValueError("transport auto is to be resolved from the placement before weights are sent")
        self._source = source
        self._transport, self._verify = transport, verify
        self._scratch_dir, self._config_dir = Path(scratch_dir), Path(config_dir)
        self._members: list[RoleGroup] = []  # of the weight groups
        self._member_processes: list[list[int]] = []  # an engine that slept may have come back as other processes
        self._verified: list[RoleGroup] = []

    def push(self, replicas: Sequence[RoleGroup], version: int) -> PushReport:
        """Every replica gets all weights, stamped `version`; it refuses to generate from the first bucket to the last.

        Raises WorkerError where a rank or an engine fails or dies, WeightMismatchError that names tensors whose checksums differ.
        It can be called again afterwards, with replicas in the place of those that died.
        """
        is_complete = False
        try:
            start_s = time.perf_counter()
            if self._transport is Transport.disk:
                reports, load_s = self._through_folder(replicas, version)
            else:
                reports, load_s = self._through_parcels(replicas, version)
            verify_s = self._check(replicas)
            is_complete = True
        finally:
            if not is_complete:
                self._give_up(replicas)
        return PushReport(
            seconds=time.perf_counter() - start_s,
            gather_s=max(report.gather_s for report in reports),
            convert_s=max(report.convert_s for report in reports),
            transport_s=max(report.transport_s for report in reports),
            load_s=load_s,
            verify_s=verify_s,
            nbytes=sum(report.nbytes for report in reports),
            extra_bytes=max(max(report.planned_extra_bytes, report.measured_extra_bytes) for report in reports),
        )

    def close(self) -> None:
        """Leaves the weight groups."""
        self._leave([*self._members])

    # ---- the ways

    def _through_parcels(self, replicas: Sequence[RoleGroup], version: int) -> tuple[list[SenderReport], float]:
        source, broadcast = self._source, self._transport is Transport.broadcast
        if broadcast:
            self._join(replicas)
        preparing = [replica.execute_rank_zero_async("begin_weight_update", source.manifest) for replica in replicas]
        opening = source.call("begin_weight_export", source.bucket_bytes, broadcast)
        gathering = source.call("next_parcel")
        gather(*preparing, *opening)
        load_s = 0.0
        parcels = gather(*gathering)
        for remaining in reversed(range(source.num_rounds())):
            start_s = time.perf_counter()
            filled = [parcel for parcel in parcels if parcel.chunks]
            loading = [replica.execute_rank_zero_async("load_weights", filled) for replica in replicas]
            gathering = source.call("next_parcel") if remaining else []
            gather(*loading)
            load_s += time.perf_counter() - start_s
            parcels = gather(*gathering)
        ending = [replica.execute_rank_zero_async("end_weight_update", version) for replica in replicas]
        closing = source.call("end_weight_export")
        gather(*ending, *closing)
        return gather(*closing), load_s

    def _through_folder(self, replicas: Sequence[RoleGroup], version: int) -> tuple[list[SenderReport], float]:
        self._scratch_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".weights-{version}-", dir=self._scratch_dir) as scratch:
            folder = Path(scratch) / "model"
            reports = self._source.save_hf(folder, self._config_dir)
            start_s = time.perf_counter()
            _on_all(replicas, "begin_weight_update", self._source.manifest)
            _on_all(replicas, "load_folder", str(folder))
            load_s = time.perf_counter() - start_s
            _on_all(replicas, "end_weight_update", version)
            return reports, load_s

    # ---- weight groups

    def _join(self, replicas: Sequence[RoleGroup]) -> None:
        """One group per pipeline stage, made in the order of the stages; new ones when the replicas are others than before."""
        processes = _on_all(replicas, "process_ids")
        if _same(self._members, replicas) and processes == self._member_processes:
            return
        self._leave([member for member in self._members if any(member is replica for replica in replicas)])
        num_ranks = _on_all(replicas, "num_ranks")
        for stage, head in enumerate(self._source.stage_heads):
            point = self._source.group.execute_rank_async(head, "reserve_weight_group").get()
            address = GroupAddress(f"stage-{stage}", point.host, point.port, 1 + sum(num_ranks), point.backend, _GROUP_LIMIT_S)
            joining = [self._source.group.execute_rank_async(head, "join_weight_group", address)]
            for index, replica in enumerate(replicas):
                joining.append(replica.execute_rank_zero_async("join_weight_group", address, 1 + sum(num_ranks[:index])))
            gather(*joining)
        self._members, self._member_processes = list(replicas), processes

    def _leave(self, members: Sequence[RoleGroup]) -> None:
        """At the same time: whoever waits in a broadcast is let go when the others leave."""
        if self._members:
            self._members = []
            leaving = [self._source.group.execute_rank_async(head, "leave_weight_group") for head in self._source.stage_heads]
            gather(*leaving, *(member.execute_rank_zero_async("leave_weight_groups") for member in members))

    def _give_up(self, replicas: Sequence[RoleGroup]) -> None:
        """Lets go of everything without waiting: a replica may be dead, or wait for one that is. Later calls queue behind."""
        self._members, self._verified = [], []
        self._source.call("abandon_weight_export")
        if self._transport is Transport.broadcast:
            for replica in replicas:
                replica.execute_rank_zero_async("leave_weight_groups")

    # ---- verification

    def _check(self, replicas: Sequence[RoleGroup]) -> float:
        """Seconds. Raises WeightMismatchError that names tensors."""
        start_s = time.perf_counter()
        to_check = [replica for replica in replicas if self._is_to_be_verified(replica)]
        if to_check:
            parts = self._source.call("weight_checksums")
            engines = [replica.execute_rank_zero_async("checksums") for replica in to_check]
            trainer = add_checksums(gather(*parts))
            for replica, engine in zip(to_check, gather(*engines), strict=True):
                compare_checksums(self._source.manifest, trainer, engine, f"the rollout replica with pid {replica.pids[0]}")
            self._verified = [*self._verified, *to_check] if self._verify is Verify.first else []
        return time.perf_counter() - start_s

    def _is_to_be_verified(self, replica: RoleGroup) -> bool:
        if self._verify is Verify.first:
            return not any(replica is verified for verified in self._verified)
        return self._verify is Verify.always


def _on_all(replicas: Sequence[RoleGroup], method: str, *arguments: object) -> list:
    """The results, in the order of the replicas; raises the first failure of any."""
    return gather(*(replica.execute_rank_zero_async(method, *arguments) for replica in replicas))


def _same(before: Sequence[RoleGroup], now: Sequence[RoleGroup]) -> bool:
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))
