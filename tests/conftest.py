"""Session-wide fixtures: one pool of gloo ranks, so that Megatron is imported once per rank and not once per test.

Property tests draw the same examples in every run, so that what fails once fails again.
"""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.ranks import RankPool

settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")


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
