"""What generation ahead of training gains, in virtual time."""

from __future__ import annotations

from benchmarks.async_rollout import cases, simulate
from megarl.config.schema import OnUpdate


def test_the_schedule_gains_what_the_page_says() -> None:
    """benchmarks.async_rollout"""
    steps = 24
    least = {"all slots, always in use": {1: 1.45, 2: 2.0}, "a step's generation at 0": {1: 1.45, 2: 1.9}}

    for name, training_ticks in cases(steps).items():
        synchronous = simulate(training_ticks, 0, steps=steps)
        assert set(synchronous.ages) == {0}
        for max_staleness, gain in least[name].items():
            outcome = simulate(training_ticks, max_staleness, steps=steps)
            assert synchronous.step_s / outcome.step_s >= gain, (name, max_staleness)
            assert max(outcome.ages) == max_staleness
            assert [step.lengths for step in outcome.steps] == [step.lengths for step in synchronous.steps]
            if max_staleness == 1 and name == "all slots, always in use":
                drained = simulate(training_ticks, 1, OnUpdate.drain, steps=steps)
                assert drained.waiting > outcome.waiting
                assert drained.step_s > outcome.step_s
