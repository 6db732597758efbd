"""Reads and writes Hugging Face folders.

Reading returns a `ModelSource` with memory-mapped safetensors. Writing adds index, configuration, tokenizer
and chat template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path

import torch

from megarl.checkpoints.convert.source import ModelSource, SourceTensor, StoredPiece, checked_tensors
from megarl.checkpoints.convert.streaming import (
    BLOCK_BYTES,
    Job,
    Progress,
    Room,
    Workers,
    Written,
    in_turns,
    new_folder,
    no_progress,
)
from megarl.checkpoints.torch_file import mapped
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.tensor_table import (
    VALUE_BIAS_TENSOR,
    VALUE_HEAD_TENSOR,
    Head,
    HFTensor,
    stored_weights,
    weights_of,
)
from megarl.weights.hf_folder import (
    DEFAULT_FILE_BYTES,
    FilePlan,
    copy_companions,
    has_bias,
    plan_files,
    write_index,
)
from megarl.weights.manifest import (
    TORCH_DTYPES,
    CheckpointIndex,
    TensorInFile,
    check_index,
    check_tied_head,
    check_value_bias,
    is_harmless_extra,
    read_checkpoint_index,
    stored_manifest,
)
from megarl.weights.mxfp4 import BLOCK, BLOCKS, SCALES, unpack
from megarl.weights.piece import EqualSlices, Piece
from megarl.weights.safetensors_file import SafetensorsFile
from megarl.weights.shard_layout import numbered_pieces, whole_layout
from megarl.weights.shard_layout import pieces as shard_pieces
from megarl.weights.tensors import ChunkMeta, TensorMeta, TensorSlice, contiguous_blocks

_JOB_BYTES = 64 * 2**20  # part of a tensor written by one thread


def open_hugging_face(folder: Path, trust_remote_code: bool = False) -> ModelSource:
    """Open a Hugging Face folder. One with `score.weight` is a critic or a reward model.

    Raises:
        ConfigError: The configuration is unusable.
        WeightTransferError: The tensors do not match it.
    """
    architecture = read_architecture(str(folder), trust_remote_code)
    index = read_checkpoint_index(folder)
    head: Head = "value" if VALUE_HEAD_TENSOR in index.tensors else "lm"
    check_index(
        index,
        stored_manifest(index, architecture, head),
        lambda name: is_harmless_extra(name, architecture, head),
    )
    # A stored copy of the tied head must equal the embedding, or one of the two would be lost.
    if head == "lm" and architecture.tie_word_embeddings:
        check_tied_head(index, architecture)
    if head == "value":
        check_value_bias(index)
    # Read each header once, however many tensors its file has.
    files = {stored.file for stored in index.tensors.values()}
    files |= {stored.scales_file for stored in index.tensors.values() if stored.scales_file is not None}
    starts = {file: _data_starts(file) for file in files}
    dtypes, pieces = _stored_pieces(index, architecture, head, starts)

    return ModelSource(
        folder=folder,
        kind="Hugging Face",
        layout=f"{len(starts)} safetensors files",
        companions=folder,
        architecture=architecture,
        head=head,
        tensors=checked_tensors(folder, architecture, head, dtypes, pieces),
    )


def _stored_pieces(
    index: CheckpointIndex, architecture: Architecture, head: Head, starts: Mapping[Path, Mapping[str, int]]
) -> tuple[dict[str, torch.dtype], dict[str, list[StoredPiece]]]:
    """Return the dtype and the pieces of each tensor, which the folder may store in other tensors."""
    dtypes: dict[str, torch.dtype] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    layout = whole_layout(architecture)
    own_weights = weights_of(architecture, head)
    read_weights = stored_weights(architecture, head, index.tensors)

    def opened(hf: HFTensor) -> Callable[[], torch.Tensor]:
        stored = index.tensors[hf.name]
        assert stored.scales_file is None, "no family has fused rows and MXFP4"
        return partial(mapped, stored.file, starts[stored.file][hf.name], hf.view, TORCH_DTYPES[stored.dtype])

    for own, read in zip(own_weights, read_weights, strict=True):
        if own is read or own.tensors == read.tensors:
            for hf in own.tensors:
                stored = index.tensors[hf.name]
                dtypes[hf.name] = TORCH_DTYPES[stored.dtype]
                if stored.scales_file is None:
                    pieces[hf.name] = [StoredPiece(place=TensorSlice.whole(hf.view), open=opened(hf))]
                elif hf.name not in pieces:
                    pieces[hf.name] = list(_unpacked_pieces(stored, stored.scales_file, hf, starts))
            continue

        # The same parameter consists of these tensors and of those: equal elements lie at the same place.
        for (number, stored_piece), piece in product(
            numbered_pieces(read, layout), shard_pieces(own, layout)
        ):
            common = stored_piece.shard.intersect(piece.shard)
            if common is None:
                continue
            open_whole = opened(read.tensors[number])
            dtypes[piece.hf_name] = TORCH_DTYPES[index.tensors[stored_piece.hf_name].dtype]
            for match in stored_piece.matches(common):
                (place,) = piece.matches(match.shard)
                pieces.setdefault(piece.hf_name, []).append(
                    StoredPiece(
                        place=place.hf, open=partial(_open_other, open_whole, stored_piece, match, piece)
                    )
                )

    return dtypes, pieces


def _unpacked_pieces(
    stored: TensorInFile, scales_file: Path, hf: HFTensor, starts: Mapping[Path, Mapping[str, int]]
) -> Iterator[StoredPiece]:
    """Yield one piece for each expert of a tensor in MXFP4, which is converted when it is opened."""
    num_experts, columns, rows = stored.shape
    shape = (num_experts, rows, columns // BLOCK)
    blocks_start = starts[stored.file][hf.name + BLOCKS]
    scales_start = starts[scales_file][hf.name + SCALES]
    open_blocks = partial(mapped, stored.file, blocks_start, (*shape, BLOCK // 2), torch.uint8)
    open_scales = partial(mapped, scales_file, scales_start, shape, torch.uint8)

    for expert in range(num_experts):
        yield StoredPiece(
            place=TensorSlice.whole(hf.view).along(0, expert, expert + 1),
            open=partial(_open_unpacked, open_blocks, open_scales, expert, (1, *hf.view[1:])),
        )


def _open_unpacked(
    open_blocks: Callable[[], torch.Tensor],
    open_scales: Callable[[], torch.Tensor],
    expert: int,
    view: tuple[int, ...],
) -> torch.Tensor:
    return unpack(open_blocks()[expert], open_scales()[expert]).t().reshape(view)


def _open_other(
    open_whole: Callable[[], torch.Tensor], stored: Piece, match: EqualSlices, piece: Piece
) -> torch.Tensor:
    elements = open_whole()[match.hf.index]
    if stored.rearrangement is not None:
        elements = elements.permute(stored.rearrangement.order).reshape(match.shard.shape)
    return piece.in_hf_order(elements)


def _data_starts(file: Path) -> dict[str, int]:
    """Return the position of each tensor in a file whose header safetensors has validated."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return {
        name: 8 + length + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The slice `place` of a tensor, which begins at the element `offset`."""

    tensor: SourceTensor
    place: TensorSlice
    offset: int


def write_hugging_face(
    source: ModelSource,
    folder: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_FILE_BYTES,
    progress: Progress = no_progress,
) -> Written:
    """Write a model as a Hugging Face folder.

    Args:
        folder: Must not exist or be empty.
        dtype: None: the dtype of the source.

    Raises:
        CheckpointError: The source is damaged or the disk cannot store the result. No files remain.
    """
    dtype = dtype or source.single_dtype
    files = plan_files(
        source.architecture, [whole_layout(source.architecture)], dtype, source.head, max_shard_bytes
    )
    total = sum(prod(meta.shape) * meta.dtype.itemsize for file in files for meta in file.manifest.values())

    with new_folder(folder, total) as unfinished:
        copy_companions(source.companions, unfinished, dtype, source.head)
        # A class whose value head has a bias cannot load a folder without one.
        if source.head == "value" and has_bias(unfinished):
            files = _with_bias(files, dtype)
        _Writer(source, dtype, lambda nbytes: progress(nbytes, total)).write(unfinished, files)
        write_index(
            unfinished, [(name, meta, file.name) for file in files for name, meta in file.manifest.items()]
        )
        nbytes = sum((unfinished / file.name).stat().st_size for file in files)

    return Written(folder=folder, num_files=len(files), nbytes=nbytes)


def _with_bias(files: Sequence[FilePlan], dtype: torch.dtype) -> tuple[FilePlan, ...]:
    *others, last = files
    return (*others, last._replace(manifest={**last.manifest, VALUE_BIAS_TENSOR: TensorMeta((1,), dtype)}))


class _Writer:
    def __init__(self, source: ModelSource, dtype: torch.dtype, report: Callable[[int], None]) -> None:
        self._source = source
        self._dtype = dtype
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
                for name in file.manifest:
                    if name == VALUE_BIAS_TENSOR:
                        output.write(ChunkMeta(name, 0, 1), torch.zeros(1, dtype=self._dtype))
                    else:
                        dtype = file.manifest[name].dtype
                        jobs[-1] += [
                            partial(self._write_part, output, part, dtype) for part in self._parts(name)
                        ]
            self._workers.run(in_turns(jobs))
        # Close the files on interrupts too.
        except BaseException:
            for output in opened:
                output.abandon()
            raise

        for output in opened:
            output.close()

    def _parts(self, name: str) -> Iterator[_Part]:
        tensor = self._source.tensors[name]
        for offset, place in contiguous_blocks(tensor.hf.view, _JOB_BYTES // self._dtype.itemsize):
            yield _Part(tensor=tensor, place=place, offset=offset)

    def _write_part(self, output: SafetensorsFile, part: _Part, dtype: torch.dtype, room: Room) -> None:
        for first, inner in contiguous_blocks(part.place.shape, BLOCK_BYTES // dtype.itemsize):
            # A failure of another thread stops this one between two blocks.
            self._workers.check()
            place = inner.relative_to((0,) * len(inner.starts), part.place.starts)
            block = part.tensor.block(place, dtype, room.tensor).reshape(-1)
            output.write(ChunkMeta(part.tensor.hf.name, part.offset + first, block.numel()), block)
            self._report(block.nbytes)
