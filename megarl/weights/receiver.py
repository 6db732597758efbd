"""What an engine rank takes its weights with, whatever carries them, and what it must know for it, which travels as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.weights.execution import Side
from megarl.weights.ipc import SlotAddress
from megarl.weights.p2p import WireAddress
from megarl.weights.plan import Boxes, Part, Stream
from megarl.weights.tensors import Rectangle, WeightTransferError
from megarl.weights.transports.device import DeviceEngineEnd, DevicePlace
from megarl.weights.transports.group import GroupEngineEnd, GroupPlace
from megarl.weights.transports.interface import EngineEnd, Landing, Places

# Carrier -> an engine rank's place on it, the address in that, and the end that it opens there.
_CARRIERS: dict[str, tuple[type, type, type]] = {
    "device": (DevicePlace, SlotAddress, DeviceEngineEnd),
    "group": (GroupPlace, WireAddress, GroupEngineEnd),
}


@dataclass(frozen=True)
class EngineLink:
    """Of one engine rank. `streams`: by the ranks that they come from, as the place counts them."""

    place: GroupPlace | DevicePlace
    streams: Mapping[int, Stream]
    dtype: torch.dtype

    def open(self, device: torch.device) -> EngineEnd:
        """Raises WeightTransferError where the trainers are not there."""
        *_, end = _CARRIERS[self._carrier]
        return end(self.place, device)

    @property
    def _carrier(self) -> str:
        return next(name for name, (place, *_) in _CARRIERS.items() if isinstance(self.place, place))

    def encode(self) -> dict[str, Any]:
        assert all(stream.bounds is None for stream in self.streams.values()), "bounds of rounds do not travel: only files have them"
        return {
            "carrier": self._carrier,
            "place": self.place,
            "streams": {source: [(name, encode_box(box)) for name, box in stream.parts] for source, stream in self.streams.items()},
            "num_rounds": {source: stream.num_rounds for source, stream in self.streams.items()},
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @classmethod
    def decode(cls, encoded: Mapping[str, Any]) -> EngineLink:
        place, address, _ = _CARRIERS[encoded["carrier"]]
        first, second = encoded["place"]
        streams = {
            int(source): Stream([Part(name, decode_box(corners)) for name, corners in parts], encoded["num_rounds"][source])
            for source, parts in encoded["streams"].items()
        }
        return cls(place(address(*first), second), streams, getattr(torch, encoded["dtype"]))


def encode_box(box: Rectangle) -> list[list[int]]:
    return [list(box.starts), list(box.stops)]


def decode_box(corners: Sequence[Sequence[int]]) -> Rectangle:
    starts, stops = corners
    return Rectangle(tuple(starts), tuple(stops))


class WeightReceiver:
    """Of one rank, which works on `device`. received_bytes: since it joined."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._end: EngineEnd | None = None
        self._landing: Landing | None = None

    def join(self, link: EngineLink, needed: Boxes, places: Places) -> None:
        """In the place of what was joined before. Raises WeightTransferError where the trainers are not there, or would not send each
        element of `needed` once."""
        self.leave()
        self._landing = Landing(Side(link.streams), needed, link.dtype, places)
        self._end = link.open(self._device)

    def begin(self, has_moved: bool = False) -> None:
        """Before the first `receive` of an update. has_moved: the model has its parameters elsewhere.

        Raises WeightTransferError where none was joined, or what was begun before was given up in the middle.
        """
        if self._end is None or self._landing is None:
            raise WeightTransferError("the engine has joined no trainer")
        if self._end.is_under_way:
            raise WeightTransferError("the previous weight update was aborted halfway: join the trainers again")
        if has_moved:
            self._landing.forget()

    def receive(self) -> bool:
        """Whether everything has arrived; False after a while, to be called again: it goes on."""
        assert self._end is not None
        assert self._landing is not None
        return self._end.receive(self._landing)

    @property
    def received_bytes(self) -> int:
        return 0 if self._landing is None else self._landing.received_bytes

    def leave(self) -> None:
        if self._end is not None:
            self._end.close()
        self._end = self._landing = None
