"""How long processes have not answered the questions of this process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError


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


def _answer(reference: ray.ObjectRef) -> Any:
    try:
        return ray.get(reference)
    except RayError as error:
        return error
