"""How long processes have not answered the questions of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError

_AGAIN_S = 0.05  # interval between two questions if errors come at once


class ProcessSilence[K]:
    """Waits for answers, and measures how long each process has not answered.

    An answer that comes too late for its question still shows that the process is alive. The clock is that of
    this process.
    """

    def __init__(self) -> None:
        self._unanswered: dict[K, list[ray.ObjectRef]] = {}
        self._since_s: dict[K, float] = {}

    def wait(self, asked: Mapping[K, ray.ObjectRef], limit_s: float) -> dict[K, Any]:
        """Wait for the answers to new questions. Returns answers, and errors of Ray, by process.

        Processes that do not answer within `limit_s` are left out. An error is no answer.
        """
        asked_s = time.monotonic()
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s)
        answers = {key: _answer(reference) for key, reference in asked.items() if reference in ready}

        for key, reference in asked.items():
            earlier = self._unanswered.pop(key, [])
            if key in answers and not isinstance(answers[key], RayError):
                self._since_s.pop(key, None)
                continue
            late, missing = ray.wait(earlier, num_returns=len(earlier), timeout=0) if earlier else ([], [])
            # A late answer shows that the process is slow rather than lost, so its silence starts again.
            if any(not isinstance(_answer(each), RayError) for each in late):
                self._since_s[key] = time.monotonic()
            self._since_s.setdefault(key, asked_s)
            self._unanswered[key] = missing if key in answers else [*missing, reference]

        return answers

    def ask(
        self,
        keys: Iterable[K],
        question: Callable[[K], ray.ObjectRef],
        *,
        limit_s: float,
        lost_s: float,
        waits: bool = True,
    ) -> tuple[dict[K, Any], set[K]]:
        """Ask processes. Returns the answers, and which processes are lost.

        Args:
            keys: The processes.
            question: Sends a question to a process.
            limit_s: How long answers are awaited before the processes are asked again.
            lost_s: A process that has not answered for this long is lost, as one that has died.
            waits: Whether to ask again until each process has answered or is lost. Otherwise, others are left
                out.
        """
        questions: dict[K, list[ray.ObjectRef]] = {key: [] for key in keys}
        answers: dict[K, Any] = {}
        lost: set[K] = set()
        left = list(questions)

        while left:
            for key in left:
                questions[key].append(question(key))
            # All that do not answer are awaited together.
            self.wait({key: questions[key][-1] for key in left}, limit_s)
            for key in left:
                # Late answers count, too: a process may need longer than `limit_s` for each.
                found = _answers(questions[key])
                if any(isinstance(answer, (ActorDiedError, ActorUnschedulableError)) for answer in found):
                    lost.add(key)
                elif real := [answer for answer in found if not isinstance(answer, RayError)]:
                    answers[key] = real[-1]
                elif self.seconds(key) >= lost_s:
                    lost.add(key)
            if not waits:
                break
            if left := [key for key in left if key not in answers and key not in lost]:
                time.sleep(_AGAIN_S)

        return answers, lost

    def seconds(self, key: K) -> float:
        """Return how long a process has not answered: 0 if it has answered the last question.

        The time begins with its last answer, or with the first question that it has not answered since then.
        """
        since_s = self._since_s.get(key)
        return 0.0 if since_s is None else time.monotonic() - since_s

    def forget(self, key: K) -> None:
        """Forget the questions to a process, because another one takes its place."""
        self._unanswered.pop(key, None)
        self._since_s.pop(key, None)


def _answers(references: list[ray.ObjectRef]) -> list[Any]:
    """Return the answers and errors that have come."""
    ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
    return [_answer(reference) for reference in ready]


def _answer(reference: ray.ObjectRef) -> Any:
    try:
        return ray.get(reference)
    except RayError as error:
        return error
