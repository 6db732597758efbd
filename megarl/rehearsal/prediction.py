"""What the plan of memory says that a rank would hold in each phase of its rehearsal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megarl.config.roles import ModelRole
from megarl.config.schema import RunConfig
from megarl.models.architecture import Architecture
from megarl.placement.activations import working_memory
from megarl.placement.memory import model_state, second_moments, stage_of

UNEVEN = ", uneven"  # behind the name of a phase: one expert has twice its share of the tokens


class PredictedMemory(NamedTuple):
    """Bytes. held: state of the model. stays: on the device when the state has left. peaks: by the
    rehearsal's phase. While it is built, a model that trains has its parameters twice, before the optimizer
    has its state. batches: what of a peak is the batch of the whole pass, of which a rehearsal has a few
    micro-batches."""

    held: int
    stays: int
    peaks: Mapping[str, int]
    batches: Mapping[str, int]


def predicted_memory(
    config: RunConfig, role: ModelRole, architecture: Architecture, rank: int
) -> PredictedMemory:
    stage = stage_of(role.parallel, rank)
    state = model_state(role, architecture, config.model.dtype, stage)
    held = state.total
    moments = second_moments(role, architecture, stage)
    work = working_memory(config, role, architecture, stage, moments, uneven=False)
    built = 0 if role.optim is None else max(0, state.parameters - state.optimizer)
    passes = {"score": work.score, "train": work.train, "train again": work.train, "step": work.step}

    # Predict the passes with uneven routing as well.
    if architecture.experts:
        crowded = working_memory(config, role, architecture, stage, moments, uneven=True)
        passes |= {f"score{UNEVEN}": crowded.score, f"train{UNEVEN}": crowded.train}

    beside = {"build": built, **passes, "offload": work.stays, "restore": work.stays}
    batches = {
        phase: work.trained_batch if phase.startswith("train") else work.scored_batch
        for phase in passes
        if phase != "step"
    }
    return PredictedMemory(held, work.stays, {phase: held + size for phase, size in beside.items()}, batches)
