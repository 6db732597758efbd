"""Test which phases may overlap, given what they read and write, and the devices of a placement."""

from __future__ import annotations

import pytest

from megarl.config.schema import ActorConfig, ParallelConfig, PlacementConfig, PlacementStrategy, PPOConfig
from megarl.plan.placement.dataflow import overlaps, step_phases, waits_for
from megarl.plan.placement.plan import plan_placement

SCORES = ("reward", "reward_model", "old_log_prob", "ref", "teacher", "values")
REWARD_BESIDE = {("reward", "old_log_prob"), ("reward", "ref"), ("reward", "values")}
CRITIC_BESIDE = {("update_critic", "update_actor"), ("update_critic", "update_weights")}


def test_what_waits_for_what() -> None:
    before = waits_for(step_phases())
    assert before["gen"] == frozenset()
    assert all(before[name] == {"gen"} for name in SCORES)
    assert before["update_critic"] == before["update_actor"] == {"gen", "adv", *SCORES}
    assert before["update_weights"] == before["update_actor"] | {"update_actor"}  # not for the critic


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (
            PlacementStrategy.split_collocate,
            {*REWARD_BESIDE, ("old_log_prob", "values"), ("ref", "values"), *CRITIC_BESIDE},
        ),
        (
            PlacementStrategy.hybrid,
            {*REWARD_BESIDE, ("old_log_prob", "values"), ("ref", "values"), *CRITIC_BESIDE},
        ),
        (
            PlacementStrategy.stand_alone,
            {
                *REWARD_BESIDE,
                ("old_log_prob", "ref"),
                ("old_log_prob", "values"),
                ("ref", "values"),
                *CRITIC_BESIDE,
            },
        ),
        (PlacementStrategy.fully_collocate, REWARD_BESIDE),
    ],
)
def test_what_runs_at_the_same_time(strategy: PlacementStrategy, expected: set[tuple[str, str]]) -> None:
    actor = ActorConfig(parallel=ParallelConfig(tensor_parallel_size=2))
    plan = plan_placement(PPOConfig(actor=actor, placement=PlacementConfig(strategy=strategy)))
    assert set(overlaps(plan)) == expected
    ahead = {(one, other) for one, other in overlaps(plan, generates_ahead=True)} - expected

    # the engines have separate devices
    if strategy in (PlacementStrategy.split_collocate, PlacementStrategy.stand_alone):
        phases = {
            phase.name
            for phase in step_phases()
            if phase.roles and phase.roles[0] not in ("reward_model", "teacher")
        } - {"gen", "update_weights"}
        assert ahead == {("gen", phase) for phase in phases}
