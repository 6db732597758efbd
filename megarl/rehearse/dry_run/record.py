"""The result of simulating one rank, sent between processes and written as JSON, and the predicted memory.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megarl.config.roles import ModelRole
from megarl.config.schema import RunConfig
from megarl.models.architecture import Architecture
from megarl.models.layers import routes_tokens
from megarl.plan.placement.activations import role_memory, sharing_is_another_way
from megarl.plan.placement.model_state import stage_of
from megarl.weights.tensors import PeerTransfers

POINT_TO_POINT = ("send", "recv")


class RehearsalError(Exception):
    """The engine did something that would fail on a real device. The message has the source line."""


class RankRequest(NamedTuple):
    """A rank to simulate.

    Attributes:
        num_micro_batches: The number of micro-batches in each pass.
        sends: What an actor rank sends in a weight sync, by engine rank, unless weights are sent through
            files.
        buffer_bytes: Memory shared with the engine rank on the same device, in bytes; 0 if there is none.
    """

    config: RunConfig
    role: str
    rank: int
    num_micro_batches: int
    sends: PeerTransfers | None = None
    buffer_bytes: int = 0


class Collective(NamedTuple):
    """One call, in the order in which the rank made it.

    Attributes:
        kind: The kind, such as all_reduce.
        group: Megatron's name of the group.
        ranks: The members, or the sender and receiver of a message.
        elements: The elements of the larger of the rank's tensors.
        nbytes: The bytes of the larger of the rank's tensors.
        place: The source line that made the call.
        batch: The number of the batch of messages that are submitted to NCCL together.
        sent: For an all_to_all: the elements for each rank.
        received: For an all_to_all: the elements from each rank.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    dtype: str
    elements: int
    nbytes: int
    place: str
    batch: int | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class Await(NamedTuple):
    """A point at which a device waits for a call.

    What the device does after its first `num_calls` calls waits for call number `call`. Both count from the
    first phase.
    """

    call: int
    num_calls: int


class HostSync(NamedTuple):
    """A place where the host blocks until the device has done all its work.

    `kind` is `read`, `copy` (to the host, or from its pageable memory), or `synchronize`.
    """

    kind: str
    place: str
    times: int


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """One phase of one rank.

    Attributes:
        held: Bytes on the device at the end.
        peak: The maximum of bytes on the device.
        flops: The operations of matrix products and attention, including recomputation.
        host_syncs: Where the host waits for the device.
        awaits: Where the device waits for calls.
    """

    name: str
    held: int
    peak: int
    flops: int
    collectives: tuple[Collective, ...]
    host_syncs: tuple[HostSync, ...]
    awaits: tuple[Await, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """All phases of one rank. `error` is why the dry run ended before its last phase, if it did."""

    rank: int
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    data_rank: int
    num_parameters: int
    phases: tuple[PhaseRecord, ...]
    error: str | None = None

    @property
    def peak(self) -> int:
        """The peak of all phases, in bytes."""
        return max((phase.peak for phase in self.phases), default=0)


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
