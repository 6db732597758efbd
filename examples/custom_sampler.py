"""Choose the prompts of each step with your own sampler: here, those that are not solved yet.

    megarl train CONFIG data.curriculum.sampler=examples/custom_sampler.py:UnsolvedPrompts

A sampler is created with the prompts of `data.train_files` and `data.seed`. megarl asks it for the rows of
each step, and passes it the scores of their samples when the step is trained. docs/data.md describes the
methods.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from megarl.data.prompts import Prompt


class UnsolvedPrompts:
    """Serves the prompts in epochs, without those whose samples all scored 1 when they were served last.

    If none is left, all prompts are served again.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.num_rows = len(prompts)
        self.seed = seed
        self.num_epochs = 0
        self.waiting: list[int] = []  # the rest of the epoch
        self.solved: set[int] = set()

    def sample(self, count: int) -> list[int]:
        rows: list[int] = []
        while len(rows) < count:
            if not self.waiting:
                self.begin_epoch()
            rows.append(self.waiting.pop())
        return rows

    def begin_epoch(self) -> None:
        if len(self.solved) == self.num_rows:
            self.solved.clear()
        self.waiting = [row for row in range(self.num_rows) if row not in self.solved]
        random.Random(self.seed + self.num_epochs).shuffle(self.waiting)
        self.num_epochs += 1

    def update(self, rows: Sequence[int], scores: Sequence[Sequence[float]]) -> None:
        for row, of_row in zip(rows, scores, strict=True):
            if min(of_row) >= 1.0:
                self.solved.add(row)
            else:
                self.solved.discard(row)

    def state_dict(self) -> dict[str, Any]:
        return {"num_epochs": self.num_epochs, "waiting": self.waiting, "solved": sorted(self.solved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_epochs = state["num_epochs"]
        self.waiting = state["waiting"]
        self.solved = set(state["solved"])

    def metrics(self) -> dict[str, float]:
        return {"solved": len(self.solved) / self.num_rows}  # logged as curriculum/solved
