"""Count what a rank of a model role does for a micro-batch and for an update. Pure.

The counts are those of a dry run (megarl/rehearsal), on the first rank of a pipeline stage and with
Transformer Engine's layers unless the run has local ones. tests/soak/test_step_counts.py compares them for
every run in configs/.
"""

from __future__ import annotations

from megarl.config.roles import ModelRole, needs_sum_pi_squared, scores_in_update
from megarl.config.schema import PPOConfig, RunConfig
from megarl.models.architecture import Architecture
from megarl.step_time.counts import Counts, total
from megarl.step_time.packed_batch import PackedBatch
from megarl.step_time.stage_passes import StagePasses, chunks_of_stage, dtype_of
from megarl.step_time.update_work import reduction_counts, router_counts, step_counts


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
    if architecture.experts is not None and role.experts.aux_loss_coefficient:
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
