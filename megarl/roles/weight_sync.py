"""The way of the weights: from the shards of a Megatron role, bucket by bucket, to engines or into a folder.

The driver never holds a weight. Trainers and engines that share a node's memory stream buckets among themselves, within one call;
else the driver passes parcels on, which say where the data lie. At most two buckets of a pipeline stage are under way: while one
is loaded the next is gathered.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.config.architecture import Architecture
from megarl.config.schema import DType, ParallelConfig, Transport, Verify
from megarl.controller.futures import RemoteFuture, WorkerFuture, gather, wait_for_any
from megarl.controller.group import RoleGroup
from megarl.controller.register import P, R, RemoteMethod
from megarl.weights.bucket import GroupAddress
from megarl.weights.export import FilePlan, plan_files, save_hf_folder, write_hf_folder
from megarl.weights.gather import BucketSizes, plan_buckets
from megarl.weights.manifest import manifest_of
from megarl.weights.name_mapping import Head
from megarl.weights.receipt import Manifest
from megarl.weights.sender import SenderReport
from megarl.weights.shard_layout import ShardLayout, layouts_of
from megarl.weights.verify import add_checksums, compare_checksums
from megarl.workers.rollout_worker import RolloutWorker
from megarl.workers.weight_export import WeightExport

PUSHED_FOLDERS = ".weights-*"  # the transport `disk` has one while it works
_LOOK_S = 10.0  # without a sign of any rank
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

    @cached_property
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

    @cached_property
    def is_on_cpu(self) -> bool:
        return self.group.call_rank(self.exporters[0], WeightExport.weights_are_on_cpu).get()

    def call(self, method: RemoteMethod[P, R, ..., Any], *args: P.args, **kwargs: P.kwargs) -> list[WorkerFuture[R]]:
        """On all exporters."""
        return [self.group.call_rank(rank, method, *args, **kwargs) for rank in self.exporters]

    def num_rounds(self) -> int:
        """After so many parcels of every stage all weights were sent."""
        sizes = BucketSizes.of(self.bucket_bytes, self._torch_dtype)
        return max(len(plan_buckets(self.architecture, stage, sizes, self.head)) for stage in self._stages())

    def _stages(self) -> Sequence[ShardLayout]:
        return layouts_of(self.architecture, self.parallel)[:: self.parallel.tensor_parallel_size]

    def save_hf(self, folder: Path, source_folder: str | Path) -> list[SenderReport]:
        """Writes a Hugging Face folder whose tokenizer and configuration are those of `source_folder`; all of it or nothing, and onto
        the disk.

        Every stage writes its own files, so all nodes must see the folder. Raises as save_hf_folder.
        """
        return self._write(partial(save_hf_folder, folder=folder, source_folder=source_folder), durable=True)

    def write_hf(self, folder: Path, source_folder: str | Path) -> list[SenderReport]:
        """As `save_hf`, into a folder that is read soon and by nobody else: it is there when this returns, a power cut may take it."""
        folder.mkdir()
        return self._write(partial(write_hf_folder, folder=folder, source_folder=Path(source_folder)), durable=False)

    def _write(self, make_folder: Callable[[Callable[[Path], None], Sequence[FilePlan]], None], durable: bool) -> list[SenderReport]:
        files = plan_files(self.architecture, self._stages(), self._torch_dtype, self.head)
        reports: list[SenderReport] = []

        def write(folder: Path) -> None:
            gather(*self.call(WeightExport.begin_file_export, self.bucket_bytes, str(folder), files, durable))
            gather(*self.call(WeightExport.send_all))
            reports.extend(gather(*self.call(WeightExport.end_weight_export)))

        make_folder(write, files)
        return reports


class PushReport(NamedTuple):
    """Of one push. Seconds of stages that work at the same time are those of the slowest rank, and add up to more than `seconds`.

    gather_s: waiting for other ranks' shards. convert_s: copying into Hugging Face's layout. transport_s: broadcasts, which overlap;
    writing files; through shared memory on the CPU, waiting for the engines to read. load_s: from telling the engines about the first
    bucket (or the stream, or the folder) until all are loaded. verify_s: comparing checksums. nbytes: of all weights, once.
    extra_bytes: the most memory that a trainer rank took for it, as planned or as measured.
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
        self._members: list[RoleGroup] = []  # of the weight groups or streams
        self._stream_names: list[str] = []
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
            elif self._transport is Transport.colocated and self._source.is_on_cpu:
                reports, load_s = self._through_streams(replicas, version)
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
        """Leaves the weight groups and streams, and gives their memory back. The next push makes new ones."""
        self._leave([*self._members])

    # ---- the ways

    def _through_parcels(self, replicas: Sequence[RoleGroup], version: int) -> tuple[list[SenderReport], float]:
        source, broadcast = self._source, self._transport is Transport.broadcast
        if broadcast:
            self._join(replicas, self._make_groups)
        preparing = _ask_all(replicas, RolloutWorker.begin_weight_update, source.manifest)
        opening = source.call(WeightExport.begin_weight_export, source.bucket_bytes, broadcast)
        gathering = source.call(WeightExport.next_parcel)
        gather(*preparing, *opening)
        loading: list[WorkerFuture] = []
        parcels = gather(*gathering)
        start_s = time.perf_counter()
        for remaining in reversed(range(source.num_rounds())):
            former, loading = loading, _ask_all(replicas, RolloutWorker.load_weights, [parcel for parcel in parcels if parcel.chunks])
            gather(*former)  # the next parcels go where these were
            parcels = gather(*(source.call(WeightExport.next_parcel) if remaining else []))
        gather(*loading)
        load_s = time.perf_counter() - start_s
        ending, closing = _ask_all(replicas, RolloutWorker.end_weight_update, version), source.call(WeightExport.end_weight_export)
        gather(*ending, *closing)
        return gather(*closing), load_s

    def _through_streams(self, replicas: Sequence[RoleGroup], version: int) -> tuple[list[SenderReport], float]:
        """Trainers write and engines read at the same time, and agree among themselves on who may go on.

        Not on CUDA: there every rank sees its own GPU only, so that shards are gathered before engines can read them.
        """
        source = self._source
        self._join(replicas, self._make_streams)
        start_s = time.perf_counter()
        beginning = _ask_all(replicas, RolloutWorker.begin_weight_update, source.manifest)
        writers = [partial(source.group.call_rank, rank, WeightExport.send_weight_stream) for rank in source.exporters]
        readers = [partial(replica.call_rank, 0, RolloutWorker.load_streams, version, self._stream_names) for replica in replicas]
        try:
            results = _until_given([*writers, *readers])
        finally:
            gather(*beginning)  # where it failed, that is why the loading did
        return results[: len(writers)], time.perf_counter() - start_s

    def _through_folder(self, replicas: Sequence[RoleGroup], version: int) -> tuple[list[SenderReport], float]:
        self._scratch_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".weights-{version}-", dir=self._scratch_dir) as scratch:
            folder = Path(scratch) / "model"
            reports = self._source.write_hf(folder, self._config_dir)
            start_s = time.perf_counter()
            _on_all(replicas, RolloutWorker.begin_weight_update, self._source.manifest)
            _on_all(replicas, RolloutWorker.load_folder, str(folder))
            load_s = time.perf_counter() - start_s
            _on_all(replicas, RolloutWorker.end_weight_update, version)
            return reports, load_s

    # ---- weight groups and streams

    def _join(self, replicas: Sequence[RoleGroup], make: Callable[[Sequence[RoleGroup], list[int]], None]) -> None:
        """One group or stream per pipeline stage; new ones when the replicas are others than before."""
        if _same(self._members, replicas):
            return
        self._leave([member for member in self._members if any(member is replica for replica in replicas)])
        make(replicas, _on_all(replicas, RolloutWorker.num_ranks))
        self._members = list(replicas)

    def _make_streams(self, replicas: Sequence[RoleGroup], num_ranks: list[int]) -> None:
        source = self._source
        opening = [
            source.group.call_rank(head, WeightExport.open_weight_stream, source.bucket_bytes, sum(num_ranks))
            for head in source.stage_heads
        ]
        streams = gather(*opening)
        joining = source.call(WeightExport.join_weight_stream, source.bucket_bytes, streams)
        for index, replica in enumerate(replicas):
            joining.append(replica.call_rank(0, RolloutWorker.join_weight_streams, streams, sum(num_ranks[:index])))
        gather(*joining)
        self._stream_names = [stream.address.name for stream in streams]

    def _make_groups(self, replicas: Sequence[RoleGroup], num_ranks: list[int]) -> None:
        """In the order of the stages."""
        for stage, head in enumerate(self._source.stage_heads):
            point = self._source.group.call_rank(head, WeightExport.reserve_weight_group).get()
            address = GroupAddress(f"stage-{stage}", point.host, point.port, 1 + sum(num_ranks), point.backend, _GROUP_LIMIT_S)
            joining = [self._source.group.call_rank(head, WeightExport.join_weight_group, address)]
            for index, replica in enumerate(replicas):
                joining.append(replica.call_rank(0, RolloutWorker.join_weight_group, address, 1 + sum(num_ranks[:index])))
            gather(*joining)

    def _leave(self, members: Sequence[RoleGroup]) -> None:
        """At the same time: whoever waits in a broadcast is let go when the others leave."""
        if self._members:
            self._members = []
            leaving = [*self._source.call(WeightExport.leave_weight_group), *self._source.call(WeightExport.leave_weight_stream)]
            gather(*leaving, *(member.call_rank(0, RolloutWorker.leave_weight_groups) for member in members))

    def _give_up(self, replicas: Sequence[RoleGroup]) -> None:
        """Lets go of everything without waiting: a replica may be dead, or wait for one that is. Later calls queue behind."""
        self._members, self._verified = [], []
        if not self._source.group.has_ended:
            self._source.call(WeightExport.abandon_weight_export)
        if self._transport is not Transport.disk:
            for replica in (replica for replica in replicas if not replica.has_ended):
                replica.call_rank(0, RolloutWorker.leave_weight_groups)

    # ---- verification

    def _check(self, replicas: Sequence[RoleGroup]) -> float:
        """Seconds. Raises WeightMismatchError that names tensors."""
        start_s = time.perf_counter()
        to_check = [replica for replica in replicas if self._is_to_be_verified(replica)]
        if to_check:
            parts = self._source.call(WeightExport.weight_checksums)
            engines = [replica.call_rank(0, RolloutWorker.checksums) for replica in to_check]
            trainer = add_checksums(gather(*parts))
            for replica, engine in zip(to_check, gather(*engines), strict=True):
                compare_checksums(self._source.manifest, trainer, engine, f"the rollout replica with pid {replica.pids[0]}")
            self._verified = [*self._verified, *to_check] if self._verify is Verify.first else []
        return time.perf_counter() - start_s

    def _is_to_be_verified(self, replica: RoleGroup) -> bool:
        if self._verify is Verify.first:
            return not any(replica is verified for verified in self._verified)
        return self._verify is Verify.always


def _ask_all(
    replicas: Sequence[RoleGroup], method: RemoteMethod[P, R, ..., Any], *args: P.args, **kwargs: P.kwargs
) -> list[WorkerFuture[R]]:
    return [replica.call_rank(0, method, *args, **kwargs) for replica in replicas]


def _on_all(replicas: Sequence[RoleGroup], method: RemoteMethod[P, R, ..., Any], *args: P.args, **kwargs: P.kwargs) -> list[R]:
    """The results, in the order of the replicas; raises the first failure of any."""
    return gather(*_ask_all(replicas, method, *args, **kwargs))


def _until_given(calls: Sequence[Callable[[], WorkerFuture]]) -> list:
    """What each call gives in the end; one that gives None or False is made again. Raises the first failure of any."""
    results: list = [None] * len(calls)
    pending: dict[RemoteFuture, int] = {call(): number for number, call in enumerate(calls)}
    while pending:
        ended = wait_for_any(list(pending), _LOOK_S)
        if not ended:  # a long pass; or one of them hangs, as each gives the word back when nothing happens: that is found in time
            gather(*pending)
        for future in ended:
            number = pending.pop(future)
            results[number] = future.get()
            if not results[number]:
                pending[calls[number]()] = number
    return results


def _same(before: Sequence[RoleGroup], now: Sequence[RoleGroup]) -> bool:
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))
