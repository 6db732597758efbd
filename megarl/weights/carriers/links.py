"""What an engine rank must know to receive weights: its place on a carrier, and what comes from whom. It travels as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.weights.boxes import Rectangle
from megarl.weights.carriers.device import DeviceEngineEnd, DevicePlace
from megarl.weights.carriers.ends import EngineEnd
from megarl.weights.carriers.group import GroupEngineEnd, GroupPlace
from megarl.weights.plan import Part, Stream
from megarl.weights.slots import SlotAddress
from megarl.weights.wire import WireAddress


@dataclass(frozen=True)
class EngineLink:
    """Of one engine rank. `streams`: by the ranks that they come from, as the place counts them."""

    place: GroupPlace | DevicePlace
    streams: Mapping[int, Stream]
    dtype: torch.dtype

    def open(self, device: torch.device) -> EngineEnd:
        """Raises WeightTransferError where the trainers are not there."""
        if isinstance(self.place, GroupPlace):
            return GroupEngineEnd(self.place, device)
        return DeviceEngineEnd(self.place, device)

    def encode(self) -> dict[str, Any]:
        assert all(stream.bounds is None for stream in self.streams.values()), "bounds of rounds do not travel: only files have them"
        return {
            "place": self.place,
            "is_group": isinstance(self.place, GroupPlace),
            "streams": {source: _encode_stream(stream) for source, stream in self.streams.items()},
            "num_rounds": {source: stream.num_rounds for source, stream in self.streams.items()},
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @classmethod
    def decode(cls, encoded: Mapping[str, Any]) -> EngineLink:
        address, second = encoded["place"]
        place = GroupPlace(WireAddress(*address), second) if encoded["is_group"] else DevicePlace(SlotAddress(*address), second)
        streams = {
            int(source): Stream([Part(name, decode_box(corners)) for name, corners in parts], encoded["num_rounds"][source])
            for source, parts in encoded["streams"].items()
        }
        return cls(place, streams, getattr(torch, encoded["dtype"]))


def _encode_stream(stream: Stream) -> list[tuple[str, list[list[int]]]]:
    return [(name, encode_box(box)) for name, box in stream.parts]


def encode_box(box: Rectangle) -> list[list[int]]:
    return [list(box.starts), list(box.stops)]


def decode_box(corners: Sequence[Sequence[int]]) -> Rectangle:
    starts, stops = corners
    return Rectangle(tuple(starts), tuple(stops))
