"""What every engine rank takes its weights with, whatever carries them."""

from __future__ import annotations

import torch

from megarl.weights.carriers.ends import EngineEnd
from megarl.weights.carriers.links import EngineLink
from megarl.weights.landing import Landing, Places
from megarl.weights.plan import Boxes
from megarl.weights.receipt import WeightTransferError
from megarl.weights.rounds import Side


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
            raise WeightTransferError("the weights before these were given up in the middle: join the trainers anew")
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
