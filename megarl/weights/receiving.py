"""An engine rank's part in taking weights, whoever brings them: where its model keeps what it needs, and the proof that all of it comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from megarl.weights.boxes import Rectangle, tiling_fault
from megarl.weights.plan import Part
from megarl.weights.receipt import WeightTransferError
from megarl.weights.rounds import Side

Places = Callable[[Part], Iterable[torch.Tensor]]  # the views that are to become a part, in the shape of its box

_MAX_NAMED = 8


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
