"""Losses that wait for each other: if the updates of actor and critic meet, they ran concurrently, however
slow the machine is."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from megarl.algorithms.losses import ActorLoss, CriticLoss, LossShare
from megarl.roles.start import PPORoles

_LIMIT_S = 120


@dataclass(frozen=True, kw_only=True)
class MeetingActorLoss(ActorLoss):
    folder: Path

    def __call__(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> LossShare:
        _meet(self.folder, "actor", "critic")
        return super().__call__(outputs, rows)


@dataclass(frozen=True, kw_only=True)
class MeetingCriticLoss(CriticLoss):
    folder: Path

    def __call__(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> LossShare:
        _meet(self.folder, "critic", "actor")
        return super().__call__(outputs, rows)


def _meet(folder: Path, me: str, other: str) -> None:
    (folder / me).touch()
    give_up = time.monotonic() + _LIMIT_S
    while not (folder / other).exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"no update of the {other} began in {_LIMIT_S} s of one of the {me}")
        time.sleep(0.01)


def meeting_in_step(
    step: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, PPORoles], None]:
    """Return a `look` function for `run_ppo`. In `step`, the first that trains both, neither update ends
    before the other has begun."""

    def look(current: int, roles: PPORoles) -> None:
        if current == step:
            for loss, waits in ((ActorLoss, MeetingActorLoss), (CriticLoss, MeetingCriticLoss)):
                monkeypatch.setattr(
                    f"megarl.roles.models.{loss.__name__}", functools.partial(waits, folder=folder)
                )

    return look
