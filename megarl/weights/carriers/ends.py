"""What every carrier's engine end offers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megarl.weights.landing import Landing


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
