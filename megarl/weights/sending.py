"""A trainer rank's part in giving weights away, whoever takes them: one pass of rounds, and what it took."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from megarl.machine.memory import PeakMemory
from megarl.weights.rounds import Rounds
from megarl.weights.shards import Shards


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
