"""Session-wide fixtures: one pool of gloo ranks, so that Megatron is imported once per rank and not once per test."""

import signal
from collections.abc import Iterator

import pytest

from tests.ranks import RankPool

pytest_plugins = ["tests.where_time_goes"]

# A shell's background job is started with Ctrl-C ignored, and so would be all that the tests start: those that send it would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for the session: twelve logical CPUs, so at most twelve worker processes at a time."""
    from megarl.controller.cluster import shutdown, start_ray

    start_ray(num_cpus=12, object_store_mb=256)
    yield
    assert shutdown() == []
