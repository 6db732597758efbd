"""Predict the memory of a rank in each phase of its dry run, from the memory plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megarl.config.roles import ModelRole
from megarl.config.schema import RunConfig
from megarl.models.architecture import Architecture
from megarl.models.layers import routes_tokens
from megarl.plan.placement.activations import role_memory, sharing_is_another_way
from megarl.plan.placement.model_state import stage_of

# Suffixes of phases.
UNEVEN = ", uneven"  # one expert has twice its share of the tokens
SHARED = ", shared prompt"  # two rows of each micro-batch share a prompt


class PredictedMemory(NamedTuple):
    """The predicted memory of a rank, in bytes.

    Attributes:
        held: The state of the model.
        stays: What remains on the device while the state is offloaded.
        peaks: The peak of each phase of the dry run. While a model that trains is built, it has its
            parameters twice, before the optimizer has its state.
        batches: The part of each peak that belongs to the batch of a whole pass, of which a dry run has only
            a few micro-batches.
        roots: The part of the step's peak that only torch's Adam allocates. With local layers, Megatron uses
            Transformer Engine's Adam as well, if it is installed.
    """

    held: int
    stays: int
    peaks: Mapping[str, int]
    batches: Mapping[str, int]
    roots: int


def predicted_memory(
    config: RunConfig, role: ModelRole, architecture: Architecture, rank: int
) -> PredictedMemory:
    stage = stage_of(role.parallel, rank)
    work = role_memory(config, role, architecture, stage, uneven=False, shares=False)
    state = work.state
    built = 0 if role.optim is None else max(0, state.parameters - state.optimizer)
    passes = {"score": work.score, "train": work.train, "train again": work.train, "step": work.step}

    # Predict the passes with uneven routing as well.
    if routes_tokens(architecture):
        crowded = role_memory(config, role, architecture, stage, uneven=True, shares=False)
        passes |= {f"score{UNEVEN}": crowded.score, f"train{UNEVEN}": crowded.train}
    # And those with shared prompts.
    if sharing_is_another_way(config, role, architecture):
        sharing = role_memory(config, role, architecture, stage, uneven=False, shares=True)
        passes |= {f"score{SHARED}": sharing.score, f"train{SHARED}": sharing.train}

    transient = {"build": built, **passes, "offload": work.stays, "restore": work.stays}
    batches = {
        phase: work.trained_batch if phase.startswith("train") else work.scored_batch
        for phase in passes
        if phase != "step"
    }
    return PredictedMemory(
        state.total,
        work.stays,
        {phase: state.total + size for phase, size in transient.items()},
        batches,
        max(0, work.step - work.stays),
    )
