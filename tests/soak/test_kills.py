"""Test random process deaths for minutes: of replicas while they work and start, and of a whole run while it
saves."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema import DType
from tests.soak import async_kills, kills, save_kills


def test_random_kills_lose_and_change_nothing(ray_cluster: None, tmp_path: Path) -> None:
    """Actor and engines time-share devices in the run whose saves are hit; bfloat16 weights with float32
    master weights."""
    for engine, num_kills in (("fake", 30), ("sglang", 8)):
        (folder := tmp_path / engine).mkdir()
        report = kills.run(engine, num_kills, seed=0, folder=folder)
        assert sum(report.victims.values()) == num_kills
        assert len(report.victims) >= 2  # workers, and processes that their engines started
        # a process may die of one kill while the next is in progress
        assert report.num_restarts >= num_kills // 2
        assert report.num_resent > 0
        assert report.num_checksums > 0

    # while generation runs ahead of training, also the driver
    for engine, num_kills in (("fake", 30), ("sglang", 3)):
        (folder := tmp_path / f"{engine}_ahead").mkdir()
        assert f"{num_kills} kills" in async_kills.run(engine, num_kills, seed=0, folder=folder)

    (folder := tmp_path / "saves").mkdir()
    assert "the end is that of an undisturbed run" in save_kills.soak(
        "hybrid", DType.bfloat16, num_kills=4, seed=0, folder=folder
    )
