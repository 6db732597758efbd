"""Session-wide fixtures: slow resources are started once, and fresh ones for a test are forked."""

import gc
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from megarl.machine.garbage import collect_rarely
from tests import fork_server
from tests.fork_server.process import stay_a_test_process
from tests.ranks import RankPool

pytest_plugins = ["tests.where_time_goes"]

# Before the next conftest.py imports the engines.
stay_a_test_process()

# Modules imported before the first test stay, and are many: the garbage collector would scan them again and
# again.
gc.disable()

# Ray's dashboard would measure every process of a node again every five seconds.
os.environ["REPORTER_UPDATE_INTERVAL_MS"] = "600000"

# A background job of a shell is started with Ctrl-C ignored, and nohup ignores SIGHUP. The tests' processes
# would inherit that, and the tests that send these signals would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


SHARED = ("tests/docs/", "tests/unit/rollout/")  # a reader's folder; SGLang's engines
USES_NO_ENGINE = ("tests/unit/rollout/driver/", "tests/unit/rollout/episodes/")


def shared_folder(nodeid: str) -> str | None:
    """Return the folder whose tests share resources with this test, if any."""
    if nodeid.startswith(USES_NO_ENGINE):
        return None
    return next((folder for folder in SHARED if nodeid.startswith(folder)), None)


class TogetherByFile(LoadFileScheduling):
    """Schedule tests of a file, and of some folders, on one worker of pytest-xdist, since they share
    resources."""

    def _split_scope(self, nodeid: str) -> str:
        return shared_folder(nodeid) or super()._split_scope(nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest tests first, so that all workers end together."""
    items.sort(key=lambda item: shared_folder(item.nodeid) is None)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    collect_rarely()
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherByFile:
    return TogetherByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Let the workers of pytest-xdist share the fork server of the process that distributes the tests, and
    fork them too."""
    if find_spec("ray"):
        (shared := ExitStack()).enter_context(fork_server.own_server())
        config.add_cleanup(shared.close)
        specs[:] = [type(spec)(f"{spec}//python={shlex.join(fork_server.PYTHON)}") for spec in specs]


@pytest.fixture(scope="session")
def forked_processes() -> Iterator[None]:
    """Fork programs that are started with fork_server.PYTHON, and Ray's workers, from one process. Without
    Ray, all are fresh processes."""
    with fork_server.server() if find_spec("ray") else nullcontext():
        yield


@pytest.fixture
def forked_children(forked_processes: None) -> Iterator[None]:
    """Fork what multiprocessing spawns, such as processes of reward functions, which import little themselves.

    A pool cannot end a process that hangs, because it knows only the identifier of the stub.
    """
    with fork_server.spawned():
        yield


@pytest.fixture(scope="module")
def forked_rehearsals(forked_processes: None) -> Iterator[None]:
    """Fork the processes of megarl.rehearse.dry_run. tests/docs, where a page's command is run, has a fresh one."""
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
