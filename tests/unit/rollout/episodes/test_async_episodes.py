"""Test episodes ahead of training on a virtual clock: order, ages, slow and dying processes, and stored
groups."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megarl.agents.episode import AnswerTurn, EpisodeLimits
from megarl.agents.protocol import Reply
from megarl.agents.trajectory import failed_trajectory
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import OnUpdate, SamplingConfig
from megarl.data.loader import BatchLoader
from megarl.data.tables import RowIdentity
from megarl.rehearse.simulation.engines import ScriptedEngines, VirtualClock
from megarl.rollout.driver.rollout import Rollout, TokenRules
from megarl.rollout.driver.sample_rows import (
    FinishedGroup,
    GroupRules,
    from_bytes,
    sample_rows,
    to_bytes,
)
from megarl.rollout.driver.scheduler import RequestScheduler, RequestState
from megarl.rollout.driver.step_rollout import StepRollout
from megarl.rollout.episodes.episode_runner import TurnRunner
from megarl.rollout.interface import GenerationRequest
from megarl.rollout.staleness import StalenessController
from megarl.rollout.worker.environment import TurnReport
from tests.unit.rollout.driver.test_step_rollout import MadeUpWeights, Unscored, trains_in_no_time

SAMPLING = SamplingConfig(n=2)
PROMPTS = 3
NUM_ROWS = 48
TOLD = [9, 9]  # an environment's result
SLOW = 7  # the prompt whose environment takes SLOW_S
SLOW_S = 4.0
EPISODES = EpisodeLimits(max_turns=3, max_tokens=200, max_attempts=9)
LIMITS = {"max_concurrency": 4, "answer_limit_s": 60, "sample_limit_s": 200}


def turns_of(prompt: int) -> int:
    return 1 + prompt % EPISODES.max_turns


def length_of(request: GenerationRequest) -> int:
    return 1 + sum(request.prompt) % 13


class Rows:
    identity = RowIdentity("rows")

    def __len__(self) -> int:
        return NUM_ROWS

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        prompts = RaggedTensor.of_rows([[index] for index in indices], torch.int32, on_left=True)
        empty = {name: [{} for _ in indices] for name in ("reward_model", "extra_info")}
        return DataProto.from_dict(
            {"prompts": prompts}, {"uid": list(uids), "messages": [[] for _ in indices], **empty}
        )


class ScriptedEnvironments:
    """Stub for Environments with two processes."""

    num_restarts = 0

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._reports: list[TurnReport] = []
        self._lost: list[int] = []
        self._episodes: list[set[int]] = [set(), set()]
        self._unanswered: list[AnswerTurn] = []
        self.opened = Counter[int]()
        self.closed = Counter[int]()
        self.prompts: dict[int, int] = {}
        self._seeds: dict[int, int] = {}  # of the tasks, by episode

    @property
    def ended(self) -> bool:
        """Whether there is something to report, as for a future."""
        return bool(self._reports or self._lost)

    @property
    def is_busy(self) -> bool:
        return bool(self._unanswered or self.ended)

    def order(self, order: AnswerTurn) -> None:
        number = order.episode
        mine = self._episodes[order.episode % 2]
        self.opened[number] += number not in mine
        mine.add(number)
        self._unanswered.append(order)
        place = order.place
        if order.task is not None:
            self._seeds[number] = order.task.seed
        prompt = self._seeds[number]
        is_done = place[1] + 1 == turns_of(self.prompts[prompt])
        reply = Reply(reward=0.25, is_done=is_done, num_calls=1, tool_s=0.5)
        seconds = SLOW_S if self.prompts[prompt] == SLOW else 0.03 * (1 + number % 3)

        def report() -> None:
            if number in mine and self._episodes[number % 2] is mine:
                # A late answer to an earlier attempt leaves the order of the later one open.
                self._unanswered = [each for each in self._unanswered if each is not order]
                self._reports.append(TurnReport(number, place, TOLD, reply))

        self._clock.at(self._clock.now_s + seconds, report)

    def end(self, episode: int) -> None:
        mine = self._episodes[episode % 2]
        self.closed[episode] += episode in mine
        mine.discard(episode)
        self._forget({episode})

    def _forget(self, episodes: Collection[int]) -> None:
        self._unanswered = [order for order in self._unanswered if order.episode not in episodes]

    def poll(self, wait_s: float) -> tuple[list[TurnReport], list[int]]:
        self._clock.wait([self], wait_s)
        reports = self._reports
        lost = self._lost
        self._reports = []
        self._lost = []
        return reports, lost

    def kill(self, process: int) -> None:
        gone = self._episodes[process]
        self._episodes[process] = set()
        self._lost += sorted(gone)
        self._forget(gone)
        self._reports = [report for report in self._reports if report.episode not in gone]
        self.closed.update(gone)  # closed with their process


class RunnerInNoTime(TurnRunner):
    on_update = OnUpdate.continue_

    def poll(self, wait_s: float = math.inf) -> None:
        if not trains_in_no_time(self.on_update, self.scheduler):
            super().poll(wait_s)


class Stage(NamedTuple):
    rollout: Rollout
    engines: ScriptedEngines
    environments: ScriptedEnvironments
    weights: MadeUpWeights
    async_rollout: StepRollout


@contextmanager
def stage(
    max_staleness: int,
    total_steps: int,
    on_update: OnUpdate = OnUpdate.continue_,
    *,
    on_event: Callable[[int], None] = lambda number: None,
    limits: EpisodeLimits = EPISODES,
    rules: GroupRules = GroupRules(SAMPLING),  # noqa: B008  of values alone
    position: dict | None = None,
    next_step: int = 1,
    version: int = 1,
) -> Iterator[Stage]:
    clock = VirtualClock(on_event)
    engines = ScriptedEngines(clock, 2, length_of, version=version, start_s=0.3, tick_s=0.01)
    weights = MadeUpWeights(engines, version)
    environments = ScriptedEnvironments(clock)
    tokens = TokenRules(pad_token_id=0, stop_token_ids=(), max_response_length=EPISODES.max_tokens)
    scheduler = RequestScheduler(
        engines, weights.readmit, **LIMITS, clock=lambda: clock.now_s, wait=clock.wait
    )  # type: ignore[arg-type]
    runner = RunnerInNoTime(scheduler, environments, limits, lambda: clock.now_s)  # type: ignore[arg-type]
    runner.on_update = on_update
    rollout = Rollout(scheduler, weights, tokens, seed=0, episodes=runner)  # type: ignore[arg-type]
    loader = BatchLoader(Rows(), PROMPTS, shuffle=False, seed=0)

    for step in range(total_steps + max_staleness + 9):  # the prompt to which an episode's seed belongs
        rows = Rows().batch([(PROMPTS * step + place) % NUM_ROWS for place in range(PROMPTS)], [""] * PROMPTS)
        for request in rollout.requests(rows, SAMPLING, step + 1):
            environments.prompts[request.sampling.seed] = request.prompt[0]

    def staleness(version: int) -> StalenessController:
        return StalenessController(
            max_staleness=max_staleness,
            prompts_per_step=PROMPTS,
            total_steps=total_steps,
            next_step=next_step,
            version=version,
            step_pushes=lambda step: True,
        )

    async_rollout = StepRollout(rollout, weights, loader, Unscored(), rules, on_update, staleness)  # type: ignore[arg-type]
    if position is not None:
        async_rollout.load_state_dict(position)

    try:
        yield Stage(rollout, engines, environments, weights, async_rollout)
    finally:
        async_rollout.close()


class Step(NamedTuple):
    prompts: list[int]
    rows: DataProto
    age: int


def train(one: Stage, steps: Collection[int]) -> list[Step]:
    trained = []
    for number in steps:
        prompts = next(one.async_rollout)
        rows = one.async_rollout.generate(prompts, SAMPLING, number)
        mask, versions = (rows.ragged[key].flat() for key in ("response_mask", "token_versions"))
        assert ((versions >= 0) == mask).all()
        trained.append(
            Step(
                prompts.tensors["prompts"][:, 0].tolist(),
                rows,
                int(one.weights.version - versions[mask].min()),
            )
        )
        assert rows.non_tensor_batch["num_turns"].tolist() == [
            turns_of(prompt) for prompt in rows.tensors["prompts"][:, 0].tolist()
        ]
        turns = rows.non_tensor_batch["num_turns"].sum()
        assert (
            float(rows.ragged["environment_rewards"].flat().sum())
            == 0.25 * turns
            == 0.25 * rows.non_tensor_batch["num_calls"].sum()
        )
        assert int((~mask).sum()) == len(TOLD) * (turns - len(rows))
        one.weights.push()

    return trained


def in_order(num_steps: int) -> list[list[int]]:
    return [[(PROMPTS * step + place) % NUM_ROWS for place in range(PROMPTS)] for step in range(num_steps)]


@pytest.mark.parametrize(
    ("max_staleness", "on_update"),
    [(0, OnUpdate.continue_), (1, OnUpdate.continue_), (2, OnUpdate.continue_), (2, OnUpdate.drain)],
)
def test_whoever_is_killed_in_an_episode_the_same_prompts_are_trained_in_order(
    max_staleness: int, on_update: OnUpdate
) -> None:
    """Every turn of an episode exists once, whichever attempt it belongs to, and each environment is closed
    once."""
    for seed in (None, 0, 1):
        chance = random.Random(seed)
        killed = list[str]()

        def kill(
            number: int, chance: random.Random = chance, killed: list[str] = killed, seed: int | None = seed
        ) -> None:
            if seed is None or chance.random() > 0.05:
                return
            if chance.random() < 0.5:
                one.engines.groups[chance.randrange(2)].die()
                killed.append("replica")
            else:
                one.environments.kill(chance.randrange(2))
                killed.append("environments")

        with stage(max_staleness, 8, on_update, on_event=kill) as one:
            trained = train(one, range(1, 9))
        assert [step.prompts for step in trained] == in_order(8)
        assert min(1, max_staleness) <= max(step.age for step in trained) <= max_staleness
        assert (set(killed) == {"replica", "environments"}) == (seed is not None)
        assert one.environments.opened == one.environments.closed


def test_a_slow_tool_delays_its_group_alone() -> None:
    """Later groups are finished while its step waits, if the bound lets them begin."""
    seen = list[RequestState]()
    with stage(2, 9, on_event=lambda number: seen.extend(one.rollout.runner.snapshot()[0])) as one:
        trained = train(one, [1, 2])
        prompts = next(one.async_rollout)  # includes the slow one
        assert SLOW in prompts.tensors["prompts"][:, 0].tolist()
        clock_s = one.rollout.scheduler.totals().now_s
        assert clock_s > SLOW_S * turns_of(SLOW)
        # those of the two later steps, before that one is trained
        assert one.async_rollout.num_finished() == 2 * PROMPTS
        one.engines.num_restarts = 0  # type: ignore[attr-defined]
        assert 0.5 < one.rollout.drain_metrics()["agent/waiting_share"] < 1
        (slow,) = {state.uid for state in seen if state.seconds > SLOW_S / 2}
        assert slow.partition("-")[2] == str(SLOW)
        assert all(state.waits_for_tools for state in seen if state.uid == slow and state.seconds > 1)
        assert max(step.age for step in trained) <= 2


def test_turns_of_an_episode_go_to_the_replica_that_has_its_beginning() -> None:
    """Uses only the virtual clock: a thread ahead would assign earlier or later, with other loads."""
    with stage(0, 6) as one:
        for step in range(6):
            prompts = Rows().batch([PROMPTS * step + place for place in range(PROMPTS)], [""] * PROMPTS)
            one.rollout.generate(prompts, SAMPLING, step + 1)

    sent = [
        (number, request)
        for number, engine in enumerate(one.engines.groups)
        for _, given in engine.submitted
        for request in given
    ]
    at = {request.sampling.seed: number for number, request in sent}
    first = [request.sampling.seed for _, request in sent if len(request.prompt) == 1]
    turns = [
        [seed, *(int(np.random.SeedSequence([seed, turn]).generate_state(1)[0]) for turn in (1, 2))]
        for seed in first
    ]
    places = [[at[seed] for seed in of_it if seed in at] for of_it in turns]
    followed = [before == after for of_it in places for before, after in pairwise(of_it)]
    assert len(followed) == len(sent) - len(first) > 20
    assert sum(followed) >= 0.9 * len(followed)


def test_a_run_that_goes_on_has_the_episodes_that_were_finished() -> None:
    with stage(2, 8, OnUpdate.drain) as one:
        before = train(one, range(1, 4))
        position = one.async_rollout.state_dict()
        groups = one.async_rollout.finished_groups()
        version = one.weights.version

    stored = from_bytes(to_bytes(groups))
    # A drained sync has finished the groups of two steps. The generation thread may have finished some of a
    # third one since then, which the new weights have started.
    assert sum(group.version < version for group in groups) == PROMPTS * 2

    with stage(2, 8, OnUpdate.drain, position=position, next_step=4, version=version) as other:
        other.async_rollout.restore(stored)
        after = train(other, range(4, 9))
        begun = len(other.environments.opened)

    assert begun == (5 * PROMPTS - len(stored)) * SAMPLING.n
    with stage(2, 8, OnUpdate.drain) as whole:
        expected = train(whole, range(1, 9))

    for one_step, other_step in zip(before + after, expected, strict=True):
        assert one_step.prompts == other_step.prompts
        for key in (
            "responses",
            "response_mask",
            "token_versions",
            "environment_rewards",
            "answer_mask",
            "rollout_log_probs",
        ):
            assert one_step.rows.tensors[key].tolist() == other_step.rows.tensors[key].tolist()
        for key in ("num_turns", "num_calls", "call_errors", "tool_s", "episode_end", "weight_version"):
            assert (
                one_step.rows.non_tensor_batch[key].tolist() == other_step.rows.non_tensor_batch[key].tolist()
            )


def test_stored_episodes_of_an_agent_program_are_generated_again_with_an_environment() -> None:
    """A harness was replaced by an environment while samples were ahead. Both have episodes, in other columns."""
    loader = BatchLoader(Rows(), PROMPTS, shuffle=False, seed=0)
    position = loader.state_dict()
    first_uid, *_ = next(loader).non_tensor_batch["uid"]
    rows = sample_rows([failed_trajectory([0], "died")] * SAMPLING.n)
    with stage(1, 4, position=position, version=3) as one:
        one.async_rollout.restore({first_uid: FinishedGroup(first_uid, 3, rows)})
        (step,) = train(one, [1])
    assert step.prompts == in_order(1)[0]


def test_prompts_whose_environments_are_always_lost_are_given_up_and_others_come_earlier() -> None:
    once = EpisodeLimits(max_turns=3, max_tokens=200, max_attempts=1)
    kill = lambda number: one.environments.kill(0) if number == 60 else None  # noqa: E731

    with stage(1, 4, on_event=kill, limits=once, rules=GroupRules(SAMPLING, max_error_rate=9.0)) as one:
        trained = train(one, range(1, 5))
        given_up = one.async_rollout.drain_metrics(one.async_rollout.taken)["rollout/num_given_up"]

    prompts = [prompt for step in trained for prompt in step.prompts]
    assert prompts == sorted(set(prompts))
    assert 0 < given_up == prompts[-1] + 1 - len(prompts)
    assert one.environments.opened == one.environments.closed
