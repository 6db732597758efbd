"""The two ends of a carrier, whichever it is: a trainer rank's, which gives weights away in passes of rounds, and an engine rank's, which
knows where its model keeps what comes, and proves that all of it comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from megarl.machine.usage import PeakMemory
from megarl.weights.execution import Rounds, Side
from megarl.weights.plan import Part
from megarl.weights.shards import Shards
from megarl.weights.tensors import Rectangle, WeightTransferError, tiling_fault

Places = Callable[[Part], Iterable[torch.Tensor]]  # the views that are to become a part, in the shape of its box
_MAX_NAMED = 8


class SendReport(NamedTuple):
    """Of one rank and one pass. packing_s: copying into messages; waiting_s: for others. nbytes: given away by this rank.
    planned_extra_bytes: of all buffers; measured_extra_bytes: the most memory that the process took beyond what it had, in which
    buffers that were kept from the pass before do not count. lost: replicas that are gone or were given up, and why."""

    packing_s: float
    waiting_s: float
    nbytes: int
    planned_extra_bytes: int
    measured_extra_bytes: int
    lost: Mapping[int, str]


class Opened(NamedTuple):
    rounds: Rounds
    nbytes: int
    buffer_bytes: int


class TrainerEnd(ABC):
    """A trainer rank's end of a carrier, for all replicas (by number) that it has to do with."""

    @abstractmethod
    def open(self, shards: Shards, replicas: Collection[int]) -> Opened:
        """A pass of the weights as they are now, to these replicas."""

    @abstractmethod
    def leave(self, replica: int) -> None:
        """Forgets a replica, whatever is under way. Nothing where it is not known."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back."""

    @abstractmethod
    def release(self) -> None:
        """Between two passes: gives memory back until the next."""


class Sending:
    """A pass under way."""

    def __init__(self, end: TrainerEnd, shards: Shards, replicas: Collection[int]) -> None:
        self._peak = PeakMemory(shards.device)
        self._opened = end.open(shards, replicas)

    def run(self, given_up: Collection[int]) -> SendReport | None:
        """None where others say nothing for a while: to be called again, it goes on. Raises WeightTransferError where a rank is gone
        without whom there is no transfer."""
        rounds = self._opened.rounds
        if not rounds.run(given_up):
            return None
        return SendReport(
            packing_s=rounds.packing.seconds(),
            waiting_s=rounds.waiting_s,
            nbytes=self._opened.nbytes,
            planned_extra_bytes=self._opened.buffer_bytes,
            measured_extra_bytes=self._peak.extra_bytes(),
            lost=rounds.lost,
        )


class Buffers:
    """Two messages' worth to pack into, kept from one pass to the next: the system takes longer to make memory than a message takes to
    be packed."""

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


class Landing:
    """`sources`: streams by the senders' ranks. `places` is asked once; `forget` where the model has moved.

    Raises WeightTransferError where the streams do not bring each element of `needed` once.
    """

    def __init__(self, sources: Side, needed: Mapping[str, Sequence[Rectangle]], dtype: torch.dtype, places: Places) -> None:
        _check(sources, needed)
        self.sources, self.dtype = sources, dtype
        self._places = places
        self._targets: dict[Part, list[torch.Tensor]] = {}  # nothing of a slot, which would live as long
        self.received_bytes = 0

    def place(self, part: Part) -> torch.Tensor | None:
        """Flat, where the model keeps the part in one piece, and there only."""
        targets = self._targets_of(part)
        if len(targets) == 1 and targets[0].is_contiguous() and targets[0].dtype == self.dtype:
            return targets[0].view(-1)
        return None

    def unpack(self, number: int, slot: torch.Tensor, placed: Collection[Part] = ()) -> None:
        """Round `number` lies in `slot`, flat, but for the parts that have come to their places."""
        for part, elements in self.sources.parts(number, slot):
            if part not in placed:
                for target in self._targets_of(part):
                    target.copy_(elements)
        self.received_bytes += self.sources.length(number) * self.dtype.itemsize

    def _targets_of(self, part: Part) -> list[torch.Tensor]:
        if part not in self._targets:
            self._targets[part] = list(self._places(part))
        return self._targets[part]

    def forget(self) -> None:
        self._targets = {}


class EngineEnd(ABC):
    """An engine rank's end of a carrier. Methods raise WeightTransferError where the trainer is gone."""

    @abstractmethod
    def receive(self, landing: Landing) -> bool:
        """Takes all weights while the trainer sends them. False after a while, to be called again: it goes on."""

    @property
    @abstractmethod
    def is_under_way(self) -> bool:
        """Whether some of the weights have been taken, and some not."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the trainer, whatever is under way."""


def _check(sources: Side, needed: Mapping[str, Sequence[Rectangle]]) -> None:
    """Of what comes in all rounds, as the rounds bring it."""
    coming: dict[str, list[Rectangle]] = defaultdict(list)
    for stream in sources.streams.values():
        for name, box in stream.parts:
            coming[name].append(box)
    faults = [f"{name} does not belong here" for name in coming.keys() - needed.keys()]
    for name, boxes in needed.items():
        for box in boxes:
            inside = [shared for part in coming.get(name, ()) if (shared := part.intersect(box)) is not None]
            if (fault := tiling_fault(box.shape, [part.relative_to(box.starts) for part in inside])) is not None:
                faults.append(f"{name} {box}: {fault}")
    if faults:
        raise WeightTransferError(f"{len(faults)} tensors would not arrive whole: " + "; ".join(faults[:_MAX_NAMED]))
