"""The result of simulating one rank, sent between processes and written as JSON. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megarl.config.schema import RunConfig
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
