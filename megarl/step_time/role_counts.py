"""Count what a rank of a model role does for a micro-batch and for an update. Pure.

The counts are those of a dry run (megarl/rehearsal), on the first rank of a pipeline stage and with
Transformer Engine's layers unless the run has local ones. tests/soak/test_step_counts.py compares them for
every run in configs/.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.roles import ModelRole, needs_sum_pi_squared, scores_in_update
from megarl.config.schema import ParallelConfig, PPOConfig, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.layers import routes_tokens
from megarl.step_time.collectives import call
from megarl.step_time.counts import NOTHING, Counts, total
from megarl.step_time.packed_batch import PackedBatch
from megarl.step_time.stage_passes import StagePasses, chunks_of_stage, dtype_of
from megarl.step_time.trained_parameters import TrainedParameter, bucket_groups, trained_chunks

# Replicated parameters whose gradients every tensor-parallel rank has whole.
_WHOLE_GRADIENTS = ("output_layer.", "visual.", ".out_norm.")
_NORMS_OF_HEADS = ("q_layernorm", "k_layernorm")


def scoring_counts(
    config: RunConfig, role: ModelRole, architecture: Architecture, stage: int, batch: PackedBatch
) -> Counts:
    """Return what it costs to score a micro-batch."""
    return StagePasses(config, role, architecture, stage, batch).forward(_num_scores(config, role))


def training_counts(
    config: RunConfig, role: ModelRole, architecture: Architecture, stage: int, batch: PackedBatch
) -> Counts:
    """Return what the forward and backward pass of a micro-batch cost, with recomputation.

    A load-balancing loss of routers has another forward pass, which only counts. The arguments are those of
    `scoring_counts`.
    """
    work = StagePasses(config, role, architecture, stage, batch)
    num_scores = _num_trained_scores(config, role)
    passes = [work.forward(num_scores), work.backward(num_scores)]
    if routes_tokens(architecture) and role.experts.aux_loss_coefficient:
        passes.append(work.forward(0))
    return total(passes)


def gradient_counts(config: RunConfig, role: ModelRole, architecture: Architecture, stage: int) -> Counts:
    """Return what a mini-batch costs besides its passes: sums of gradients and of router statistics."""
    chunks = chunks_of_stage(architecture, role.parallel, stage)
    reduced = reduction_counts(architecture, role, chunks, stage)
    return total((reduced, router_counts(architecture, role)))


def optimizer_counts(config: RunConfig, role: ModelRole, architecture: Architecture, stage: int) -> Counts:
    """Return what an optimizer step costs, with the gathering of the updated parameters."""
    chunks = chunks_of_stage(architecture, role.parallel, stage)
    return step_counts(architecture, role, chunks, stage, dtype_of(config))


def _num_scores(config: RunConfig, role: ModelRole) -> int:
    """Return the number of outputs per response token in scoring: log-probs, entropy, and others if asked."""
    is_actor = role.name == "actor" and isinstance(config, PPOConfig)
    return 2 + (is_actor and needs_sum_pi_squared(config.algorithm))


def _num_trained_scores(config: RunConfig, role: ModelRole) -> int:
    """Return the number of outputs per response token in training: log-probs, and entropy if it is read."""
    if not isinstance(config, PPOConfig):
        return 1
    scores = scores_in_update(config.algorithm, one_update=config.trainer.one_update)
    return 1 + bool(config.algorithm.entropy_coefficient or scores)


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
