"""Prove that the ranks of a layout hold every tensor once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Head, hf_tensors
from megarl.weights.piece import Piece
from megarl.weights.shard_layout import ShardLayout, held_weights, pieces
from megarl.weights.tensors import TensorSlice, WeightTransferError, chunks_fault, tiling_fault

# Below this number, comparing all slices of a tensor is fast, and faults are described more precisely.
_FEW_SLICES = 32


def check_coverage(
    architecture: Architecture, rank_pieces: Iterable[Sequence[Piece]], head: Head = "lm"
) -> None:
    """Prove that the pieces of one replica's ranks cover every tensor exactly once, ignoring copies.

    Args:
        rank_pieces: For each rank, the pieces of all weights that it holds.

    Raises:
        WeightTransferError: A tensor is not covered exactly once; the message names the tensors.
    """
    found: dict[str, list[TensorSlice]] = defaultdict(list)
    for piece in (piece for all_of_rank in rank_pieces for piece in all_of_rank):
        if piece.is_source:
            found[piece.hf_name].append(piece.hf)

    faults = []
    for tensor in hf_tensors(architecture, head):
        slices = found.pop(tensor.name, [])
        # A tensor that holds many experts consists of many slices.
        check = tiling_fault if len(slices) <= _FEW_SLICES else chunks_fault
        if (fault := check(tensor.view, slices)) is not None:
            faults.append(f"{tensor.name}: {fault}")

    # What remains belongs to no parameter of the model.
    faults += [f"{name}: not a tensor of the model" for name in found]
    if faults:
        raise WeightTransferError(
            f"the layout does not hold {counted(len(faults), 'tensor')} exactly once: "
            + "; ".join(faults[:8])
        )


def rank_pieces(architecture: Architecture, layout: ShardLayout, head: Head = "lm") -> tuple[Piece, ...]:
    """Return all pieces of one rank."""
    return tuple(
        piece for weight in held_weights(architecture, layout, head) for piece in pieces(weight, layout)
    )
