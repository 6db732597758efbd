"""Explain why a process is gone, from Ray's errors, and measure how long processes have not answered.

Distinguishes failures of the process, its node and the network.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)

from megarl.controller import hints
from megarl.machine.errors import counted

# Errors which mean that the process, or what it returned, no longer exists.
LOST = (
    ActorUnavailableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)
UNKNOWN = "the process ended (killed, out of memory, or crashed)"

_NODE_DIED = re.compile(
    r"its node has died|health check failed|missed too many heartbeats|node (?:is|was) (?:dead|terminated)"
)
_NODE_REASON = re.compile(r"node was terminated(?: \w+)?: ([^\n]+)")
_NODE_ADDRESS = re.compile(r"^\s*ip: (\S+)$", re.MULTILINE)
_MEMORY_USED = re.compile(r"(\S+) used / (\S+) limit")
_SIGNAL = re.compile(r"The process receives a (SIG[A-Z]+)")
_EXIT_CODE = re.compile(r"exits with an exit code (-?\d+)")
_CRASH = re.compile(r"\*\*\* (SIG[A-Z]+) received|^Fatal Python error: ([^\n]+)", re.MULTILINE)


# Why a process is gone, in one line, and what to try.
ProcessLoss = tuple[str, tuple[str, ...]]


def why_lost(error: RayError, node: str | None, log: str, oom_kills: int) -> ProcessLoss:
    """Describe why a process is gone.

    Args:
        error: Ray's error, one of `LOST`.
        node: The address of the process's node, None if not known.
        log: The end of the process's standard error, empty if it cannot be read.
        oom_kills: The number of processes on that node that the kernel's OOM killer has ended during this
            run, 0 if not known.
    """
    text = str(error)
    # The memory monitor states its reason itself.
    if isinstance(error, OutOfMemoryError):
        used = _MEMORY_USED.search(text)
        memory = f" ({used[1]} of {used[2]} used)" if used else ""
        summary = f"Ray's memory monitor ended the process: its node is running out of memory{memory}"
        return summary, hints.MEMORY_MONITOR

    # A lost node takes its processes with it, so check for it before blaming the process.
    if isinstance(error, NodeDiedError) or _NODE_DIED.search(text):
        address = _NODE_ADDRESS.search(text)
        reason = _NODE_REASON.search(text)
        return node_lost(
            address[1] if address else node, reason[1].strip() if reason else "it no longer answers"
        )

    if isinstance(error, ActorUnavailableError):
        summary = (
            "the process cannot be reached: the connection broke, although its node is still part of the "
            "cluster"
        )
        return summary, hints.PROCESS_EXITED

    if isinstance(error, ObjectLostError):
        summary = (
            f"a value on node {node or 'not known'} is lost: the process or the node that stored it is gone"
        )
        return summary, hints.NODE_LOST

    return _why_ended(text, log, oom_kills)


def node_lost(address: str | None, reason: str) -> ProcessLoss:
    """Describe a node that left the cluster."""
    return f"node {address or '(address not known)'} is lost: {reason}", hints.NODE_LOST


def _why_ended(text: str, log: str, oom_kills: int) -> ProcessLoss:
    # Report what is certain first: a signal, a crash in the log, an exit code.
    if signal := _SIGNAL.search(text):
        return f"the process was ended by {signal[1]}", hints.PROCESS_EXITED
    if crash := _CRASH.search(log):
        return f"the process crashed ({crash[1] or crash[2]})", hints.PROCESS_EXITED
    if code := _EXIT_CODE.search(text):
        return f"the process ended with exit code {code[1]}", hints.PROCESS_EXITED

    # The kills are known per node, not per process: this is a suspicion, not a proof.
    if oom_kills:
        processes = counted(oom_kills, "process")
        summary = (
            f"the process ended; the kernel's OOM killer has ended {processes} on its node during this run"
        )
        return summary, hints.OOM_KILLED

    return UNKNOWN, hints.PROCESS_GONE


def num_oom_kills() -> int:
    """Return the number of processes that this machine's OOM killer has ended since boot, 0 if not known."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


# ---- silence


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
