"""The carrier `group`: point to point in a process group of one engine's ranks and the trainer ranks that send to it.

Each engine has a group of its own, so that one that is replaced makes nobody else meet again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from megarl.weights.execution import Inbox, Lane, Rounds, Side
from megarl.weights.p2p import Wire, WireAddress
from megarl.weights.plan import Part, Stream, TransferPlan
from megarl.weights.shards import Shards
from megarl.weights.transports.interface import Buffers, EngineEnd, Landing, Opened, TrainerEnd


class GroupPlace(NamedTuple):
    """A rank's place in the group of one engine. The trainer ranks come first in it."""

    address: WireAddress
    rank: int


class GroupRoute(NamedTuple):
    """The group of one engine. senders: trainer ranks, in the order of their numbers in the group; its own ranks follow. sends: of each
    sender, by the engine ranks' numbers in the group. receives: of each engine rank, by the senders' numbers."""

    senders: tuple[int, ...]
    sends: tuple[dict[int, Stream], ...]
    receives: tuple[dict[int, Stream], ...]

    @property
    def size(self) -> int:
        return len(self.senders) + len(self.receives)


def group_route(plan: TransferPlan, targets: Sequence[int]) -> GroupRoute:
    """`targets`: the engine's ranks, as the plan counts them."""
    senders = tuple(sorted({source for source, target in plan.streams if target in targets}))
    numbers = {source: number for number, source in enumerate(senders)}
    return GroupRoute(
        senders=senders,
        sends=tuple(
            {len(senders) + rank: plan.streams[source, target] for rank, target in enumerate(targets) if (source, target) in plan.streams}
            for source in senders
        ),
        receives=tuple({numbers[source]: stream for source, stream in plan.of_target(target).items()} for target in targets),
    )


class GroupTrainerEnd(TrainerEnd):
    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = {}
        self._buffers = Buffers()

    def join(self, replica: int, wire: Wire, streams: Mapping[int, Stream]) -> None:
        """`streams`: by the engine ranks' numbers in the group."""
        self.leave(replica)
        self._lanes[replica] = Lane(wire, Side(streams), replica=replica)

    def open(self, shards: Shards, replicas: Collection[int]) -> Opened:
        lanes = [lane for replica, lane in sorted(self._lanes.items()) if replica in replicas]
        num_rounds = max((lane.sends.num_rounds for lane in lanes), default=0)
        largest = max((sum(lane.sends.length(number) for lane in lanes) for number in range(num_rounds)), default=0)
        buffers = self._buffers.take(largest, shards.dtype, shards.device)
        nbytes = sum(lane.sends.numel for lane in lanes) * shards.dtype.itemsize
        return Opened(Rounds(lanes, num_rounds, buffers, shards.regions), nbytes, buffers.nbytes)

    def leave(self, replica: int) -> None:
        if (lane := self._lanes.pop(replica, None)) is not None:
            lane.wire.abort()

    def release(self) -> None:
        self._buffers.release()

    def close(self) -> None:
        self.release()
        for lane in self._lanes.values():
            lane.wire.close()
        self._lanes = {}


class GroupEngineEnd(EngineEnd):
    def __init__(self, place: GroupPlace, device: torch.device) -> None:
        self._device = device
        self._wire = Wire.join(place.address, place.rank, device)
        self._rounds: Rounds | None = None

    def receive(self, landing: Landing) -> bool:
        if self._rounds is None:
            inbox = _GroupInbox(landing, self._device)
            nothing = torch.empty(2, 0, device=self._device)
            lane = Lane(self._wire, Side({}), receives=True)
            self._rounds = Rounds([lane], landing.sources.num_rounds, nothing, inbox=inbox, pauses=True)
        if not self._rounds.run():
            return False
        self._rounds = None
        return True

    @property
    def is_under_way(self) -> bool:
        return self._rounds is not None

    def close(self) -> None:
        if self._rounds is None:
            self._wire.close()
        else:
            self._wire.abort()


class _GroupInbox(Inbox):
    """Two rounds' worth, for the time of a pass."""

    def __init__(self, landing: Landing, device: torch.device) -> None:
        self.sources = landing.sources
        self._landing = landing
        self._slots = torch.empty(2, landing.sources.largest, dtype=landing.dtype, device=device)
        self._placed: tuple[set[Part], set[Part]] = set(), set()  # of the round in each slot, what comes to the model itself

    def is_free(self, number: int) -> bool:
        return True

    def slot(self, number: int) -> torch.Tensor:
        return self._slots[number % 2]

    def place(self, number: int, part: Part) -> torch.Tensor | None:
        place = self._landing.place(part)
        if place is not None:
            self._placed[number % 2].add(part)
        return place

    def deliver(self, number: int) -> None:
        self._landing.unpack(number, self.slot(number), self._placed[number % 2])
        self._placed[number % 2].clear()
        if self._slots.is_cuda:
            torch.cuda.current_stream(self._slots.device).synchronize()  # what comes next comes in another stream
