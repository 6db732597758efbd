"""The calls of an update besides those of its passes: gradient reduction and the optimizer step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.roles import ModelRole
from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture
from megarl.step_time.collectives import call
from megarl.step_time.counts import NOTHING, Counts, total
from megarl.step_time.trained_parameters import TrainedParameter, bucket_groups, trained_chunks

# Replicated parameters whose gradients every tensor-parallel rank has whole.
_WHOLE_GRADIENTS = ("output_layer.", "visual.", ".out_norm.")
_NORMS_OF_HEADS = ("q_layernorm", "k_layernorm")


def reduction_counts(
    architecture: Architecture, role: ModelRole, chunks: Sequence[range], stage: int
) -> Counts:
    """Return the calls that reduce the gradients of a mini-batch.

    Args:
        chunks: The layers of each virtual stage of the rank.
    """
    parallel = role.parallel
    groups = bucket_groups(architecture, role, chunks, stage)
    held = [each for chunk in trained_chunks(architecture, role, chunks) for each in chunk.dense]
    summed = sum(each.size for each in held if _is_summed(each, parallel))
    tied = sum(each.size for each in held if each.is_shared)

    return total(
        (
            *(call(parallel, "reduce_scatter", axis, size, "float32") for axis, size in groups),
            call(parallel, "all_reduce", "tensor", summed, "float32", summed > 0),
            call(parallel, "all_reduce", "embedding", tied, "float32", tied > 0),
        )
    )


def _is_summed(parameter: TrainedParameter, parallel: ParallelConfig) -> bool:
    """Return whether the gradients of tensor-parallel ranks are summed.

    With sequence parallelism, ranks have gradients of their own tokens. Norms of heads have gradients of the
    rank's heads.
    """
    if not parameter.is_replicated or any(part in parameter.name for part in _WHOLE_GRADIENTS):
        return False
    return parallel.sequence_parallel or any(norm in parameter.name for norm in _NORMS_OF_HEADS)


def router_counts(architecture: Architecture, role: ModelRole) -> Counts:
    """Return the calls that sum the statistics of routers over all ranks, for a mini-batch.

    A load-balancing loss needs the statistics of a counting pass, too.
    """
    if not architecture.num_experts:
        return NOTHING

    losses = role.experts
    passes = 1 + bool(losses.aux_loss_coefficient)
    has_loss = bool(losses.aux_loss_coefficient or losses.z_loss_coefficient)
    sizes = architecture.num_hidden_layers * (2 * architecture.num_experts + 1)

    return total(
        (
            call(role.parallel, "all_reduce", "stage", sizes, "float64", passes),
            call(role.parallel, "all_reduce", "stages", sizes, "float64", passes),
            call(role.parallel, "all_reduce", "data", 1, "float64", has_loss),
        )
    )


def step_counts(
    architecture: Architecture, role: ModelRole, chunks: Sequence[range], stage: int, dtype: str
) -> Counts:
    """Return the calls of an optimizer step: the norm of the gradients, and the gathering of parameters."""
    parallel = role.parallel
    groups = bucket_groups(architecture, role, chunks, stage)
    return total(
        (
            call(parallel, "all_reduce", "all", 1, "float32"),
            *(call(parallel, "all_gather", axis, size, dtype) for axis, size in groups),
        )
    )
