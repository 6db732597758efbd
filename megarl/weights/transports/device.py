"""The carrier `device`: a trainer rank and the engine rank on the same device share slots of that device's memory.

What an engine rank needs from other devices comes to the trainer rank beside it first, in the trainers' own process group, straight
into the slots. Nobody has to see another's device, and on any number of nodes each pair is on one.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from megarl.weights.execution import PATIENCE_S, SLICE_S, Inbox, Lane, Rounds, Side
from megarl.weights.ipc import SlotAddress, SlotReader, SlotWriter
from megarl.weights.p2p import Wire
from megarl.weights.plan import NUM_SLOTS, Stream, TransferPlan
from megarl.weights.shards import Shards
from megarl.weights.transports.interface import Buffers, EngineEnd, Landing, Opened, TrainerEnd


class DevicePlace(NamedTuple):
    """Where an engine rank finds its slots. `device`: its own, by its name in the plan."""

    address: SlotAddress
    device: str


class DeviceRoute(NamedTuple):
    """To the ranks of one engine. beside: of each, the trainer rank on its device. sources: of each, what it gets, by trainer ranks.
    relays: by trainer rank, what it sends to those beside engine ranks on other devices than its own."""

    beside: tuple[int, ...]
    sources: tuple[dict[int, Stream], ...]
    relays: dict[int, dict[int, Stream]]


def device_route(plan: TransferPlan, trainer_devices: Sequence[str], targets: Mapping[int, str]) -> DeviceRoute:
    """`targets`: the engine's ranks, as the plan counts them, and the device of each. Raises ValueError where a device has no trainer."""
    beside: list[int] = []
    relays: dict[int, dict[int, Stream]] = {}
    for target, device in targets.items():
        if device not in trainer_devices:
            raise ValueError(f"an engine rank works on device {device}, on which there is no trainer rank: use resharding.transport=group")
        beside.append(trainer_devices.index(device))
        for source, stream in plan.of_target(target).items():
            if source != beside[-1]:
                relays.setdefault(source, {})[beside[-1]] = stream
    return DeviceRoute(tuple(beside), tuple(plan.of_target(target) for target in targets), relays)


class DeviceTrainerEnd(TrainerEnd):
    """`rank`: of this process in the trainers' process group, which `wire` is."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank
        self._relayed: dict[int, dict[int, Stream]] = {}  # by replica and by the trainer rank beside its target
        self._inbox: _DeviceInbox | None = None
        self._buffers = Buffers()

    def serve(self, replica: int, device_name: str, sources: Mapping[int, Stream], dtype: torch.dtype, device: torch.device) -> SlotAddress:
        """The rank of `replica` on this device, which the plan calls `device_name`, gets from these trainer ranks, of which this one may
        be one, through slots."""
        self._let_go()
        self._inbox = _DeviceInbox(replica, Side(sources), self._rank, dtype, device, device_name)
        return self._inbox.slots.address

    def relay(self, replica: int, streams: Mapping[int, Stream]) -> None:
        """What the ranks of `replica` on other devices get from this one, by the trainer ranks beside them."""
        self._relayed[replica] = dict(streams)

    def open(self, shards: Shards, replicas: Collection[int]) -> Opened:
        sends = Side(
            {peer: stream for replica in sorted(self._relayed.keys() & set(replicas)) for peer, stream in self._relayed[replica].items()}
        )
        inbox = self._inbox if self._inbox is not None and self._inbox.replica in replicas else None
        buffers = self._buffers.take(sends.largest, shards.dtype, shards.device)
        num_rounds = max(sends.num_rounds, 0 if inbox is None else inbox.sources.num_rounds)
        lane = Lane(self._wire, sends, receives=inbox is not None)
        own = 0 if inbox is None else inbox.own_numel
        kept = 0 if inbox is None else inbox.slots.nbytes
        rounds = Rounds([lane], num_rounds, buffers, shards.regions, inbox)
        return Opened(rounds, (sends.numel + own) * shards.dtype.itemsize, buffers.nbytes + kept)

    def leave(self, replica: int) -> None:
        self._relayed.pop(replica, None)
        if self._inbox is not None and self._inbox.replica == replica:
            self._let_go()

    def _let_go(self) -> None:
        if self._inbox is not None:
            self._inbox.slots.close()
            self._inbox = None

    def release(self) -> None:
        self._buffers.release()
        if self._inbox is not None:
            self._inbox.slots.empty()

    def close(self) -> None:
        self._buffers.release()
        self._let_go()
        self._relayed = {}


class _DeviceInbox(Inbox):
    """The slots of the engine rank on this device."""

    def __init__(self, replica: int, sources: Side, rank: int, dtype: torch.dtype, device: torch.device, device_name: str) -> None:
        self.replica, self.sources = replica, sources
        self.own = rank if rank in sources.streams else None
        self.slots = SlotWriter(max(1, sources.largest) * dtype.itemsize, NUM_SLOTS, device, device_name)
        self._dtype = dtype

    @property
    def own_numel(self) -> int:
        return 0 if self.own is None else self.sources.streams[self.own].numel

    def is_free(self, number: int) -> bool:
        return self.slots.is_free(number, PATIENCE_S)

    def slot(self, number: int) -> torch.Tensor:
        return self.slots.slot(number, self._dtype)

    def deliver(self, number: int) -> None:
        self.slots.has_written()

    def is_taken(self) -> bool:
        return self.slots.is_read(self.sources.num_rounds, PATIENCE_S)


class DeviceEngineEnd(EngineEnd):
    def __init__(self, place: DevicePlace, device: torch.device) -> None:
        self._reader = SlotReader(place.address, device, place.device)
        self._number = 0  # of the next round

    def receive(self, landing: Landing) -> bool:
        deadline_s = time.monotonic() + SLICE_S
        with torch.no_grad():
            while self._number < landing.sources.num_rounds:
                if time.monotonic() > deadline_s or not self._reader.is_written(self._number, PATIENCE_S):
                    return False
                landing.unpack(self._number, self._reader.slot(self._number, landing.dtype))
                self._reader.has_read()
                self._number += 1
        self._reader.end(landing.sources.num_rounds)
        self._number = 0
        return True

    @property
    def is_under_way(self) -> bool:
        return self._number > 0

    def close(self) -> None:
        self._reader.close()
