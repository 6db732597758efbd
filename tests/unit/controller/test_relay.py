"""Groups that are called by relays behave like others. Here two relays have two ranks each."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import gather
from megarl.controller.group import RayWorkerGroup
from megarl.controller.messages import FailureKind
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs
from tests.unit.controller.workers import BrokenWorker, EchoWorker


@contextmanager
def started(worker: RayClassWithInitArgs) -> Iterator[RayWorkerGroup]:
    pool = RayResourcePool([4], use_gpu=False, name="relayed")
    group = RayWorkerGroup(pool, worker, role="actor", ranks_per_relay=2)
    yield group
    group.shutdown()
    pool.release()


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    with started(RayClassWithInitArgs(EchoWorker, 2)) as group:
        yield group


@pytest.fixture
def doomed(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    """A group that a test ends."""
    with started(RayClassWithInitArgs(EchoWorker, 2)) as group:
        group.call(EchoWorker.about)
        yield group


def numbered(num_rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(num_rows)}, {"uid": [f"u{row}" for row in range(num_rows)]})


def test_results_come_in_the_order_of_ranks(group: RayWorkerGroup) -> None:
    assert [one["rank"] for one in group.call(EchoWorker.about)] == [0, 1, 2, 3]
    assert group.call(EchoWorker.add_rank, [1, 2, 3, 4], factor=[10, 10, 10, 10]) == [10, 21, 32, 43]
    assert group.call(EchoWorker.who) == 0
    assert group.call_rank(3, EchoWorker.who).get() == 3


@pytest.mark.parametrize("num_rows", [4, 40_000])
def test_batches_and_large_results_pass(group: RayWorkerGroup, num_rows: int) -> None:
    scaled = group.call(EchoWorker.scale, numbered(num_rows), 3)
    assert scaled.batch["scaled"].tolist() == [3 * row for row in range(num_rows)]
    # The first rank of each replica answers.
    assert set(scaled.batch["rank"].tolist()) == {0, 2}


def test_calls_of_single_ranks_run_at_the_same_time(group: RayWorkerGroup, tmp_path: Path) -> None:
    # Each of them returns only if all of them run.
    calls = [group.call_rank(rank, EchoWorker.meet, str(tmp_path), 4) for rank in (3, 1, 0, 2)]
    assert gather(*calls, timeout=60) == [3, 1, 0, 2]


def test_a_rank_runs_calls_in_the_order_in_which_they_are_made(group: RayWorkerGroup) -> None:
    group.drain_spans()
    calls = [group.call(EchoWorker.sleep, 0.2)]
    calls += [group.call(EchoWorker.size_of, "x" * size) for size in (3, 1, 2)]
    assert [call.get()[0] for call in reversed(calls)][:3] == [("str", 2), ("str", 1), ("str", 3)]
    calls[0].get()
    spans = [span for span in group.drain_spans() if span.rank == 2 and span.name in ("sleep", "size_of")]
    spans.sort(key=lambda span: span.start_s)
    assert [span.name for span in spans] == ["sleep", "size_of", "size_of", "size_of"]


@pytest.mark.parametrize("rank", [0, 3])
def test_the_first_cause_is_named(group: RayWorkerGroup, rank: int) -> None:
    pids = [one["pid"] for one in group.call(EchoWorker.about)]
    # All other ranks complain first.
    with pytest.raises(WorkerError, match=f"no such layer on rank {rank}") as raised:
        group.call(EchoWorker.fail_on, rank, 0.3).get(timeout=60)
    assert (raised.value.role, raised.value.rank, raised.value.pid) == ("actor", rank, pids[rank])
    assert len(raised.value.others) == 3
    # The group is alive.
    assert group.call(EchoWorker.who) == 0


def test_a_failure_does_not_wait_for_ranks_that_hang(doomed: RayWorkerGroup, tmp_path: Path) -> None:
    hanging = [doomed.call_rank(rank, EchoWorker.sleep, 500.0) for rank in (0, 2, 3)]
    failing = doomed.call_rank(1, EchoWorker.fail_on, 1)
    with pytest.raises(WorkerError, match="no such layer on rank 1"):
        gather(*hanging, failing, timeout=60)


def test_a_rank_that_dies_is_named_while_others_hang(doomed: RayWorkerGroup) -> None:
    call = doomed.call(EchoWorker.sleep, 500.0)
    pid = doomed.pids[2]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError) as raised:
        call.get(timeout=60)
    assert (raised.value.rank, raised.value.pid, raised.value.kind) == (2, pid, FailureKind.death)
    # Later calls say so, too.
    with pytest.raises(WorkerError, match="actor rank 2"):
        doomed.call(EchoWorker.about)


def test_a_limit_names_the_rank_that_runs(doomed: RayWorkerGroup) -> None:
    doomed.limits.fixed_s = 1.0
    # All other ranks, one of which has the same relay, have answered.
    call = doomed.call(EchoWorker.sleep_on, 2, 500.0)
    with pytest.raises(PhaseTimeoutError, match=r"actor\.sleep_on took longer") as raised:
        call.get(timeout=60)
    assert raised.value.rank == 2
    assert doomed.has_ended


def log_folder(pid: int) -> str:
    return os.path.dirname(os.readlink(f"/proc/{pid}/fd/2"))


def relays_beside(pid: int) -> set[int]:
    """Return the relays that write their logs where a rank does, so that they belong to the same cluster."""
    relays = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.name().startswith("ray::Relay") and log_folder(process.pid) == log_folder(pid):
                relays.add(process.pid)
    return relays


def test_a_relay_that_dies_is_named(group: RayWorkerGroup) -> None:
    pid = group.call(EchoWorker.about)[0]["pid"]
    before = relays_beside(pid)
    with started(RayClassWithInitArgs(EchoWorker, 2)) as doomed:
        doomed.call(EchoWorker.about)
        call = doomed.call(EchoWorker.sleep, 500.0)
        relays = relays_beside(pid) - before
        assert len(relays) == 2
        for relay in relays:
            os.kill(relay, signal.SIGKILL)
        with pytest.raises(WorkerError, match="the process that relays calls to ranks [02] to [13] is gone"):
            call.get(timeout=60)


def test_a_constructor_that_fails_is_reported(ray_cluster: None) -> None:
    with (
        started(RayClassWithInitArgs(BrokenWorker, 3)) as group,
        pytest.raises(WorkerError, match="no model in /nowhere") as raised,
    ):
        group.call(BrokenWorker.work)
    assert (raised.value.rank, raised.value.method) == (3, "__init__")
