"""A trained model on the ranks of a worker group, whose weights can be sent or saved."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megarl.config.schema import DType, ParallelConfig
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import RemoteFuture, WorkerFuture, gather, wait_for_any
from megarl.controller.group import RoleGroup
from megarl.controller.messages import FailureKind
from megarl.models.architecture import Architecture
from megarl.models.fp8 import quantized_tensors
from megarl.models.tensor_table import Head
from megarl.weights.block_scaling import QuantizedShards
from megarl.weights.export_plan import ExportPlan, plan_export
from megarl.weights.hf_folder import complete_hf_folder, save_hf_folder
from megarl.weights.kept_tensors import MTP_LAYERS, KeptTensors, kept_parts, read_kept_tensors
from megarl.weights.manifest import manifest_of
from megarl.weights.message_words import WordCounts, once_each, sent_tensors, with_all_scales
from megarl.weights.plan import TensorSlices
from megarl.weights.shard_layout import ShardLayout, layouts_of
from megarl.weights.shards import slices_by_rank
from megarl.weights.sync.worker import WeightExport
from megarl.weights.tensors import Manifest, TensorMeta, WeightTransferError
from megarl.weights.transfer import SendReport
from megarl.weights.transports.folder import folder_message_bytes

_log = logging.getLogger(__name__)
LIMITS_S = 1.0  # interval for checking the time limits of calls


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """A trained model whose weights can be sent.

    Attributes:
        bucket_bytes: The bytes that a rank sends or receives at a time.
        value_class: The class of a saved value head, see copy_companions.
        quantizes: Whether engines get block-scaled FP8.
        nodes: The node of each rank; empty if all are on one node.
    """

    group: RoleGroup
    architecture: Architecture
    parallel: ParallelConfig
    dtype: DType
    bucket_bytes: int
    head: Head = "lm"
    value_class: str | None = None
    quantizes: bool = False
    nodes: Sequence[str] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype.value)

    @property
    def message_dtype(self) -> torch.dtype:
        return QuantizedShards.dtype if self.quantizes else self.torch_dtype

    @cached_property
    def manifest(self) -> Manifest:
        """The tensors that engines get."""
        manifest = manifest_of(self.architecture, self.torch_dtype, self.head)
        if not self.quantizes:
            return manifest

        # The scales are float32, and not in the manifest of the model.
        scale = TensorMeta((), torch.float32)
        shapes, _ = self._sent

        return {
            name: TensorMeta(
                shape, torch.float8_e4m3fn if name in self._quantized else manifest.get(name, scale).dtype
            )
            for name, shape in shapes.items()
        }

    @property
    def _quantized(self) -> Mapping[str, tuple[int, ...]]:
        return quantized_tensors(self.architecture) if self.quantizes else {}

    @property
    def words(self) -> WordCounts:
        """Tensors whose elements are several words of a message."""
        _, words = self._sent
        return words

    @cached_property
    def _sent(self) -> tuple[Mapping[str, tuple[int, ...]], WordCounts]:
        return sent_tensors(self.architecture, self.torch_dtype.itemsize, self.head, quantizes=self.quantizes)

    def checksums(self) -> list[WorkerFuture[dict[str, int]]]:
        """Return checksum parts that add up to those of all tensors.

        Experts' parts are those of their first copy, which may be spread over several replicas.
        """
        # ranks with a stage's experts
        num_holders = self.parallel.expert_parallel_size * self.parallel.expert_tensor_parallel_size
        calls = []

        # Each tensor must be counted once, so replicas of the same weights are left out.
        for rank, place in enumerate(self.group.mesh):
            dense = place.dp == place.cp == 0
            experts = rank % self.parallel.stage_size < num_holders
            if dense or experts:
                calls.append(self.group.call_rank(rank, WeightExport.weight_checksums, dense, experts))

        return calls

    @cached_property
    def _layouts(self) -> Sequence[ShardLayout]:
        """Layout of each rank, including copies."""
        return layouts_of(self.architecture, self.parallel)

    @cached_property
    def slices(self) -> Sequence[TensorSlices]:
        """Slices of each rank that engines can get from it, including copies."""
        held = slices_by_rank(self.architecture, self._layouts, self.head)
        return once_each(held, lambda slices: with_all_scales(slices, self._quantized))

    @cached_property
    def is_on_cuda(self) -> bool:
        return self.group.call_rank(0, WeightExport.weights_are_on_cuda).get()

    def save_hf(self, folder: Path, source_folder: str | Path) -> None:
        """Write a Hugging Face folder atomically and durably.

        Its tokenizer and configuration are those of `source_folder`, from which tensors that
        are not trained are copied; if they cannot be, a warning is logged.

        Several ranks write, so all nodes must see the folder. Raises the errors of save_hf_folder.
        """
        save_hf_folder(
            lambda unfinished: self._write_files(unfinished, durable=True),
            self._export_plan.files,
            folder,
            source_folder,
            self.head,
            self.value_class,
            self._read_kept_tensors(folder, Path(source_folder)),
        )

    def _read_kept_tensors(self, folder: Path, source_folder: Path) -> KeptTensors | None:
        try:
            kept = read_kept_tensors(source_folder, self.architecture, self.head, self.torch_dtype)
        except WeightTransferError as error:
            _log.warning("%s is written without %s: %s", folder, kept_parts(self.architecture), error)
            return None

        if kept is not None and kept.missing is not None:
            _log.warning("%s is written without %s: %s", folder, MTP_LAYERS, kept.missing)
        return kept

    def write_hf(self, folder: Path, source_folder: str | Path) -> list[SendReport]:
        """Write a Hugging Face folder like `save_hf`, without durability.

        The folder is complete on return, but may not survive a power failure. It is meant for a single reader
        that reads it soon.
        """
        folder.mkdir()
        reports = self._write_files(folder, durable=False)
        complete_hf_folder(self._export_plan.files, folder, Path(source_folder), self.head, self.value_class)
        return reports

    def _write_files(self, folder: Path, durable: bool) -> list[SendReport]:
        """Let the ranks write the weights."""
        plan = self._export_plan
        pending: dict[RemoteFuture[SendReport | None], int] = {
            self.group.call_rank(
                rank, WeightExport.write_weight_files, plan.of_rank(rank), str(folder), durable
            ): rank
            for rank in range(self.group.world_size)
        }
        return _all_written(self.group, pending)

    @cached_property
    def _export_plan(self) -> ExportPlan:
        return plan_export(
            self.architecture,
            self._layouts,
            self.nodes or [""] * self.group.world_size,
            self.torch_dtype,
            self.head,
            message_bytes=folder_message_bytes(self.bucket_bytes, self.is_on_cuda),
        )


def _all_written(group: RoleGroup, pending: dict[RemoteFuture[SendReport | None], int]) -> list[SendReport]:
    """Return the reports of all ranks.

    A rank that returns without a report is called again. If one cannot write, the others are still called
    until they finish, so that nothing sent to it remains in transit; then the likeliest cause is raised. The
    failure of a rank that died is raised at once.
    """
    reports: list[SendReport] = []
    failures: list[WorkerError] = []
    next_look_s = time.monotonic() + LIMITS_S

    while pending:
        ended = wait_for_any(list(pending), LIMITS_S)
        # A rank that hangs ends no call, while those that wait for it return and are called again. So limits
        # are checked even if calls end all the time.
        if time.monotonic() >= next_look_s:
            next_look_s = time.monotonic() + LIMITS_S
            check_limits(pending)
        for future in ended:
            rank = pending.pop(future)
            try:
                report = future.get()
            except WorkerError as error:
                if error.kind is FailureKind.death:
                    raise
                failures.append(error)
                continue
            # The rank only paused because the others were silent; call it again to continue.
            if report is None:
                pending[group.call_rank(rank, WeightExport.continue_weights, ())] = rank
            else:
                reports.append(report)

    if failures:
        raise min(failures, key=lambda failure: failure.kind)
    return reports


def check_limits(futures: Collection[RemoteFuture[Any]]) -> None:
    """Raise PhaseTimeoutError if a call has exceeded its limit, or its process does not answer."""
    try:
        gather(*futures, timeout=0.0)
    except PhaseTimeoutError:
        raise
    except (TimeoutError, WorkerError):
        pass  # the calls are still running, or their own futures raise the error
