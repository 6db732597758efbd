"""Limits are learned only for some methods, from enough calls, and within the floor and the fixed limit."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from megarl.controller import actors
from megarl.controller.actors import GroupLimits, LearnedLimits
from megarl.controller.errors import PhaseTimeoutError
from megarl.controller.futures import RemoteFuture
from megarl.controller.group import RayWorkerGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs
from tests.unit.controller.workers import EchoWorker


def limits(factor: float = 4.0) -> GroupLimits:
    return GroupLimits(1800.0, LearnedLimits(("update",), factor, floor_s=10.0))


@pytest.mark.parametrize(
    ("seconds", "limit_s"),
    [
        ([5.0, 5.0, 5.0], 1800.0),  # too few
        ([50.0, 5.0, 5.0, 5.0, 5.0], 20.0),  # the slow first call does not matter
        ([0.1] * 5, 10.0),
        ([1000.0] * 5, 1800.0),
    ],
)
def test_the_limit_is_a_multiple_of_the_median(seconds: list[float], limit_s: float) -> None:
    own = limits()
    for value in seconds:
        own.learn("update", value)
        own.learn("begin_save", value)
    assert own.limit_s("update") == limit_s
    assert own.limit_s("begin_save") == own.limit_s(None) == 1800.0


def test_processes_are_asked_whether_they_answer_when_a_call_takes_unusually_long() -> None:
    own = limits()
    assert (own.look_s("begin_save"), own.silence_s) == (10.0, 10.0)
    for _ in range(4):
        own.learn("begin_save", 30.0)
    assert own.look_s("begin_save") == 120.0


def test_nothing_is_learned_without_a_factor() -> None:
    own = limits(factor=0.0)
    for _ in range(8):
        own.learn("update", 5.0)
    assert own.limit_s("update") == own.look_s("update") == 1800.0
    assert own.silence_s == math.inf


def glance(future: RemoteFuture[Any]) -> Any:
    """Wait for a result as one that has other things to do: in glances, which are too short for anything."""
    while True:
        try:
            return future.get(1e-4)
        except PhaseTimeoutError:
            raise
        except TimeoutError:
            time.sleep(0.05)


@pytest.mark.parametrize("wait", [lambda future: future.get(), glance], ids=["at once", "in glances"])
def test_a_call_without_a_learned_limit_ends_only_if_a_process_does_not_answer(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, wait: Callable[[RemoteFuture[Any]], Any]
) -> None:
    pool = RayResourcePool([2], use_gpu=False, name="stopped")
    learned = LearnedLimits((), factor=2.0, floor_s=0.1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(EchoWorker), role="actor", learned_limits=learned)

    try:
        group.ready.get()
        group.call(EchoWorker.sleep, 0.4).get()
        monkeypatch.setattr(actors, "ANSWER_S", 0.3)
        # The other rank ends its call, so that none answers that it is in one.
        os.kill(group.pids[1], signal.SIGSTOP)
        with pytest.raises(PhaseTimeoutError, match=r"actor\.sleep: rank 1 has not answered for") as raised:
            wait(group.call(EchoWorker.sleep, 0.0))
    finally:
        group.shutdown()
        pool.release()

    assert (raised.value.rank, raised.value.node) == (1, "127.0.0.1")


def test_a_rank_that_answers_late_is_not_lost(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "ANSWER_S", 0.05)
    pool = RayResourcePool([1], use_gpu=False, name="late")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(EchoWorker), role="critic")

    try:
        group.ready.get()
        os.kill(group.pids[0], signal.SIGSTOP)
        late = threading.Timer(0.3, os.kill, (group.pids[0], signal.SIGCONT))
        late.start()
        assert group.lost_ranks() == []
        os.kill(group.pids[0], signal.SIGKILL)
        assert [report.rank for report in group.lost_ranks()] == [0]
    finally:
        group.shutdown()
        pool.release()
