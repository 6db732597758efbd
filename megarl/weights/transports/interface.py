"""The interface of a transport: the sender of a trainer rank and the receiver of an engine rank.

A sender sends the weights in passes of rounds. A receiver knows where its model keeps what arrives, and
checks that everything arrives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from megarl.machine.usage import PeakMemory
from megarl.weights.execution import PeerTransfers, PipelinedTransfer, copy_tensors
from megarl.weights.schedule import Part
from megarl.weights.shards import Shards
from megarl.weights.tensors import TensorSlice, WeightTransferError, tiling_fault

# the views that a part is copied to, in the shape of its slice
Places = Callable[[Part], Iterable[torch.Tensor]]
_MAX_NAMED = 8


class SendReport(NamedTuple):
    """Of one rank and one pass. packing_s: copying into messages; waiting_s: for others. nbytes: given away
    by this rank.
    planned_extra_bytes: of all buffers; measured_extra_bytes: the most memory that the process took beyond
    what it had, in which buffers that were kept from the pass before do not count. lost: replicas that are
    gone or were dropped, and why."""

    packing_s: float
    waiting_s: float
    nbytes: int
    planned_extra_bytes: int
    measured_extra_bytes: int
    lost: Mapping[int, str]


class Opened(NamedTuple):
    transfer: PipelinedTransfer
    nbytes: int
    buffer_bytes: int


class Sender(ABC):
    """A trainer rank's side of a transport, for all replicas (by number) that it sends to."""

    @abstractmethod
    def open(self, shards: Shards, replicas: Collection[int]) -> Opened:
        """Starts a pass that sends the current weights to these replicas."""

    @abstractmethod
    def leave(self, replica: int) -> None:
        """Forgets a replica, whatever is under way. Does nothing if it is unknown."""

    @abstractmethod
    def close(self) -> None:
        """Releases everything."""

    @abstractmethod
    def release(self) -> None:
        """Releases memory between two passes."""


class SendPass:
    """A pass over the weights that is under way."""

    def __init__(self, sender: Sender, shards: Shards, replicas: Collection[int]) -> None:
        self._peak = PeakMemory(shards.device)
        self._opened = sender.open(shards, replicas)

    def run(self, dropped: Collection[int]) -> SendReport | None:
        """None where others say nothing for a while: to be called again, it continues. Raises
        WeightTransferError where a rank is gone without whom there is no transfer."""
        transfer = self._opened.transfer
        if not transfer.run(dropped):
            return None
        return SendReport(
            packing_s=transfer.packing.seconds(),
            waiting_s=transfer.waiting_s,
            nbytes=self._opened.nbytes,
            planned_extra_bytes=self._opened.buffer_bytes,
            measured_extra_bytes=self._peak.extra_bytes(),
            lost=transfer.lost,
        )


class PackBuffers:
    """The memory of two messages to pack into.

    It is kept from one pass to the next, because allocating it takes longer than packing a message.
    """

    def __init__(self) -> None:
        self._buffers = torch.empty(2, 0)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """(2, numel)."""
        if self._buffers.shape[1] != numel or self._buffers.dtype != dtype or self._buffers.device != device:
            self.release()
            self._buffers = torch.empty(2, numel, dtype=dtype, device=device)
        return self._buffers

    def release(self) -> None:
        self._buffers = torch.empty(2, 0)


class DestinationViews:
    """The views of a model's parameters that received parts are copied to.

    Args:
        sources: The schedules by the senders' ranks.
        needed: The slices that the model needs.
        dtype: The dtype of the messages.
        places: Finds the views of a part. It is asked once per part, until `forget` is called because the
            model has moved.

    Raises:
        WeightTransferError: The schedules do not bring each element of `needed` once.
    """

    def __init__(
        self,
        sources: PeerTransfers,
        needed: Mapping[str, Sequence[TensorSlice]],
        dtype: torch.dtype,
        places: Places,
    ) -> None:
        _check(sources, needed)
        self.sources = sources
        self.dtype = dtype
        self.places_of = places

        # no views of a receive buffer, which they would keep alive
        self._targets: dict[Part, list[torch.Tensor]] = {}
        self.received_bytes = 0

    def place(self, part: Part) -> torch.Tensor | None:
        """Returns the flat memory of a part if the model keeps it in one contiguous piece, and only there."""
        targets = self._targets_of(part)

        # Elements of another dtype, or in several pieces, have to be copied out of the buffer.
        if len(targets) == 1 and targets[0].is_contiguous() and targets[0].dtype == self.dtype:
            return targets[0].view(-1)
        return None

    def unpack(self, number: int, buffer: torch.Tensor, placed: Collection[Part] = ()) -> None:
        """Copies a round out of its flat buffer, except for the parts that were received directly."""
        targets = []
        sources = []
        for part, elements in self.sources.parts(number, buffer):
            if part not in placed:
                for target in self._targets_of(part):
                    targets.append(target)
                    sources.append(elements)

        copy_tensors(targets, sources)
        self.received_bytes += self.sources.length(number) * self.dtype.itemsize

    def _targets_of(self, part: Part) -> list[torch.Tensor]:
        if part not in self._targets:
            self._targets[part] = list(self.places_of(part))
        return self._targets[part]

    def forget(self) -> None:
        self._targets = {}


class Receiver(ABC):
    """An engine rank's side of a transport. Methods raise WeightTransferError if the trainer is gone."""

    @abstractmethod
    def receive(self, destinations: DestinationViews) -> bool:
        """Receives all weights while the trainer sends them. Returns False after a while; call it again
        then."""

    @property
    @abstractmethod
    def is_under_way(self) -> bool:
        """Whether some of the weights have been received, and some not."""

    @abstractmethod
    def close(self) -> None:
        """Disconnects from the trainer, whatever is under way."""


def _check(sources: PeerTransfers, needed: Mapping[str, Sequence[TensorSlice]]) -> None:
    """Checks that the rounds bring each needed element once."""
    coming: dict[str, list[TensorSlice]] = defaultdict(list)
    for schedule in sources.schedules.values():
        for name, tensor_slice in schedule.parts:
            coming[name].append(tensor_slice)

    faults = [f"{name} does not belong here" for name in coming.keys() - needed.keys()]
    for name, slices in needed.items():
        for tensor_slice in slices:
            # The parts that arrive must tile the slice that is needed.
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
            f"{len(faults)} tensors would not arrive whole: " + "; ".join(faults[:_MAX_NAMED])
        )
