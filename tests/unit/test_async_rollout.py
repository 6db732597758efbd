"""What generation ahead of training gains, in virtual time."""

from __future__ import annotations

from benchmarks.async_rollout import Simulation, cases


def test_the_schedule_gains_what_the_page_says() -> None:
    """benchmarks.async_rollout"""
    least = {"all slots, always in use": {1: 1.45, 2: 2.0}, "a step's generation at 0": {1: 1.45, 2: 1.9}}
    for name, work in cases().items():
        synchronous = Simulation(work, 0).run()
        assert set(synchronous.ages) == {0}
        for max_staleness, gain in least[name].items():
            result = Simulation(work, max_staleness).run()
            assert synchronous.ticks_per_step / result.ticks_per_step >= gain, (name, max_staleness)
            assert max(result.ages) == max_staleness
            assert len(result.ages) == len(synchronous.ages)


def test_drained_samples_are_waited_for() -> None:
    work = cases()["all slots, always in use"]
    drained, going_on = Simulation(work, 1, drain=True).run(), Simulation(work, 1).run()
    assert drained.waiting > going_on.waiting
    assert drained.ticks_per_step > going_on.ticks_per_step
