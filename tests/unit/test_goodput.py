"""Test the simulation of goodput with numbers worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.goodput import (
    POLICIES,
    Costs,
    checkpoint_interval_s,
    goodput,
    num_spares,
    simulate,
    time_between_failures_s,
)

DISK, MEMORY, DISK_SPARES, MEMORY_SPARES = POLICIES
FREE = Costs(step_s=0, blocked_s=1e-9, restart_s=0, recover_s=0, repair_s=0, snapshot_share=0)


def test_the_rate_is_that_of_the_report() -> None:
    """419 interruptions in 54 days are one in 3.09 hours on 16,384 GPUs, and 16 times as rare on 1,024."""
    assert time_between_failures_s(16_384) / 3600 == pytest.approx(54 * 24 / 419)
    assert time_between_failures_s(1_024) == pytest.approx(16 * time_between_failures_s(16_384))


def test_the_interval_is_that_of_young() -> None:
    assert checkpoint_interval_s(16_384, Costs(blocked_s=5)) == pytest.approx(
        (2 * 5 * 54 * 86_400 / 419) ** 0.5
    )


def test_spare_nodes_count_as_lost_time() -> None:
    """16,384 GPUs are 2,048 nodes; with failures that cost nothing, only the 20 spare nodes are lost."""
    assert num_spares(2_048) == 20
    assert simulate(16_384, MEMORY_SPARES, FREE, seed=0) == pytest.approx(2_048 / 2_068, abs=1e-4)
    assert simulate(16_384, MEMORY, FREE, seed=0) == pytest.approx(1.0, abs=1e-4)


def test_each_failure_costs_its_restart() -> None:
    """A failure in 3.09 hours that stops the run for half an hour leaves 3.09 / 3.59 of the time."""
    costs = Costs(step_s=0, blocked_s=1e-9, recover_s=1_800, repair_s=0, snapshot_share=0)
    between_h = 54 * 24 / 419
    assert goodput(16_384, MEMORY, costs) == pytest.approx(between_h / (between_h + 0.5), abs=0.01)


def test_snapshots_with_spare_nodes_are_best_on_the_largest_cluster() -> None:
    shares = [goodput(16_384, policy, Costs()) for policy in (DISK, MEMORY, DISK_SPARES, MEMORY_SPARES)]
    assert shares == sorted(shares)
