"""Forward and backward passes of a vision tower, which every tensor-parallel rank computes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from megarl.models.architecture import Architecture
from megarl.models.flops import pairs_of_block, tower_matrices
from megarl.step_time.counts import NOTHING, Counts, product, total
from megarl.step_time.packed_batch import PackedBatch
from megarl.step_time.work import Edge, PassCounts, joined, linear


def tower_work(
    architecture: Architecture, edge: Edge, batch: PackedBatch, *, trains: bool
) -> tuple[PassCounts, PassCounts]:
    """Return the work of the tower's blocks, and of what is around them.

    Each prompt is taken to be one image, as large and square as fits, as in a dry run.

    Args:
        architecture: The model, which has a tower.
        edge: The hidden states of the language model.
        trains: Whether the tower is trained.
    """
    vision = architecture.vision
    assert vision is not None
    sides = [isqrt(prompt) for prompt in batch.prompts]
    tokens = round(batch.share * sum(side**2 for side in sides))
    patches = tokens * vision.patches_per_token

    blocks = []
    around = []
    for matrix in tower_matrices(architecture):
        rows_of_matrix = tokens if matrix.per_token else patches
        work = linear(rows_of_matrix, matrix.inputs, matrix.outputs)
        # Pixels have no gradient, so the first matrix has only that of its weight.
        if not matrix.in_block and matrix.inputs == vision.patch_elements:
            work = PassCounts(work.forward, product(matrix.outputs, rows_of_matrix, matrix.inputs))
        (blocks if matrix.in_block else around).append(work)

    # Two products per pair in the forward pass, and five in the backward pass.
    pairs = batch.share * sum(
        pairs_of_block(vision, block, vision.spatial_merge_size * side, vision.spatial_merge_size * side)
        for block in range(vision.depth)
        for side in sides
    )
    flops = 2 * pairs * vision.hidden_size
    blocks.append(PassCounts(Counts((), 2 * flops, 2 * flops), Counts((), 5 * flops, 5 * flops)))

    # Tensor-parallel ranks have the gradients of their own tokens with sequence parallelism.
    if edge.parallel.sequence_parallel:
        features = edge._replace(tokens=tokens * (1 + len(vision.deepstack_blocks)))
        around.append(PassCounts(backward=features.call("all_reduce")))
    if not trains:
        return _forward_only(blocks), _forward_only(around)
    return joined(blocks), joined(around)


def _forward_only(parts: Sequence[PassCounts]) -> PassCounts:
    """Return the work of a frozen tower, which has no backward pass."""
    return PassCounts(total(part.forward for part in parts), NOTHING)
