"""Test the staleness controller on random schedules: the bound is kept and reached, there is no deadlock, and
prompts are trained once and in order."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from megarl.batch.data_proto import DataProto
from megarl.rollout.driver.sample_rows import Group, GroupState
from megarl.rollout.staleness import StalenessController


class Schedule(NamedTuple):
    max_staleness: int
    prompts_per_step: int
    warmup_steps: int
    total_steps: int
    first_step: int


class Trained(NamedTuple):
    step: int
    group: int
    age: int


def admitted(staleness: StalenessController, version: int) -> Group:
    group = Group(DataProto(), 0, None, 0, ())
    staleness.admit(group, version)
    return group


def trained_numbers(groups: list[Group]) -> list[int]:
    return [group.number for group in groups if group.state is GroupState.taken]


def run(schedule: Schedule, chance: random.Random) -> list[Trained]:
    """Admit whatever may be admitted; groups end, steps begin and weights are synced in any possible
    order."""
    k, num_prompts, warmup, total, first = schedule
    version = 7
    staleness = StalenessController(
        max_staleness=k,
        prompts_per_step=num_prompts,
        total_steps=total,
        next_step=first,
        version=version,
        step_pushes=lambda step: step > warmup,
    )
    trained: list[Trained] = []
    unfinished: list[Group] = []
    in_training: int | None = None

    while staleness.next_step <= total or in_training is not None:
        while staleness.may_admit(version):
            unfinished.append(admitted(staleness, version))
        moves = ["finish"] * bool(unfinished) + ["push"] * (in_training is not None)
        moves += ["take"] * (in_training is None and staleness.is_ready)
        match chance.choice(moves):  # raises if it is stuck
            case "finish":
                staleness.finish(unfinished.pop(chance.randrange(len(unfinished))))
            case "take":
                in_training = staleness.next_step
                trained += [
                    Trained(in_training, group.number, version - group.version)
                    for group in staleness.take(version)
                ]
            case "push":
                version += in_training is not None and in_training > warmup
                in_training = None

    assert not staleness.live
    return trained


def test_ages_are_within_the_bound_and_every_prompt_is_trained_once_in_order() -> None:
    chance = random.Random(1)
    oldest = dict.fromkeys((0, 1, 2, 3, 5), 0)

    for _ in range(10_000):
        k = chance.choice(list(oldest))
        schedule = Schedule(
            k, chance.randint(1, 4), chance.choice([0, 0, 1, 3]), chance.randint(3, 12), chance.randint(1, 3)
        )
        trained = run(schedule, chance)
        steps = range(schedule.first_step, schedule.total_steps + 1)
        assert [one.step for one in trained] == [
            step for step in steps for _ in range(schedule.prompts_per_step)
        ]
        assert [one.group for one in trained] == list(range(len(trained)))
        assert all(0 <= one.age <= k for one in trained)
        oldest[k] = max(oldest[k], *(one.age for one in trained))

    assert oldest == {k: k for k in oldest}


def staleness(max_staleness: int, warmup_steps: int = 0) -> StalenessController:
    return StalenessController(
        max_staleness=max_staleness,
        prompts_per_step=2,
        total_steps=10,
        next_step=1,
        version=1,
        step_pushes=lambda step: step > warmup_steps,
    )


def admit_all(staleness: StalenessController, version: int) -> list[int]:
    numbers = []
    while staleness.may_admit(version):
        numbers.append(admitted(staleness, version).number)
    return numbers


@pytest.mark.parametrize(("max_staleness", "ahead"), [(0, 0), (1, 1), (2, 2)])
def test_so_many_steps_are_generated_ahead(max_staleness: int, ahead: int) -> None:
    one = staleness(max_staleness)
    assert admit_all(one, version=1) == list(range(2 * (1 + ahead)))

    for number in (1, 0):
        assert not one.is_ready
        one.finish(one.live[number])

    assert trained_numbers(one.take(version=1)) == [0, 1]

    # groups of step 2 + ahead would be too far from the current weights
    assert admit_all(one, version=1) == []
    assert admit_all(one, version=2) == list(range(2 * (1 + ahead), 2 * (2 + ahead)))


def test_while_the_critic_warms_up_weights_do_not_age() -> None:
    one = staleness(max_staleness=1, warmup_steps=3)
    assert admit_all(one, version=1) == [0, 1, 2, 3]
    one.finish(one.live[0])
    one.finish(one.live[1])
    one.take(version=1)
    assert admit_all(one, version=1) == [4, 5]  # step 3 is trained with version 1 as well
    assert one.trained_version(5) == 2


def test_at_staleness_0_dropped_groups_are_replaced_in_rounds() -> None:
    """Two of 4 groups are kept, so that 2 x 1.2 / (2/4) exceeds a step; three of 8 groups are kept, so that
    the third round has 1.2 / (3/8) = 3.2 groups. The last group is surplus."""
    one = StalenessController(
        max_staleness=0,
        prompts_per_step=4,
        total_steps=2,
        next_step=1,
        version=1,
        step_pushes=lambda step: True,
    )
    rounds = []
    for dropped in ([0, 3], [5, 6, 7], [8, 9]):
        rounds.append(admit_all(one, version=1))
        for number in rounds[-1]:
            assert not one.is_ready
            assert not one.may_admit(1)
            (group,) = (each for each in one.live if each.number == number)
            (one.drop if number in dropped else one.finish)(group)

    assert rounds == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert one.is_ready
    assert (one.num_rounds, one.num_dropped, one.num_finished) == (3, 7, 5)
    left = one.take(version=1)
    assert trained_numbers(left) == [1, 2, 4, 10]
    assert [group.number for group in left] == list(range(12))
    assert one.live == one.dropped == []
    assert admit_all(one, version=1) == []
    assert admit_all(one, version=2) == [12, 13, 14, 15]
    assert (one.num_rounds, one.num_dropped) == (1, 0)
