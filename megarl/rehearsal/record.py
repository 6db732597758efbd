"""What a rehearsal of one rank says: frozen data that travels between processes and into JSON. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megarl.config.schema import RunConfig
from megarl.weights.schedule import TransferSchedule

POINT_TO_POINT = ("send", "recv")


class RehearsalError(Exception):
    """The engine did on a fake device what would be wrong on a real one: what, and the place in the
    source."""


class RankPush(NamedTuple):
    """What a rank sends in a push of weights. schedules: by engine rank. buffer_bytes: memory that it shares
    with the engine rank on its device, 0 where there is none."""

    schedules: Mapping[int, TransferSchedule]
    buffer_bytes: int


class RankRequest(NamedTuple):
    """num_micro_batches: of each pass. push: of a rank of the actor, where weights do not go through
    files."""

    config: RunConfig
    role: str
    rank: int
    num_micro_batches: int
    push: RankPush | None = None


class RankProgress(NamedTuple):
    """A rank has finished a phase."""

    rank: int
    phase: str


class Collective(NamedTuple):
    """One call, in the order in which the rank made it. group: what Megatron calls it. ranks: who is in it,
    or the two of a message, from its sender to its receiver. elements, nbytes: of the larger side of one
    rank. place: the line that asked for it. batch: of messages that are given to NCCL at once. sent,
    received: of an all_to_all, elements for and from each of the ranks."""

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
    """What a rank's device does after its first `num_calls` calls waits for call number `call`; both count
    from the first phase on."""

    call: int
    num_calls: int


class HostSync(NamedTuple):
    """The host stands still until the device has done all it was given. kind: `read`, `copy` to the host or
    from its pageable memory, or `synchronize`."""

    kind: str
    place: str
    times: int


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """One phase of one rank. held: bytes on the device at its end; peak: the most within it. flops: of
    products of matrices and of attention, what is computed again included."""

    name: str
    held: int
    peak: int
    flops: int
    collectives: tuple[Collective, ...]
    host_syncs: tuple[HostSync, ...]
    awaits: tuple[Await, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """error: why the rehearsal ended before its last phase, None where it did not."""

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
        """Bytes, of all phases."""
        return max((phase.peak for phase in self.phases), default=0)
