"""Session-wide fixtures: what takes long to start is started once, and what must be new for a test is forked."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests import fork_server
from tests.ranks import RankPool

pytest_plugins = ["tests.where_time_goes"]

# Two files of tests run at a time. What a run does without it is asked of single processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What is imported before the first test stays, and is much: the collector would look at all of it again and
# again.
gc.disable()

# A shell's background job is started with Ctrl-C ignored, and under nohup SIGHUP is. What the tests start
# would inherit that, and the tests that send these signals would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


SHARED = ("tests/docs/", "tests/unit/rollout/")  # a reader's folder; SGLang's engines


class TogetherByFile(LoadFileScheduling):
    """Tests of a file share what they start, and those of some folders as well: one worker of pytest-xdist
    runs them."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in SHARED if nodeid.startswith(folder)), super()._split_scope(nodeid))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that two workers end together."""
    items.sort(key=lambda item: not item.nodeid.startswith(SHARED))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherByFile:
    return TogetherByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """The workers of pytest-xdist have one server of forked processes, that of the process which divides the
    tests."""
    if find_spec("ray"):
        (shared := ExitStack()).enter_context(fork_server.own_server())
        config.add_cleanup(shared.close)


@pytest.fixture(scope="session")
def forked_processes() -> Iterator[None]:
    """Programs that are started with fork_server.PYTHON, and workers of Ray, are forked from one process; without
    Ray are all fresh processes."""
    with fork_server.server() if find_spec("ray") else nullcontext():
        yield


@pytest.fixture(scope="module")
def forked_rehearsals(forked_processes: None) -> Iterator[None]:
    """The processes of megarl.rehearsal are forked. A fresh one is in tests/docs, where a page's command is
    run."""
    with fork_server.spawned(fork_server.REHEARSAL):
        yield


@pytest.fixture(scope="session")
def rank_pool(forked_processes: None) -> Iterator[RankPool]:
    """One pool of gloo ranks for the session."""
    with fork_server.spawned():
        pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ray_cluster(forked_processes: None) -> Iterator[None]:
    """One local Ray for the session: twelve logical CPUs, so at most twelve worker processes at a time."""
    from megarl.controller.cluster import shutdown, start_ray

    start_ray(num_cpus=12, object_store_mb=256)
    yield
    assert shutdown() == []
