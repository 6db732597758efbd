"""Writes a model as a Hugging Face folder: weights, index, configuration, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import torch

from megarl.checkpoints.convert.source import ModelSource, SourceTensor, refuse_nonfinite
from megarl.checkpoints.convert.streaming import (
    BLOCK_BYTES,
    Job,
    Progress,
    Room,
    Workers,
    in_turns,
    new_folder,
    no_progress,
)
from megarl.machine.errors import CheckpointError
from megarl.models.fp8 import (
    BLOCK,
    SCALE_SUFFIX,
    folder_field,
    quantized_tensors,
    scale_name,
    unsupported_parts,
)
from megarl.models.tensor_table import VALUE_BIAS_TENSOR
from megarl.weights.block_scaling import block_maxima, quantize, scales_of
from megarl.weights.hf_folder import (
    DEFAULT_FILE_BYTES,
    FilePlan,
    copy_companions,
    has_bias,
    manifest_bytes,
    plan_files,
    write_kept_tensors_and_index,
)
from megarl.weights.kept_tensors import KeptTensors
from megarl.weights.safetensors_file import SafetensorsFile
from megarl.weights.shard_layout import whole_layout
from megarl.weights.tensors import TensorMeta, TensorSlice, contiguous_blocks

_JOB_BYTES = 64 * 2**20  # part of a tensor written by one thread


def write_hugging_face(
    source: ModelSource,
    folder: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_FILE_BYTES,
    progress: Progress = no_progress,
    kept_tensors: KeptTensors | None = None,
) -> tuple[int, int]:
    """Write a model as a Hugging Face folder.

    Args:
        folder: Must not exist or be empty.
        dtype: None: the dtype of the source. float8_e4m3fn: projections in block-scaled FP8, and the rest in
            bfloat16.
        kept_tensors: Tensors of the original folder that are copied.

    Returns:
        The number of weight files, and their bytes.

    Raises:
        CheckpointError: The source is damaged, the disk cannot store the result, or the model cannot be
            quantized. No files remain.
    """
    architecture = source.architecture
    is_fp8 = dtype == torch.float8_e4m3fn
    if is_fp8 and (parts := unsupported_parts(architecture)):
        raise CheckpointError(
            f"{source.folder}: has {' and '.join(parts)}, which are not supported in FP8; use --dtype "
            "bfloat16"
        )
    kept = torch.bfloat16 if is_fp8 else dtype or source.single_dtype
    quantized = quantized_tensors(architecture) if is_fp8 else {}
    files = plan_files(
        architecture, [whole_layout(architecture)], kept, source.head, max_shard_bytes, quantized
    )
    of_kept_tensors = sum(map(manifest_bytes, kept_tensors.manifests)) if kept_tensors is not None else 0
    total = sum(manifest_bytes(file.manifest) for file in files) + of_kept_tensors

    with new_folder(folder, total) as unfinished:
        copy_companions(
            source.companions,
            unfinished,
            kept,
            source.head,
            quantization=folder_field(architecture) if is_fp8 else None,
            promises_mtp=kept_tensors is not None and kept_tensors.has_mtp,
        )
        # A class whose value head has a bias cannot load a folder without one.
        if source.head == "value" and has_bias(unfinished):
            *others, last = files
            bias = {VALUE_BIAS_TENSOR: TensorMeta((1,), kept)}
            files = (*others, last._replace(manifest={**last.manifest, **bias}))
        _Writer(source, kept, quantized, lambda nbytes: progress(nbytes, total)).write(unfinished, files)
        names = write_kept_tensors_and_index(unfinished, files, kept_tensors, max_shard_bytes)
        progress(of_kept_tensors, total)
        nbytes = sum((unfinished / name).stat().st_size for name in names)

    return len(names), nbytes


class _Writer:
    def __init__(
        self,
        source: ModelSource,
        dtype: torch.dtype,
        quantized: Collection[str],
        report: Callable[[int], None],
    ) -> None:
        self._source = source
        self._dtype = dtype
        self._quantized = quantized
        self._report = report
        self._workers = Workers()

    def write(self, folder: Path, files: Sequence[FilePlan]) -> None:
        opened: list[SafetensorsFile] = []
        jobs: list[list[Job]] = []

        try:
            for file in files:
                output = SafetensorsFile(folder / file.name, file.manifest)
                opened.append(output)
                jobs.append([])
                for name, meta in file.manifest.items():
                    jobs[-1] += self._jobs(output, name, meta)
            self._workers.run(in_turns(jobs))
        # Close the files on interrupts too.
        except BaseException:
            for output in opened:
                output.abandon()
            raise

        for output in opened:
            output.close()

    def _jobs(self, output: SafetensorsFile, name: str, meta: TensorMeta) -> list[Job]:
        """Return the jobs that write a tensor. Scales are written together with their values."""
        if name in self._quantized:
            tensor = self._source.tensors[name]
            num_blocks = max(1, _JOB_BYTES // (BLOCK * meta.shape[1]))  # rows of blocks of a job
            rows = range(0, meta.shape[0], num_blocks * BLOCK)
            return [partial(self._write_quantized, output, tensor, start, rows.step) for start in rows]
        if name.removesuffix(SCALE_SUFFIX) in self._quantized:
            return []
        if name == VALUE_BIAS_TENSOR:
            return [lambda room: output.write(name, 0, torch.zeros(1, dtype=self._dtype))]

        tensor = self._source.tensors[name]
        parts = contiguous_blocks(tensor.hf.view, _JOB_BYTES // self._dtype.itemsize)
        return [partial(self._write_part, output, tensor, part, offset, meta.dtype) for offset, part in parts]

    def _write_quantized(
        self, output: SafetensorsFile, tensor: SourceTensor, first: int, num_rows: int, room: Room
    ) -> None:
        """Write rows of a matrix in FP8, a row of blocks at a time, and their scales."""
        num_columns = tensor.hf.shape[1]
        for start in range(first, min(first + num_rows, tensor.hf.shape[0]), BLOCK):
            self._workers.check()
            rows = tensor.rows(start, min(start + BLOCK, tensor.hf.shape[0]), torch.float32)
            refuse_nonfinite(rows, tensor.hf.name)
            scales = scales_of(block_maxima(rows, (0, 0)))
            values = quantize(rows, scales, TensorSlice.whole(rows.shape)).reshape(-1)
            output.write(tensor.hf.name, start * num_columns, values)
            output.write(scale_name(tensor.hf.name), start // BLOCK * scales.shape[1], scales.reshape(-1))
            self._report(values.nbytes + scales.nbytes)

    def _write_part(
        self,
        output: SafetensorsFile,
        tensor: SourceTensor,
        part: TensorSlice,
        offset: int,
        dtype: torch.dtype,
        room: Room,
    ) -> None:
        """Write a slice of a tensor, which begins at the element `offset`."""
        for first, inner in contiguous_blocks(part.shape, BLOCK_BYTES // dtype.itemsize):
            # A failure of another thread stops this one between two blocks.
            self._workers.check()
            place = inner.relative_to((0,) * len(inner.starts), part.starts)
            block = tensor.block(place, dtype, room.tensor).reshape(-1)
            refuse_nonfinite(block, tensor.hf.name)
            output.write(tensor.hf.name, offset + first, block)
            self._report(block.nbytes)
