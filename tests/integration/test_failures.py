"""Test the death of every process on real Ray: the error comes within seconds and names the cause, and no
process is left running."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

from megarl.cli.run.context import RunContext
from megarl.cli.run.failure_report import last_page
from megarl.config.schema import PPOConfig
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import gather
from megarl.controller.group import RayWorkerGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs
from tests import fork_server
from tests.failure_pages import check_documented
from tests.processes import gone_within
from tests.unit.controller.workers import CollectiveWorker, EchoWorker, SlowToStart

MakeGroup = Callable[..., RayWorkerGroup]


@pytest.fixture
def make_group(ray_cluster: None) -> Iterator[MakeGroup]:
    made: list[tuple[RayWorkerGroup, RayResourcePool]] = []

    def make(spec: RayClassWithInitArgs, world_size: int, role: str, **options: object) -> RayWorkerGroup:
        pool = RayResourcePool([world_size], use_gpu=False, name=role)
        made.append((group := RayWorkerGroup(pool, spec, role=role, **options), pool))
        group.ready.get(timeout=120)
        return group

    yield make
    for group, pool in made:
        group.shutdown()
        pool.release()


def test_the_first_failure_is_shown_and_a_killed_worker_is_named(make_group: MakeGroup) -> None:
    actor = make_group(RayClassWithInitArgs(EchoWorker), 3, "actor")
    critic = make_group(RayClassWithInitArgs(EchoWorker), 1, "critic")
    check_exception_beats_its_consequences(actor)
    check_gather_sees_a_failure_behind_a_working_future(actor, critic)
    check_crash_beats_its_consequences(critic)
    check_killed_worker(actor)


def check_exception_beats_its_consequences(group: RayWorkerGroup) -> None:
    """The peers' errors arrive half a second before the exception that caused them."""
    with pytest.raises(WorkerError) as caught:
        group.call(EchoWorker.fail_on, 2, after_s=0.5).get()
    error = caught.value
    assert (error.role, error.rank, error.node, error.method) == ("actor", 2, "127.0.0.1", "fail_on")
    assert 'raise KeyError(f"no such layer on rank {rank}")' in error.remote_traceback
    assert "KeyError: 'no such layer on rank 2'" in str(error)
    assert "host.py" not in error.remote_traceback
    assert sorted(other.rank for other in error.others) == [0, 1]
    check_documented("first-cause", last_page(error, "train", RunContext(PPOConfig())))
    assert group.call_all(EchoWorker.who).get() == [0, 1, 2]  # an exception ends the call, not the workers


def check_gather_sees_a_failure_behind_a_working_future(
    actor: RayWorkerGroup, critic: RayWorkerGroup
) -> None:
    started_s = time.monotonic()
    with pytest.raises(WorkerError, match="actor rank 1"):
        gather(critic.call(EchoWorker.sleep, 12), actor.call(EchoWorker.fail_on, 1))
    assert time.monotonic() - started_s < 10


def check_crash_beats_its_consequences(group: RayWorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        group.call(EchoWorker.stop_python, 0).get()
    assert (caught.value.role, caught.value.rank) == ("critic", 0)
    assert "these are my last words" in caught.value.remote_traceback


def check_killed_worker(group: RayWorkerGroup) -> None:
    pids = [one["pid"] for one in group.call(EchoWorker.about)]
    children = [psutil.Process(pid) for pid in group.call(EchoWorker.start_children)[1]]
    future = group.call(EchoWorker.sleep, 60)
    threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()
    started_s = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        future.get()
    assert time.monotonic() - started_s < 30
    error = caught.value
    assert (error.role, error.rank, error.node, error.pid, error.method) == (
        "actor",
        1,
        "127.0.0.1",
        pids[1],
        "sleep",
    )
    assert "the process ended" in str(error)
    assert gone_within(children, limit_s=10) == []


def test_a_hang_in_a_collective_is_shown_with_every_stack_and_ended(make_group: MakeGroup) -> None:
    spec = RayClassWithInitArgs(CollectiveWorker)
    group = make_group(spec, 2, "actor", phase_time_limit_s=60, environment={"GLOO_SOCKET_IFNAME": "lo"})
    group.limits.fixed_s = 2.0  # the start-up above may take longer on a busy machine
    processes = [psutil.Process(pid) for pid in group.pids]
    started_s = time.monotonic()
    with pytest.raises(PhaseTimeoutError) as caught:
        group.call(CollectiveWorker.hang, absent=1).get()
    assert time.monotonic() - started_s < 60
    hanging, idle = caught.value.reports
    assert hanging.activity is not None
    assert (hanging.role, hanging.rank, hanging.activity.method) == ("actor", 0, "hang")
    assert "torch.distributed.barrier()" in hanging.activity.stack
    assert idle.activity is not None
    assert idle.activity.method is None
    assert "actor rank 0 (node 127.0.0.1, pid" in str(caught.value)
    check_documented("hang", last_page(caught.value, "train", RunContext(PPOConfig())))
    assert gone_within(processes, limit_s=10) == []


def test_a_construction_that_takes_too_long_is_named_by_it_and_by_every_later_call(ray_cluster: None) -> None:
    pool = RayResourcePool([2], use_gpu=False, name="slow")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(SlowToStart), role="actor", phase_time_limit_s=300)
    made = [(None, None), ("__init__", "reading weights")]

    try:
        while [
            (report.activity.method, report.activity.phase) if report.activity else None
            for report in group.reports()
        ] != made:
            time.sleep(0.2)
        group.limits.fixed_s = 1.0
        with pytest.raises(
            PhaseTimeoutError,
            match=r"the construction of actor rank 1 .* took longer than phase_time_limit_s=1",
        ) as caught:
            group.call(SlowToStart.work)
        assert (caught.value.method, caught.value.rank) == ("__init__", 1)
        assert re.search(
            r"actor rank 1 \(node 127.0.0.1, pid \d+\): in __init__, phase reading weights for",
            str(caught.value),
        )
        assert "time.sleep(120)" in str(caught.value)
        page = last_page(caught.value, "train", RunContext(PPOConfig()))
        assert "raise trainer.phase_time_limit_s (now 1800)" in page
        # not only that the group has ended
        with pytest.raises(PhaseTimeoutError, match="the construction of actor rank 1"):
            group.call(SlowToStart.work)
    finally:
        group.shutdown()
        pool.release()


def test_calls_that_wait_in_a_queue_have_the_limit_for_themselves(make_group: MakeGroup) -> None:
    group = make_group(RayClassWithInitArgs(EchoWorker), 1, "actor", phase_time_limit_s=60)
    group.limits.fixed_s = 3.0
    assert gather(*[group.call(EchoWorker.sleep, 1.6) for _ in range(3)]) == [[0], [0], [0]]


@pytest.mark.parametrize(
    ("mode", "end_with", "python"),
    [
        ("wait", signal.SIGKILL, [sys.executable]),  # fresh: a forked process ends with its client
        ("wait", signal.SIGINT, fork_server.PYTHON),
        ("end", None, fork_server.PYTHON),
    ],
    ids=["killed", "interrupted", "ended"],
)
def test_nothing_outlives_the_driver(
    mode: str, end_with: signal.Signals | None, python: list[str], forked_processes: None
) -> None:
    driver, processes = start_driver(mode, {}, python)

    # four of Ray's, the worker, its child and grandchild, the driver's child
    assert mode == "end" or len(processes) >= 8
    if end_with is not None:
        driver.send_signal(end_with)
    assert (driver.wait(timeout=120) == 0) == (end_with is None)
    assert gone_within(processes, limit_s=120) == []


def test_a_driver_that_joined_a_cluster_takes_only_its_own_along(
    ray_cluster: None, make_group: MakeGroup
) -> None:
    bystander = make_group(RayClassWithInitArgs(EchoWorker), 1, "actor")
    address = ray.get_runtime_context().gcs_address
    driver, processes = start_driver(
        "wait", {"RAY_ADDRESS": address, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}, [sys.executable]
    )  # Ray's own loopback switch
    driver.kill()
    driver.wait()
    assert gone_within(processes, limit_s=120) == []
    assert bystander.call(EchoWorker.who) == 0


def start_driver(
    mode: str, environment: dict[str, str], python: list[str]
) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """Return the driver once its workers are running, and all processes that it and they started."""
    driver = subprocess.Popen(
        [*python, "-m", "tests.integration.driver_to_kill", mode],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    )
    assert driver.stdout is not None
    told = json.loads(driver.stdout.readline())

    return driver, [psutil.Process(pid) for pid in told["pids"] if psutil.pid_exists(pid)]
