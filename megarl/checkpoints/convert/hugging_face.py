"""Opens Hugging Face folders as a `ModelSource` with memory-mapped safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import torch

from megarl.checkpoints.convert.source import ModelSource, SourceTensor, StoredPiece, checked_tensors
from megarl.checkpoints.torch_file import mapped
from megarl.machine.wording import counted
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.fp8 import scale_name
from megarl.models.tensor_table import (
    VALUE_HEAD_TENSOR,
    Head,
    HFTensor,
    stored_weights,
    weights_of,
)
from megarl.weights.block_scaling import Elements, ScaledMatrix
from megarl.weights.checkpoint_index import (
    BLOCK,
    BLOCKS,
    SCALE_DTYPES,
    SCALES,
    TORCH_DTYPES,
    CheckpointIndex,
    Packing,
    TensorInFile,
    read_checkpoint_index,
    unpack,
)
from megarl.weights.kept_tensors import kept_format_fault
from megarl.weights.manifest import (
    check_index,
    check_tied_head,
    check_value_bias,
    is_harmless_extra,
    is_kept,
    stored_manifest,
)
from megarl.weights.piece import Piece
from megarl.weights.shard_layout import numbered_pieces, whole_layout
from megarl.weights.shard_layout import pieces as shard_pieces
from megarl.weights.tensors import TensorSlice, WeightTransferError

HUGGING_FACE = "Hugging Face"  # the format, as `ModelSource.kind`


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
    files = {file for stored in index.tensors.values() for file in stored.files}
    starts = {file: _data_starts(file) for file in files}
    dtypes, pieces = _stored_pieces(index, architecture, head, starts)

    return ModelSource(
        folder=folder,
        kind=HUGGING_FACE,
        layout=f"{counted(len(starts), 'safetensors file')}{_packing(index)}",
        companions=folder,
        architecture=architecture,
        head=head,
        tensors=checked_tensors(folder, architecture, head, dtypes, pieces),
        open_kept=partial(_kept_tensors, index, architecture, starts),
    )


def _kept_tensors(
    index: CheckpointIndex, architecture: Architecture, starts: Mapping[Path, Mapping[str, int]]
) -> dict[str, SourceTensor]:
    tensors = {}
    for name, stored in index.tensors.items():
        if not is_kept(name, architecture):
            continue
        if (fault := kept_format_fault(name, stored)) is not None:
            raise WeightTransferError(f"{index.folder}: {fault}")
        hf = HFTensor(name, stored.shape, stored.shape)
        piece = (TensorSlice.whole(hf.view), _opener(index, starts, hf))
        tensors[name] = SourceTensor(hf=hf, dtype=TORCH_DTYPES[stored.dtype], pieces=(piece,))
    return tensors


def _packing(index: CheckpointIndex) -> str:
    packings = {stored.packing for stored in index.tensors.values() if stored.packing is not None}
    return "".join(f", in {packing.value}" for packing in packings)


def _stored_pieces(
    index: CheckpointIndex, architecture: Architecture, head: Head, starts: Mapping[Path, Mapping[str, int]]
) -> tuple[dict[str, torch.dtype], dict[str, list[StoredPiece]]]:
    """Return the dtype and the pieces of each tensor, which the folder may store in other tensors."""
    dtypes: dict[str, torch.dtype] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    layout = whole_layout(architecture)
    own_weights = weights_of(architecture, head)
    read_weights = stored_weights(architecture, head, index.shapes)

    for own, read in zip(own_weights, read_weights, strict=True):
        if own is read or own.tensors == read.tensors:
            for hf in own.tensors:
                stored = index.tensors[hf.name]
                dtypes[hf.name] = TORCH_DTYPES[stored.dtype]
                if stored.scales is None or stored.packing is Packing.block_fp8:
                    pieces[hf.name] = [(TensorSlice.whole(hf.view), _opener(index, starts, hf))]
                elif hf.name not in pieces:
                    pieces[hf.name] = list(_unpacked_pieces(stored, stored.scales.file, hf, starts))
            continue

        # The same parameter consists of these tensors and of those: equal elements lie at the same place.
        for (number, stored_piece), piece in product(
            numbered_pieces(read, layout), shard_pieces(own, layout)
        ):
            common = stored_piece.shard.intersect(piece.shard)
            if common is None:
                continue
            open_whole = _opener(index, starts, read.tensors[number])
            dtypes[piece.hf_name] = TORCH_DTYPES[index.tensors[stored_piece.hf_name].dtype]
            for shard, source in stored_piece.matches(common):
                ((_, place),) = piece.matches(shard)
                pieces.setdefault(piece.hf_name, []).append(
                    (
                        place,
                        partial(_open_other, open_whole, stored_piece, source, shard.shape, piece, place),
                    )
                )

    return dtypes, pieces


def _opener(
    index: CheckpointIndex, starts: Mapping[Path, Mapping[str, int]], hf: HFTensor
) -> Callable[[], Elements]:
    stored = index.tensors[hf.name]
    start = starts[stored.file][hf.name]
    if stored.scales is None:
        return partial(mapped, stored.file, start, hf.view, TORCH_DTYPES[stored.dtype])
    assert stored.packing is Packing.block_fp8, "no family has fused rows and MXFP4"
    return partial(
        _open_scaled, stored, stored.scales, hf, start, starts[stored.scales.file][scale_name(hf.name)]
    )


def _open_scaled(
    stored: TensorInFile, scales: TensorInFile, hf: HFTensor, start: int, scales_start: int
) -> ScaledMatrix:
    """Open a matrix in block-scaled FP8, of which slices are dequantized to float32."""
    values = mapped(stored.file, start, stored.shape, torch.float8_e4m3fn)
    of_blocks = mapped(scales.file, scales_start, scales.shape, SCALE_DTYPES[scales.dtype])
    return ScaledMatrix(values, of_blocks, stored.shape, hf.view)


def _unpacked_pieces(
    stored: TensorInFile, scales_file: Path, hf: HFTensor, starts: Mapping[Path, Mapping[str, int]]
) -> Iterator[StoredPiece]:
    """Yield one piece for each expert of a tensor in MXFP4, which is converted when it is opened."""
    num_experts, columns, rows = stored.shape
    shape = (num_experts, rows, columns // BLOCK)
    blocks_start = starts[stored.file][hf.name + BLOCKS]
    scales_start = starts[scales_file][hf.name + SCALES]
    # A byte contains two values of four bits.
    open_blocks = partial(mapped, stored.file, blocks_start, (*shape, BLOCK // 2), torch.uint8)
    open_scales = partial(mapped, scales_file, scales_start, shape, torch.uint8)

    for expert in range(num_experts):
        yield (
            TensorSlice.whole(hf.view).along(0, expert, expert + 1),
            partial(_open_unpacked, open_blocks, open_scales, expert, (1, *hf.view[1:])),
        )


def _open_unpacked(
    open_blocks: Callable[[], torch.Tensor],
    open_scales: Callable[[], torch.Tensor],
    expert: int,
    view: tuple[int, ...],
) -> torch.Tensor:
    return unpack(open_blocks()[expert], open_scales()[expert]).t().reshape(view)


def _open_other(
    open_whole: Callable[[], Elements],
    stored_piece: Piece,
    source: TensorSlice,
    shape: tuple[int, ...],
    piece: Piece,
    place: TensorSlice,
) -> torch.Tensor:
    """Read elements, which are the slice `source` in the file and have `shape` in the parameter."""
    elements = open_whole()[source.index]
    if stored_piece.rearrangement is not None:
        elements = elements.permute(stored_piece.rearrangement.order).reshape(shape)
    return piece.in_hf_order(elements, place)


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
