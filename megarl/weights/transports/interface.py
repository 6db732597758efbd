"""The interface of a transport: the sender of a trainer rank, and where an engine rank puts what it receives.

Both sides open each pass (see receiver.py for the engine's), and run a `Transfer` until it is complete. A
pass consists of rounds. A receiver knows where its model stores each part, and checks that everything
arrives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.machine.errors import counted
from megarl.weights.block_scaling import QuantizedShards
from megarl.weights.ipc import IPCAddress
from megarl.weights.message_words import Places, WordCounts
from megarl.weights.p2p import P2PAddress
from megarl.weights.patch import Change, apply_change
from megarl.weights.shards import Shards
from megarl.weights.tensors import (
    Part,
    PeerTransfers,
    TensorSlice,
    TransferSchedule,
    WeightTransferError,
    tiling_fault,
)
from megarl.weights.transfer import Transfer, copy_tensors

_MAX_NAMED = 8

SentShards = Shards | QuantizedShards


@dataclass(frozen=True)
class EngineLink:
    """How one rank, of the trainers or of an engine, takes part in the weight syncs of one engine.

    It is sent as JSON to the ranks of engines in other processes than their worker.

    Attributes:
        peers: What the rank sends or receives, by the numbers of its peers.
        dtype: The dtype of the messages.
        address: The group of the engine, or the IPC buffers of its rank. None: there are files.
        rank: The number of the rank in the group, in which the trainer ranks come first; of an engine rank
            that reads files, its number within the engine.
        device: The name of an engine rank's device in the plan, if it reads IPC buffers.
        words: The numbers of words of tensors with a wider dtype (see message_words.py).
        sends_changes: Whether only what changed since the engine's last weights is sent.
    """

    peers: PeerTransfers
    dtype: torch.dtype
    address: P2PAddress | IPCAddress | None = None
    rank: int = 0
    device: str = ""
    words: WordCounts = field(default_factory=dict)
    sends_changes: bool = False

    def encode(self) -> dict[str, Any]:
        peers = [
            (
                peer,
                [(name, encode_slice(tensor_slice)) for name, tensor_slice in schedule.parts],
                schedule.bounds,
            )
            for peer, schedule in self.peers.schedules.items()
        ]
        return {**vars(self), "peers": peers, "dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def decode(cls, encoded: Mapping[str, Any]) -> EngineLink:
        schedules = {
            peer: TransferSchedule(
                [Part(name, decode_slice(corners)) for name, corners in parts], bounds=bounds
            )
            for peer, parts, bounds in encoded["peers"]
        }
        fields: dict[str, Any] = {
            **encoded,
            "peers": PeerTransfers(schedules),
            "dtype": getattr(torch, encoded["dtype"]),
        }
        if fields["address"] is not None:
            address_type = IPCAddress if fields["device"] else P2PAddress
            fields["address"] = address_type(*fields["address"])
        return cls(**fields)


def encode_slice(tensor_slice: TensorSlice) -> list[list[int]]:
    return [list(tensor_slice.starts), list(tensor_slice.stops)]


def decode_slice(corners: Sequence[Sequence[int]]) -> TensorSlice:
    starts, stops = corners
    return TensorSlice(tuple(starts), tuple(stops))


class Sender(ABC):
    """The trainer-rank side of a transport, for all replicas (by number) that the rank sends to.

    Two messages are packed into buffers that are kept between passes, because allocating them takes longer
    than packing a message.
    """

    def __init__(self) -> None:
        self._buffers = torch.empty(2, 0)

    @abstractmethod
    def open(
        self,
        shards: SentShards,
        replicas: Collection[int],
        first_round: int = 0,
        folder: Path | None = None,
    ) -> Transfer:
        """Start a pass that sends the current weights to these replicas.

        Args:
            first_round: The round to start with.
            folder: An empty folder for the pass, if it goes through files.
        """

    @abstractmethod
    def leave(self, replica: int) -> None:
        """Forget a replica, even in the middle of a pass. Does nothing if it is unknown."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""

    def release(self) -> None:
        """Release memory between two passes."""
        self._buffers = torch.empty(2, 0)

    def _pack_buffers(self, numel: int, shards: SentShards) -> torch.Tensor:
        """Return buffers of shape (2, numel)."""
        dtype, device = shards.dtype, shards.device
        if self._buffers.shape[1] != numel or self._buffers.dtype != dtype or self._buffers.device != device:
            self._buffers = torch.empty(2, 0)  # freed before the new ones are allocated
            self._buffers = torch.empty(2, numel, dtype=dtype, device=device)
        return self._buffers


class DestinationViews:
    """The views of a model's parameters that received parts are copied to.

    Args:
        sources: The schedules by the senders' ranks.
        needed: The slices that the model needs.
        dtype: The dtype of the messages.
        places: Finds the views of a part. It is called once per part, and again after `forget`, which must be
            called when the model has moved.

    Attributes:
        is_whole: Whether the memory contains all of the last weights that were received as patches.

    Raises:
        WeightTransferError: The schedules do not deliver each element of `needed` exactly once.
    """

    def __init__(
        self,
        sources: PeerTransfers,
        needed: Mapping[str, Sequence[TensorSlice]],
        dtype: torch.dtype,
        places: Places,
    ) -> None:
        _check(sources, needed)
        self._all = sources
        self.sources = sources
        self.dtype = dtype
        self.places_of = places

        # The cache must not contain views of a receive buffer: they would keep the buffer alive.
        self._targets: dict[Part, list[torch.Tensor]] = {}
        self.is_whole = False
        self.received_bytes = 0

    def begin(self, first_round: int) -> None:
        """Expect the rounds from `first_round` on in the next pass."""
        self.sources = self._all.after(first_round)

    def place(self, part: Part) -> torch.Tensor | None:
        """Return the flat memory of a part if the model stores it contiguously and in one place only."""
        targets = self._targets_of(part)

        # Parts of another dtype, or in several places, have to be copied out of the buffer.
        if len(targets) == 1 and targets[0].is_contiguous() and targets[0].dtype == self.dtype:
            return targets[0].view(-1)
        return None

    def unpack(self, number: int, buffer: torch.Tensor, placed: Collection[Part] = ()) -> None:
        """Copy a round out of its flat buffer, except for the parts that were received directly."""
        targets = []
        sources = []
        for part, elements in self.sources.parts(number, buffer):
            if part not in placed:
                for target in self._targets_of(part):
                    targets.append(target)
                    sources.append(elements)

        copy_tensors(targets, sources)
        self.received_bytes += self.sources.length(number) * self.dtype.itemsize

    def apply(self, parts: Sequence[Part], change: Change | None) -> None:
        """Write what changed in a chunk, which consists of `parts`, to the model.

        Raises:
            WeightTransferError: The model does not have the elements that did not change.
        """
        if not self.is_whole and (change is None or change[0] is not None):
            raise WeightTransferError(
                "only what changed since the last weights was sent, but the engine's parameters no longer "
                "have them: restart the engine"
            )
        if change is not None:
            apply_change(change, [(part.tensor_slice.volume, self._targets_of(part)) for part in parts])

    def _targets_of(self, part: Part) -> list[torch.Tensor]:
        if part not in self._targets:
            self._targets[part] = list(self.places_of(part))
        return self._targets[part]

    def forget(self) -> None:
        self._targets = {}
        self.is_whole = False


def _check(sources: PeerTransfers, needed: Mapping[str, Sequence[TensorSlice]]) -> None:
    """Check that the rounds deliver each needed element exactly once."""
    coming: dict[str, list[TensorSlice]] = defaultdict(list)
    for schedule in sources.schedules.values():
        for name, tensor_slice in schedule.parts:
            coming[name].append(tensor_slice)

    faults = [f"{name} is not needed here" for name in coming.keys() - needed.keys()]
    for name, slices in needed.items():
        for tensor_slice in slices:
            # The arriving parts must tile the slice that is needed.
            inside = [
                shared
                for part in coming.get(name, ())
                if (shared := part.intersect(tensor_slice)) is not None
            ]
            if (
                fault := tiling_fault(
                    tensor_slice.shape, [part.relative_to(tensor_slice.starts) for part in inside]
                )
            ) is not None:
                faults.append(f"{name} {tensor_slice}: {fault}")

    if faults:
        raise WeightTransferError(
            f"{counted(len(faults), 'tensor')} would not arrive complete: " + "; ".join(faults[:_MAX_NAMED])
        )
