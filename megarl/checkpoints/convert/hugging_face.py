"""Opens Hugging Face folders as a `ModelSource` with memory-mapped safetensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch

from megarl.checkpoints.convert.source import ModelSource, SourceTensor, StoredPiece, checked_tensors
from megarl.machine.wording import counted
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.tensor_table import VALUE_HEAD_TENSOR, Head, HFTensor, stored_weights, weights_of
from megarl.weights.checkpoint_index import (
    TORCH_DTYPES,
    CheckpointIndex,
    read_checkpoint_index,
    shapes_of,
)
from megarl.weights.kept_tensors import kept_format_fault
from megarl.weights.manifest import check_names, check_values, is_kept
from megarl.weights.packed_tensors import Elements, OpenFiles
from megarl.weights.piece import Piece
from megarl.weights.shard_layout import pieces as shard_pieces
from megarl.weights.shard_layout import whole_layout
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
    head: Head = "value" if VALUE_HEAD_TENSOR in index else "lm"
    check_names(folder, index, architecture, head)
    check_values(index, architecture, head)
    # Each header is read once, however many tensors its file has.
    files = OpenFiles()
    dtypes, pieces = _stored_pieces(index, architecture, head, files)

    num_files = len({file for stored in index.values() for file in stored.files})
    packings = {stored.packing for stored in index.values() if stored.packing is not None}
    return ModelSource(
        folder=folder,
        kind=HUGGING_FACE,
        layout=counted(num_files, "safetensors file") + "".join(f", in {each.value}" for each in packings),
        companions=folder,
        architecture=architecture,
        head=head,
        tensors=checked_tensors(folder, architecture, head, dtypes, pieces),
        open_kept=partial(_kept_tensors, folder, index, architecture, files),
    )


def _kept_tensors(
    folder: Path, index: CheckpointIndex, architecture: Architecture, files: OpenFiles
) -> dict[str, SourceTensor]:
    tensors = {}
    for name, stored in index.items():
        if not is_kept(name, architecture):
            continue
        if (fault := kept_format_fault(name, stored)) is not None:
            raise WeightTransferError(f"{folder}: {fault}")
        hf = HFTensor(name, stored.shape, stored.shape)
        piece = (TensorSlice.whole(hf.view), partial(files.open, name, stored))
        tensors[name] = SourceTensor(hf=hf, dtype=TORCH_DTYPES[stored.dtype], pieces=(piece,))
    return tensors


def _stored_pieces(
    index: CheckpointIndex, architecture: Architecture, head: Head, files: OpenFiles
) -> tuple[dict[str, torch.dtype], dict[str, list[StoredPiece]]]:
    """Return the dtype and the pieces of each tensor, which the folder may store in other tensors."""
    dtypes: dict[str, torch.dtype] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    layout = whole_layout(architecture)
    own_weights = weights_of(architecture, head)
    read_weights = stored_weights(architecture, head, shapes_of(index))

    for own, read in zip(own_weights, read_weights, strict=True):
        if own.tensors == read.tensors:
            for hf in own.tensors:
                stored = index[hf.name]
                dtypes[hf.name] = TORCH_DTYPES[stored.dtype]
                opener = partial(files.open, hf.name, stored, hf.view)
                pieces[hf.name] = [(TensorSlice.whole(hf.view), opener)]
            continue

        # The same parameter consists of these tensors and of those: equal elements lie at the same place.
        for stored_piece, piece in product(shard_pieces(read, layout), shard_pieces(own, layout)):
            common = stored_piece.shard.intersect(piece.shard)
            if common is None:
                continue
            stored = index[stored_piece.hf_name]
            open_whole = partial(files.open, stored_piece.hf_name, stored, stored_piece.hf_view)
            dtypes[piece.hf_name] = TORCH_DTYPES[stored.dtype]
            for shard, source in stored_piece.matches(common):
                ((_, place),) = piece.matches(shard)
                opener = partial(_open_other, open_whole, stored_piece, source, shard.shape, piece, place)
                pieces.setdefault(piece.hf_name, []).append((place, opener))

    return dtypes, pieces


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
