"""Session-wide fixtures: one pool of gloo ranks, so that Megatron is imported once per rank and not once per test."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
