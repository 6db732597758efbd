"""Generation ahead of training, over replicas that are made up: order, ages, what is lost, what is stored,
and how it ends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import DynamicSamplingConfig, OnUpdate, SamplingConfig
from megarl.data.loader import BatchLoader
from megarl.data.tables import RowIdentity
from megarl.machine.errors import RunError
from megarl.roles.rollout.async_rollout import AsyncRollout
from megarl.roles.rollout.finished_groups import FinishedGroup, from_bytes, to_bytes
from megarl.roles.rollout.rollout import Rollout, TokenRules
from megarl.roles.rollout.rollout_buffer import GREEDY, GroupRules
from megarl.roles.rollout.scheduler import RequestScheduler, RolloutLimits
from megarl.rollout.staleness import StalenessController
from megarl.simulation.engines import ScriptedEngines, VirtualClock
from megarl.trainers.sampling import DynamicSampling
from tests.fake_engine import plain_sample

SAMPLING = SamplingConfig(n=2)
NUM_ROWS = 64
PROMPTS = 3
LIMITS = RolloutLimits(max_concurrency=2, answer_limit_s=60, sample_limit_s=200)


class Prompts:
    """Row i asks for a sample of some tokens."""

    identity = RowIdentity("prompts")

    def __len__(self) -> int:
        return NUM_ROWS

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        prompts = RaggedTensor.of_rows(
            [[1 + (37 * index) % 101] for index in indices], torch.int32, on_left=True
        )
        return DataProto.from_dict({"prompts": prompts}, {"uid": list(uids)})


class MadeUpWeights:
    """A stub for RolloutWeights."""

    def __init__(self, engines: ScriptedEngines, version: int) -> None:
        self._engines = engines
        self.version = version

    def bring_in(self) -> None: ...

    def can_readmit(self) -> bool:
        return True

    def readmit(self, number: int) -> bool:
        return self._engines.readmit(number)

    def push(self) -> None:
        with self._engines.exclusive(for_weights=True):
            self.version += 1
            self._engines.push(self.version)


class Unscored:
    """A stub for Reward, which nobody asks."""

    may_begin = False

    def begin(self, groups: DataProto) -> None:
        raise AssertionError

    def scored(self) -> dict[str, list[float]]:
        raise AssertionError


class ScoresBySignal:
    """A stub for Reward: the samples of prompts in rows that 3 divides all score the same."""

    may_begin = True

    def __init__(self) -> None:
        self._scores: dict[str, list[float]] = {}

    def begin(self, groups: DataProto) -> None:
        for uid in groups.non_tensor_batch["uid"][:: SAMPLING.n]:
            self._scores[uid] = [1.0, float(int(uid.partition("-")[2]) % 3 == 0)]

    def scored(self) -> dict[str, list[float]]:
        scores = self._scores
        self._scores = {}
        return scores

    def finish(self, batch: DataProto) -> DataProto:
        self.begin(batch)
        return DataProto.from_dict(
            {},
            {"score": [score for one in self.scored().values() for score in one]},
            {"reward/error_rate": 0.0},
        )


class Scene(NamedTuple):
    rollout: Rollout
    engines: ScriptedEngines
    weights: MadeUpWeights
    async_rollout: AsyncRollout


class Trained(NamedTuple):
    uids: list[str]
    versions: np.ndarray  # of all tokens
    age: int


@contextmanager
def scene(
    max_staleness: int,
    total_steps: int,
    on_update: OnUpdate = OnUpdate.continue_,
    restart_limit: int = 1000,
    position: dict | None = None,
    next_step: int = 1,
    version: int = 1,
    rules: GroupRules = GroupRules(SAMPLING),  # noqa: B008  of values alone
    scoring: ScoresBySignal | Unscored = Unscored(),  # noqa: B008  it has no state
) -> Iterator[Scene]:
    clock = VirtualClock()
    engines = ScriptedEngines(
        clock,
        2,
        lambda request: request.prompt[0],
        version=version,
        restart_limit=restart_limit,
        start_s=0.3,
        tick_s=0.01,
    )
    weights = MadeUpWeights(engines, version)
    rollout = Rollout(
        engines, weights, TokenRules(pad_token_id=0, stop_token_ids=(), max_response_length=101), LIMITS, 0
    )  # type: ignore[arg-type]
    rollout.scheduler = RequestScheduler(
        engines, weights.readmit, LIMITS, clock=lambda: clock.now_s, wait=clock.wait
    )  # type: ignore[arg-type]
    loader = BatchLoader(Prompts(), PROMPTS, shuffle=True, seed=0)

    def staleness(version: int) -> StalenessController:
        return StalenessController(
            max_staleness=max_staleness,
            prompts_per_step=PROMPTS,
            total_steps=total_steps,
            next_step=next_step,
            version=version,
            step_pushes=lambda step: True,
        )

    async_rollout = AsyncRollout(rollout, weights, loader, scoring, rules, on_update, staleness)  # type: ignore[arg-type]
    if position is not None:
        async_rollout.load_state_dict(position)

    try:
        yield Scene(rollout, engines, weights, async_rollout)
    finally:
        async_rollout.close()
        assert not async_rollout._thread.is_alive()


def train(one: Scene, steps: Sequence[int], between: Callable[[], None] = lambda: None) -> list[Trained]:
    trained = []
    for step in steps:
        prompts = next(one.async_rollout)
        batch = one.async_rollout.generate(prompts, SAMPLING, step)
        between()
        assert batch.non_tensor_batch["uid"].tolist() == [
            uid for uid in prompts.non_tensor_batch["uid"] for _ in range(SAMPLING.n)
        ]
        lengths = batch.tensors["response_mask"].sum(1)
        assert torch.equal(lengths, batch.tensors["prompts"][:, 0])  # each prompt has its own samples
        versions = batch.tensors["token_versions"][batch.tensors["response_mask"]].numpy()
        assert batch.meta_info["weight_version"] == one.weights.version
        trained.append(
            Trained(
                prompts.non_tensor_batch["uid"].tolist(), versions, int(one.weights.version - versions.min())
            )
        )
        one.weights.push()

    return trained


def in_order(num_steps: int) -> list[list[str]]:
    loader = BatchLoader(Prompts(), PROMPTS, shuffle=True, seed=0)
    return [next(loader).non_tensor_batch["uid"].tolist() for _ in range(num_steps)]


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_prompts_are_trained_in_order_and_ages_are_within_the_bound(max_staleness: int) -> None:
    chance = random.Random(max_staleness)
    with scene(max_staleness, 12) as one:
        trained = train(one, range(1, 13), lambda: time.sleep(chance.choice([0, 0, 0.004])))
    assert [step.uids for step in trained] == in_order(12)
    assert 1 <= max(step.age for step in trained) <= max_staleness
    assert all(step.age >= 0 for step in trained)
    assert any(len(set(step.versions.tolist())) > 1 for step in trained)


def test_with_drain_each_sample_is_by_one_version_which_the_schedule_decides() -> None:
    runs = []
    for pause in (lambda: None, lambda: time.sleep(0.003)):
        with scene(2, 8, OnUpdate.drain) as one:
            runs.append(train(one, range(1, 9), pause))

    for first, second in zip(*runs, strict=True):
        assert first.uids == second.uids
        assert first.versions.tolist() == second.versions.tolist()

    assert [step.age for step in runs[0]] == [0, 1, 2, 2, 2, 2, 2, 2]


def test_replicas_that_are_lost_cost_no_prompt_and_no_age() -> None:
    chance = random.Random(3)
    with scene(2, 12) as one:

        def lose() -> None:
            with one.engines.exclusive():
                if chance.random() < 0.6:
                    one.engines.restart(chance.randrange(2), "killed")

        trained = train(one, range(1, 13), lose)
        assert len(one.engines.restarted) > 3

    assert [step.uids for step in trained] == in_order(12)
    assert max(step.age for step in trained) <= 2


def test_validation_goes_first_and_begins_no_group() -> None:
    """Nothing is generated before the first step, as the weights may not be there."""
    with scene(2, 6) as one:
        held_out = Prompts().batch([5, 6], ["5", "6"])
        before = one.rollout.generate(held_out, SamplingConfig(n=1), 0)
        assert sum(len(given) for engine in one.engines.groups for _, given in engine.submitted) == 2
        trained = train(one, [1, 2])
        live = one.async_rollout._buffer.staleness.live  # type: ignore[union-attr]
        after = one.rollout.generate(held_out, SamplingConfig(n=1), 0)
        assert one.async_rollout._buffer.staleness.live == live  # type: ignore[union-attr]
        assert after.non_tensor_batch["weight_version"].tolist() == [3, 3]
        assert torch.equal(after.tensors["responses"], before.tensors["responses"])
        trained += train(one, [3, 4, 5, 6])
    assert [step.uids for step in trained] == in_order(6)


def test_the_greedy_response_to_a_prompt_comes_with_its_samples() -> None:
    with scene(1, 3, rules=GroupRules(SAMPLING, greedy=True)) as one:
        for step in (1, 2, 3):
            prompts = next(one.async_rollout)
            assert len(one.async_rollout.generate(prompts, SAMPLING, step)) == PROMPTS * SAMPLING.n
            greedy = one.async_rollout.generate(prompts, GREEDY, step)
            assert greedy.non_tensor_batch["uid"].tolist() == in_order(3)[step - 1]
            one.weights.push()
        temperatures = [
            request.sampling.temperature
            for engine in one.engines.groups
            for _, given in engine.submitted
            for request in given
        ]

    assert temperatures.count(0.0) == 3 * PROMPTS
    assert temperatures.count(SAMPLING.temperature) == 3 * PROMPTS * SAMPLING.n


@pytest.mark.parametrize("on_update", OnUpdate)
def test_prompts_without_signal_are_dropped_and_those_behind_them_trained_earlier(
    on_update: OnUpdate,
) -> None:
    scoring = ScoresBySignal()
    config = DynamicSamplingConfig(enabled=True, max_generations=4)
    with_signal = [uid for step in in_order(9) for uid in step if int(uid.partition("-")[2]) % 3]

    with scene(2, 5, on_update, rules=GroupRules(SAMPLING, max_without_signal=9), scoring=scoring) as one:
        loader: BatchLoader = one.async_rollout._prompts
        sampling = DynamicSampling(
            one.async_rollout, scoring, loader, SAMPLING, config, PROMPTS, generates_ahead=True
        )  # type: ignore[arg-type]
        for step in range(1, 6):
            prompts = next(one.async_rollout)
            batch, scores, metrics = sampling(prompts, step)
            wanted = with_signal[:PROMPTS]
            with_signal = with_signal[PROMPTS:]
            assert batch.non_tensor_batch["uid"].tolist() == [
                uid for uid in wanted for _ in range(SAMPLING.n)
            ]
            assert scores == []
            assert metrics["dynamic_sampling/num_prompts"] == len(prompts)
            assert metrics["dynamic_sampling/num_without_signal"] == len(prompts) - PROMPTS
            ages = one.weights.version - batch.tensors["token_versions"][batch.tensors["response_mask"]]
            assert 0 <= ages.min() <= ages.max() <= 2
            one.weights.push()


def test_what_generation_raises_the_trainer_is_told() -> None:
    with scene(1, 5, restart_limit=0) as one:
        train(one, [1])
        with one.engines.exclusive():
            one.engines.groups[0].call = lambda method, *arguments: failing()  # type: ignore[method-assign, assignment]
        with pytest.raises(RunError, match="no such layer"):
            train(one, [2, 3, 4])


def failing() -> None:
    raise RunError("no such layer")


def test_a_run_that_goes_on_trains_the_same_prompts_and_generates_nothing_twice() -> None:
    with scene(2, 10, OnUpdate.drain) as one:
        before = train(one, range(1, 5))
        position = one.async_rollout.state_dict()
        groups = one.async_rollout.finished_groups()
        version = one.weights.version

    stored = from_bytes(to_bytes(groups))
    assert [group.uid for group in groups] == list(stored)
    with pytest.raises(ValueError, match="is corrupt"):
        from_bytes(to_bytes(groups)[:-1])
    assert str(list(stored.values())) == str(groups)
    routed = groups[0]._replace(
        samples=[sample._replace(routed_experts=np.arange(6, dtype=np.uint8)) for sample in groups[0].samples]
    )
    assert str(list(from_bytes(to_bytes([routed])).values())) == str([routed])

    with scene(2, 10, OnUpdate.drain, position=position, next_step=5, version=version) as other:
        other.async_rollout.restore(stored)
        after = train(other, range(5, 11))
        begun = sum(len(given) for engine in other.engines.groups for _, given in engine.submitted)

    assert [step.uids for step in before + after] == in_order(10)
    assert begun == (6 * PROMPTS - len(stored)) * SAMPLING.n
    with scene(2, 10, OnUpdate.drain) as one:
        whole = train(one, range(1, 11))
    assert [step.versions.tolist() for step in before + after] == [step.versions.tolist() for step in whole]


def test_stored_samples_that_are_too_old_now_are_generated_anew() -> None:
    with scene(
        1, 6, position=BatchLoader(Prompts(), PROMPTS, shuffle=True, seed=0).state_dict(), version=7
    ) as one:
        samples = [plain_sample([5, 5], [-1.0, -2.0], "length", 5)] * SAMPLING.n
        one.async_rollout.restore(
            {uid: FinishedGroup(uid, 5, samples) for step in in_order(2) for uid in step}
        )
        assert train(one, [1])[0].versions.min() == 7
