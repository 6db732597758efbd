"""Workers of Megatron models: scoring policy, trained policy, and critic.

The base class sets up what each such role needs in its process: process group, parallel groups, engine, and
its position in the mesh.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch.distributed as dist

from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import first_with_prompt, image_places
from megarl.config.schema import OnNonFinite, ParallelConfig
from megarl.controller.dispatch import Dispatch, Mesh
from megarl.controller.worker import register
from megarl.data.images import ImageProcessor, grids_of_micro_batches, with_patches
from megarl.engine import platform
from megarl.engine.offload import StatePart
from megarl.engine.rendezvous import open_store
from megarl.engine.spec import ModelSpec
from megarl.models.counts import tower_flops, training_flops
from megarl.weights.shards import Shards, merged_shards
from megarl.weights.sync.worker import WeightExport

if TYPE_CHECKING:  # these modules import Megatron, which needs the platform to be active
    from torch import Tensor

    from megarl.checkpoints.snapshot_file import WantedTensor
    from megarl.engine.checkpoint import PendingSave
    from megarl.engine.engine import MegatronEngine
    from megarl.engine.groups import ParallelGroups
    from megarl.engine.snapshot import PendingSnapshot, Staging
    from megarl.engine.top_tokens import TopK
    from megarl.engine.vocab_parallel import Extra

MICRO_BATCHES = "micro_batches"  # meta_info: row numbers of each micro-batch, planned by the driver


class Loss(Protocol):
    """Loss that an update minimizes.

    The driver creates it and sends it with the rows, so it must be small and picklable.

    Calling it with a micro-batch's outputs and rows returns the micro-batch's contribution to the loss and
    the metrics (see engine/engine.py).

    Attributes:
        name: Prefix of the metric names, before the `/`.
        extras: Outputs that it reads in addition to log-probs or values.
    """

    name: ClassVar[str]

    @property
    def extras(self) -> Collection[Extra]: ...

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Metric]]: ...


def _on_host(scores: Mapping[str, RaggedTensor]) -> DataProto:
    return DataProto.from_dict({key: column.to("cpu") for key, column in scores.items()})


def megatron_mesh(parallel: ParallelConfig) -> Mesh:
    """Return the mesh of Megatron's ranks."""
    return tuple(map(parallel.coordinate, range(parallel.world_size)))


def speed_metrics(
    spec: ModelSpec,
    part: DataProto,
    seconds: float,
    name: str,
    peak_tflops: float | None,
    grids: Sequence[tuple[int, int, int]] = (),
) -> dict[str, Metric]:
    """Return the speed metrics of an update that took `seconds` on one replica.

    `perf/tflops/<name>` is the work of its rows (training_flops) per second and device. `perf/mfu/<name>` is
    the share of the device's peak, if that is known or configured. `perf/tokens_per_s/<name>` is the number
    of tokens per second and device. `perf/computed_tokens_per_s/<name>` and both work metrics exclude prompts
    that rows of a micro-batch shared with another row. Rows without a token that the loss reads do not count:
    they pad a micro-batch, or a correction has excluded them. `grids` are the sizes of the images that a
    vision tower read, which counts as trained unless it is frozen.
    """
    # Count only rows that the loss reads: padding and rejected rows are not useful work.
    prompts = part.ragged["prompts"].lengths.tolist()
    responses = part.ragged["responses"].lengths.tolist()
    is_counted = [bool(scored.any()) for scored in part.ragged["response_mask"].each()]
    rows = [
        (prompt, response)
        for prompt, response, counts in zip(prompts, responses, is_counted, strict=True)
        if counts
    ]

    # A shared prompt is computed once per micro-batch, so its repetitions cost nothing.
    shared = [(prompts[row], 0) for row in _rows_with_a_shared_prompt(spec, part, is_counted)]
    flop = training_flops(spec.architecture, rows, with_value_head=spec.head == "value") - training_flops(
        spec.architecture, shared
    )
    if grids:
        flop += tower_flops(spec.architecture, grids, trains=not spec.freeze_vision)
    tflop = flop / 1e12
    num_tokens = sum(map(sum, rows))
    device_s = seconds * spec.parallel.replica_size
    metrics = {
        f"perf/tflops/{name}": Metric.ratio(tflop, device_s),
        f"perf/tokens_per_s/{name}": Metric.ratio(num_tokens, device_s),
        f"perf/computed_tokens_per_s/{name}": Metric.ratio(num_tokens - sum(map(sum, shared)), device_s),
    }
    if peak := spec.device_peak_tflops or peak_tflops:
        metrics[f"perf/mfu/{name}"] = Metric.ratio(tflop, device_s * peak)

    return metrics


def _rows_with_a_shared_prompt(spec: ModelSpec, part: DataProto, is_counted: Sequence[bool]) -> list[int]:
    """Return the counted rows whose prompt another counted row of the same micro-batch already contains."""
    if not (spec.engine.share_prompts and spec.engine.packing):
        return []
    prompts = list(part.ragged["prompts"].each())
    images = image_places(part.ragged)
    found = []

    for micro_batch in part.meta_info[MICRO_BATCHES]:
        rows = [row for row in micro_batch if is_counted[row]]
        of_rows = None if images is None else [images[row] for row in rows]
        firsts = first_with_prompt((prompts[row] for row in rows), of_rows)
        found += [row for place, row in enumerate(rows) if firsts[place] != place]

    return found


shared_groups: ParallelGroups | None = None  # shared by the roles that are fused in this process


def _process_groups(spec: ModelSpec) -> ParallelGroups:
    global shared_groups
    from megarl.engine import groups

    if shared_groups is None:
        # The first role in this process creates the groups; fused roles use the same ones.
        active = platform.current()
        limit = timedelta(seconds=spec.collective_limit_s)
        rank = int(os.environ["RANK"])
        num_ranks = int(os.environ["WORLD_SIZE"])
        store = open_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, num_ranks, limit)
        # No `device_id`: with it, NCCL would eagerly create a communicator for each of Megatron's groups, by
        # splits in which all ranks take part. There are hundreds of groups at scale, and most are never used.
        dist.init_process_group(
            active.distributed_backend, store=store, rank=rank, world_size=num_ranks, timeout=limit
        )
        shared_groups = groups.initialize(spec.parallel, spec.seed, spec.collective_limit_s)

    # Megatron keeps one set of parallel groups per process.
    if shared_groups.parallel != spec.parallel:
        raise ValueError(
            f"roles fused in one process share a layout, but one has {shared_groups.parallel} and another "
            f"{spec.parallel}: give them the same parallel sizes, or pools of their own"
        )

    return shared_groups


# The engines of the roles that are fused in this process, by the classes of their workers.
models_of_process: dict[type[MegatronWorker], MegatronEngine] = {}


class MegatronWorker(WeightExport):
    """One rank of a role. The constructor builds the engine and loads the weights."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()

        # The platform must be active before anything imports Megatron.
        if platform.activate(spec.device).is_cuda:
            platform.activate_flash_attention(spec.engine.flash_attention)
        self._groups = _process_groups(spec)
        self._spec = spec
        self._engine = self._make_engine()
        models_of_process[type(self)] = self._engine

        # Free memory at once: the next group on these devices waits for this constructor.
        self._engine.offload(*spec.offloaded_at_first)
        self._pending_save: PendingSave | None = None
        self._pending_snapshot: PendingSnapshot | None = None
        self._staging: Staging | None = None
        self._num_updates = 0

        self._images = ImageProcessor.of_model(spec.path, spec.architecture)

    def _make_engine(self) -> MegatronEngine:
        from megarl.engine.engine import MegatronEngine

        return MegatronEngine(self._spec, self._groups)

    @classmethod
    def mesh(cls, world_size: int, spec: ModelSpec, *args: Any, **kwargs: Any) -> Mesh:
        return megatron_mesh(spec.parallel)

    def _rows(self, part: DataProto) -> Mapping[str, RaggedTensor]:
        """Return the columns that the engine reads, with image files decoded to patches."""
        return part.ragged if self._images is None else with_patches(part.ragged, self._images)

    def _forward(self, part: DataProto, extras: Collection[Extra] = (), top: TopK | None = None) -> DataProto:
        """Return the scores of this replica's rows, named as in the engine.

        The result is empty on ranks without the last pipeline stage.
        """
        from megarl.engine.phase_ranges import named_range

        rows = self._rows(part)
        with named_range(f"{self.role}: score"):
            return _on_host(self._engine.forward(rows, part.meta_info[MICRO_BATCHES], extras, top) or {})

    def _train(
        self, part: DataProto, loss: Loss, *, with_scores: bool = False
    ) -> tuple[dict[str, Metric], DataProto]:
        """Make one optimizer step.

        Args:
            part: This replica's rows.
            with_scores: Also return the model's outputs for the rows before the step; otherwise the scores
                are empty.

        Returns:
            The metrics and the scores. The metrics are the loss's over this replica's rows,
            `<loss.name>/grad_norm`, `<loss.name>/lr`, router statistics as `<loss.name>/moe/...`, and the
            update's speed (speed_metrics).
        """
        from megarl.engine.phase_ranges import named_range

        begin_s = time.monotonic()
        self.await_snapshot()
        rows = self._rows(part)
        trace = self._engine.trace
        if trace is not None:
            trace.begin_update(rows)
        arguments = (rows, part.meta_info[MICRO_BATCHES], loss, loss.extras)
        scores: Mapping[str, RaggedTensor] = {}
        with named_range(f"{self.role}: forward and backward"):
            if with_scores:
                of_loss, scores = self._engine.forward_backward_scored(*arguments)
            else:
                of_loss = self._engine.forward_backward(*arguments)
        if trace is not None:
            trace.end_update()
        self._check_replicas()
        with named_range(f"{self.role}: optimizer step"):
            step = self._engine.step()  # reads the gradient norm, which synchronizes with the device
        speed = speed_metrics(
            self._spec,
            part,
            time.monotonic() - begin_s,
            loss.name,
            platform.current().peak_tflops(self._spec.dtype),
            grids_of_micro_batches(rows, part.meta_info[MICRO_BATCHES]),
        )
        self._measure_speed()
        routers = {f"{loss.name}/moe/{name}": metric for name, metric in self._engine.router_metrics.items()}
        # The metrics of a mini-batch whose update was dropped would make those of the step NaN.
        of_update = (
            {} if step.is_skipped else {**of_loss, f"{loss.name}/grad_norm": Metric.same(step.grad_norm)}
        )
        if self._spec.optim is not None and self._spec.optim.on_nonfinite is OnNonFinite.skip:
            of_update[f"{loss.name}/skipped_updates"] = Metric.same(float(step.is_skipped))
        metrics = {
            **of_update,
            f"{loss.name}/lr": Metric.same(step.lr),
            **routers,
            **speed,
        }
        return metrics, _on_host(scores)

    def _measure_speed(self) -> None:
        """Time the same work as all other ranks, as a phase of the call; see trainers/step_observers.py."""
        if not self._spec.measures_speed:
            return
        self._probe.settle()
        with self.phase("measure_speed"):
            self._probe.run()

    @cached_property
    def _probe(self) -> platform.SpeedProbe:
        probe = platform.SpeedProbe()
        probe.run()  # the first products load libraries
        return probe

    def _check_replicas(self) -> None:
        """Compare weights with their copies, if that is due.

        Before the optimizer step, because the step makes the copies of replicas equal.
        """
        self._num_updates += 1
        every = self._spec.check_replicas_every
        if every and self._num_updates % every == 0:
            from megarl.engine.weight_checks import check_replicas

            check_replicas(self._engine, f"rank {self.rank} (node {self.node})")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def offload_state(self, parts: tuple[StatePart, ...]) -> int:
        """Offload parts of the model's state; see MegatronEngine.offload.

        The weight-sync buffers are released as well.
        """
        # The buffers of the last weight sync occupy device memory that the next phase needs.
        self.release_weight_buffers()
        # A snapshot continues from what is offloaded, next to generation.
        pending = self._pending_snapshot
        with nullcontext() if pending is None else pending.stands_still():
            return self._engine.offload(*parts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def restore_state(self, parts: tuple[StatePart, ...]) -> int:
        """Load offloaded parts back to the device."""
        self.await_snapshot()
        return self._engine.restore(*parts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def begin_save(self, folder: str) -> None:
        """Copy the model's current state, and write it in the background; see engine/checkpoint.py."""
        from megarl.engine.checkpoint import begin_save

        # A save with adapters restores a base that is offloaded, from which a snapshot may still be copied.
        self.await_snapshot()
        assert self._pending_save is None, "the previous save has not been finished"
        self._pending_save = begin_save(self._engine, Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_is_written(self) -> bool:
        """Return whether this rank's files are written, or writing them has failed."""
        assert self._pending_save is not None, "no save has begun"
        return self._pending_save.is_written()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def finish_save(self) -> dict[str, str]:
        """Complete the folder except for its manifest.

        Returns the checksums of the files that this rank wrote.
        """
        assert self._pending_save is not None, "no save has begun"

        # Cleared first, so that a failed save does not block the next one.
        pending = self._pending_save
        self._pending_save = None
        return pending.finish()

    def _drop_save(self) -> None:
        if self._pending_save is not None:
            self._pending_save.cancel()
        self._pending_save = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: str) -> None:
        """Load the model's state from a folder with a manifest. Its layout may differ.

        A save in progress is dropped, as the driver has done (Checkpointer.drop_save).
        """
        from megarl.engine.checkpoint import load

        self._drop_save()
        self.await_snapshot()
        load(self._engine, Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def begin_snapshot(self, path: str, step: int) -> None:
        """Start to copy the model's current state to a file in memory; see engine/snapshot.py.

        Calls that change or restore the state wait for the copy.
        """
        from megarl.engine.snapshot import PendingSnapshot, Staging

        self.await_snapshot()
        if self._staging is None and platform.current().is_cuda:
            self._staging = Staging()
        self._pending_snapshot = PendingSnapshot(path, step, self._engine, self._staging)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def await_snapshot(self) -> None:
        """Wait until the last snapshot is complete. Raises CheckpointError if it failed."""
        # Cleared first, so that a failed snapshot is reported once.
        pending = self._pending_snapshot
        self._pending_snapshot = None
        if pending is not None:
            pending.wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_snapshot(self, path: str) -> None:
        """Load the model's state from a snapshot of this rank.

        A save in progress is dropped, as the driver has done (Checkpointer.drop_save).
        """
        from megarl.engine.snapshot import load_snapshot

        self._drop_save()
        self.await_snapshot()
        load_snapshot(self._engine, path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def wanted_tensors(self) -> list[WantedTensor]:
        """Return which slices of the model's tensors this rank needs; see `load_resharded`."""
        from megarl.engine.snapshot import wanted_tensors

        return wanted_tensors(self._engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_resharded(self, sources: Mapping[str, Sequence[int]]) -> None:
        """Load the model's state from snapshots of another layout; see engine/snapshot.py."""
        from megarl.engine.snapshot import load_resharded

        load_resharded(self._engine, sources)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def begin_trace(self, folder: str, share_of_rows: float) -> None:
        """Record the following updates in a folder until `end_trace`; see engine/step_trace.py."""
        from megarl.engine.step_trace import StepTrace

        # The engine refers to its trace until the trace is closed.
        StepTrace(self._engine, Path(folder), share_of_rows)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def end_trace(self) -> None:
        """Write the weights after the last recorded update."""
        assert self._engine.trace is not None, "no trace has begun"
        self._engine.trace.close()

    @register(blocking=False)
    def begin_profile(self) -> None:
        """Start to profile this process; see engine/phase_ranges.py."""
        from megarl.engine.phase_ranges import begin_profile

        begin_profile(self.role)

    @register(blocking=False)
    def end_profile(self, folder: str) -> str | None:
        """Write the trace of this process to a folder, and return the name of the file, if this wrote it."""
        from megarl.engine.phase_ranges import end_profile

        return end_profile(self.role, self.rank, Path(folder))

    def _shards(self) -> Shards:
        spec = self._spec
        return merged_shards(self._engine.parameters(), spec.architecture, self._engine.layout, spec.head)

    def _pushed_shards(self) -> Shards:
        spec = self._spec
        return merged_shards(
            self._engine.parameters(),
            spec.architecture,
            self._engine.layout,
            spec.head,
            keeps_adapters=spec.pushes_adapters,
        )

    @property
    def _quantizes(self) -> bool:
        return self._spec.pushes_fp8


class PolicyWorker(MegatronWorker):
    """Language model that scores samples. This is everything a reference model needs."""

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def log_probs(self, part: DataProto, extras: Collection[Extra], top: TopK | None = None) -> DataProto:
        """Return `log_probs` and the requested extras (`entropy`, `sum_pi_squared`) as rows of tokens.

        With `top`, `top_ids` and `top_log_probs` have k and k + 1 values for each token; see
        MegatronEngine.forward. Reads `prompts`, `responses`, `response_mask`.
        """
        return self._forward(part, extras, top)


class ActorWorker(PolicyWorker):
    """Trained policy."""

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def update(self, part: DataProto, loss: Loss) -> dict[str, Metric]:
        """Make one optimizer step on this replica's part of a mini-batch; see `_train`."""
        return self._train(part, loss)[0]

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def update_scored(self, part: DataProto, loss: Loss) -> tuple[dict[str, Metric], DataProto]:
        """Make one optimizer step like `update`, and return its metrics and the scores of its forward pass.

        These are `log_probs` and the extras of the loss, with the weights before the step.
        """
        return self._train(part, loss, with_scores=True)


class BaseWorker(PolicyWorker):
    """The actor's model without its adapters, in the actor's process, without a copy of the weights."""

    def _make_engine(self) -> MegatronEngine:
        return models_of_process[ActorWorker]

    def _forward(self, part: DataProto, extras: Collection[Extra] = (), top: TopK | None = None) -> DataProto:
        assert top is None, "no teacher is the actor's model"
        scores = self._engine.forward(part.ragged, part.meta_info[MICRO_BATCHES], extras, base=True)
        return _on_host(scores or {})


class CriticWorker(MegatronWorker):
    """Trained value model."""

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def values(self, part: DataProto) -> DataProto:
        """Return `values` as rows of tokens: V(s_t) before response token t is written."""
        return self._forward(part)

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def update(self, part: DataProto, loss: Loss) -> dict[str, Metric]:
        """Make one optimizer step on this replica's part of a mini-batch; see `_train`."""
        return self._train(part, loss)[0]
