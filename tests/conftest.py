"""Session-wide fixtures: what takes long to start is started once, and what must be new for a test starts warm."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.ranks import RankPool

pytest_plugins = ["tests.where_time_goes"]

# A shell's background job is started with Ctrl-C ignored, and so would be all that the tests start: those that send it would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)


SEVERAL_PROCESSES = {Path(__file__).parent / name for name in ("integration", "docs")}


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` runs two tests at a time, but one of those that start several processes, which both cores have enough to do with."""
    for item in items:
        if SEVERAL_PROCESSES & set(item.path.parents) or "warm_processes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("several processes"))


@pytest.fixture(scope="session")
def warm_processes() -> Iterator[None]:
    """Programs that are started with warm.PYTHON, and workers of Ray, are forked from one process."""
    with warm.server():
        yield


@pytest.fixture(scope="session")
def rank_pool(warm_processes: None) -> Iterator[RankPool]:
    """One pool of gloo ranks for the session."""
    with warm.spawned():
        pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ray_cluster(warm_processes: None) -> Iterator[None]:
    """One local Ray for the session: twelve logical CPUs, so at most twelve worker processes at a time."""
    from megarl.controller.cluster import shutdown, start_ray

    start_ray(num_cpus=12, object_store_mb=256)
    yield
    assert shutdown() == []
