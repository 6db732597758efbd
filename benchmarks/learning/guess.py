"""A game for an agent: the model guesses a number, and learns after each guess whether it is higher or lower."""

from __future__ import annotations

from benchmarks.learning.reward import last_number
from megarl.agents.protocol import Reply, Task, Turn


class Game:
    """Answer guesses. The reward is 1 for the turn that names the number."""

    async def start(self, task: Task) -> None:
        self._secret = int(task.ground_truth)

    async def respond(self, turn: Turn) -> Reply:
        guess = last_number(turn.text)
        if not guess:
            return _said("Reply with one number.")
        if int(guess) == self._secret:
            return Reply(reward=1.0, is_done=True)

        return _said("higher" if int(guess) < self._secret else "lower")

    async def close(self) -> None:
        """Nothing is open."""


def _said(text: str) -> Reply:
    return Reply(messages=[{"role": "user", "content": text}])
