"""The explanation for a lost process, from messages of Ray and the kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
)

from megarl.controller import actors, calls, hints
from megarl.controller.actors import ActorSet
from megarl.controller.calls import Call
from megarl.controller.lost_process import UNKNOWN, why_lost

DIED = "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tip: 10.0.0.7\n"
WORKER_DIED = (
    f"{DIED}The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
    f"Worker exit detail: "
)
COMMON_CAUSES = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) "
    "the process was killed by the "
    "OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed "
    "unexpectedly due to SIGSEGV"
)
NODE_DIED = (
    f"{DIED}The actor died because its node has died. Node Id: 186d\n"
    "\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"
)
TERMINATED = "Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM."
OUT_OF_MEMORY = "Task was killed: memory on the node was 9.6GB used / 10.0GB limit, by a SIGSEGV-like end"


LOST = "node 10.0.0.7 is lost: health check failed due to missing too many heartbeats"
SEGFAULT = "step 3\n*** SIGSEGV received at time=17 ***"
UNREACHABLE = (
    "the process cannot be reached: the connection broke, although its node is still part of the cluster"
)
KEPT = "a value on node 10.0.0.9 is lost: the process or the node that stored it is gone"
MONITOR = "Ray's memory monitor ended the process: its node is running out of memory (9.6GB of 10.0GB used)"


def died(text: str) -> RayActorError:
    return RayActorError(error_msg=text)


@pytest.mark.parametrize(
    ("error", "log", "oom_kills", "expected"),
    [
        (died(NODE_DIED), "", 0, LOST),
        (died(NODE_DIED), "*** SIGTERM received", 3, LOST),
        (
            NodeDiedError("the node it was running on is dead or unavailable."),
            "",
            0,
            "node 10.0.0.9 is lost: it no longer answers",
        ),
        (died(WORKER_DIED + COMMON_CAUSES), "", 0, UNKNOWN),
        (died(WORKER_DIED + COMMON_CAUSES), SEGFAULT, 0, "the process crashed (SIGSEGV)"),
        (
            died(WORKER_DIED + COMMON_CAUSES),
            "Fatal Python error: Bus error\n",
            0,
            "the process crashed (Bus error)",
        ),
        (
            died(WORKER_DIED + COMMON_CAUSES),
            "",
            2,
            "the process ended; the kernel's OOM killer has ended 2 processes on its node during this run",
        ),
        (died(WORKER_DIED + TERMINATED), "", 0, "the process was ended by SIGTERM"),
        (
            died(WORKER_DIED + "Worker exits with an exit code 3."),
            "",
            0,
            "the process ended with exit code 3",
        ),
        (ActorUnavailableError("rpc error", None), "", 1, UNREACHABLE),
        (ObjectLostError("ab", b"", ""), "", 0, KEPT),
        (OutOfMemoryError(OUT_OF_MEMORY), "", 1, MONITOR),
    ],
)
def test_the_cause_is_told_apart(error: RayError, log: str, oom_kills: int, expected: str) -> None:
    assert why_lost(error, "10.0.0.9", log, oom_kills)[0] == expected


@pytest.mark.parametrize(
    ("error", "log", "oom_kills", "hint"),
    [
        (died(WORKER_DIED + COMMON_CAUSES), "", 0, hints.PROCESS_GONE),
        (died(WORKER_DIED + COMMON_CAUSES), "", 1, hints.OOM_KILLED),
        (died(WORKER_DIED + COMMON_CAUSES), "*** SIGSEGV received at time=1", 1, hints.PROCESS_EXITED),
        (ObjectLostError("ab", b"", ""), "", 0, hints.NODE_LOST),
        (OutOfMemoryError(OUT_OF_MEMORY), "", 1, hints.MEMORY_MONITOR),
    ],
)
def test_each_cause_has_its_hint(error: RayError, log: str, oom_kills: int, hint: tuple[str, ...]) -> None:
    assert why_lost(error, "10.0.0.9", log, oom_kills)[1] == hint


class UnreachableSet(ActorSet):
    """A group of one process with a broken connection.

    `answers` are Ray's answers to the first call and to each later query.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> None:
        self.locations = {}
        monitor = SimpleNamespace(
            options=lambda concurrency_group: SimpleNamespace(remote=lambda: "reference")
        )
        self.handles = [SimpleNamespace(activity=monitor)]
        self._rank_of = {}
        self.answers = answers

        def get(reference: object, timeout: float | None = None) -> Any:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(ray, "get", get)
        monkeypatch.setattr(actors, "VERDICT_LOOK_S", 0.0)
        # The nodes are those of a cluster, not of the Ray that other tests have started here.
        monkeypatch.setattr(calls, "ended_node", lambda: None)

    def summary(self) -> str:
        call = Call(
            self,
            "actor",
            0,
            "update",
            cast(ray.ObjectRef, object()),
            cast(ray.ObjectRef, object()),
            lambda *arguments: None,
            np.array([]),
        )
        call.fetch()
        assert call.failure is not None

        return call.failure.failure.summary


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([died(NODE_DIED)], LOST),
        ([ActorUnavailableError("rpc error", None), died(NODE_DIED)], LOST),
        ([died(WORKER_DIED + TERMINATED)], "the process was ended by SIGTERM"),
        (["an activity"], UNREACHABLE),
        ([GetTimeoutError("no answer")], UNREACHABLE),
    ],
)
def test_an_unreachable_process_is_asked_until_its_fate_is_known(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], expected: str
) -> None:
    """Connections to a lost node break long before Ray's health checks detect the loss."""
    unreachable = UnreachableSet(monkeypatch, [ActorUnavailableError("rpc error", None), *answers])
    assert unreachable.summary() == expected
    assert unreachable.answers == []
