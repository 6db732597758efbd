"""Test building the batch of a step at staleness 0, with a fake rollout and reward: dynamic sampling and its
budget, greedy baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import OnUpdate, SamplingConfig
from megarl.controller.futures import DerivedFuture, RemoteFuture
from megarl.data.loader import BatchLoader
from megarl.data.tables import RowIdentity
from megarl.rollout.driver.sample_rows import GroupRules, RolloutOutput, with_prompts
from megarl.rollout.driver.scheduler import Deliver
from megarl.rollout.driver.step_rollout import StepRollout
from megarl.rollout.interface import GenerationRequest, SamplingParameters, plan_requests
from megarl.rollout.staleness import NoSignalError, StalenessController
from megarl.trainers.ppo import Sampling
from tests.fake_engine import plain_sample

NUM_SAMPLES = 2
SAMPLING = SamplingConfig(n=NUM_SAMPLES, temperature=0.7)


class Rows:
    """Data set in which prompt i is the token i + 1."""

    identity = RowIdentity("rows")

    def __init__(self, size: int = 12) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        prompts = RaggedTensor.of_rows([[index + 1] for index in indices], torch.int32, on_left=True)
        return DataProto.from_dict({"prompts": prompts}, {"uid": list(uids)})


class FakeRollout:
    """Rollout whose responses have one token more than the number of earlier rounds in the step."""

    version = 1

    def __init__(self) -> None:
        self.asked: list[tuple[int, SamplingConfig, int, int]] = []
        self._waiting: list[tuple[GenerationRequest, Deliver[RolloutOutput]]] = []

    def requests(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0, *, first: int = 0
    ) -> list[GenerationRequest]:
        self.asked.append((len(prompts), sampling, step, generation))
        return plan_requests(
            [row.tolist() for row in prompts.ragged["prompts"].each()],
            SamplingParameters(n=sampling.n, max_new_tokens=generation + 1, seed=0),
            prompts.non_tensor_batch["uid"],
        )

    @property
    def runner(self) -> FakeRollout:
        return self

    def begin(
        self,
        requests: Sequence[GenerationRequest],
        delivers: Sequence[Deliver[RolloutOutput]],
        *,
        on_failure: Callable[[str], None],
    ) -> Sequence[int]:
        self._waiting += zip(requests, delivers, strict=True)
        return ()

    @property
    def is_at_work(self) -> bool:
        return bool(self._waiting)

    def poll(self, wait_s: float = math.inf) -> None:
        waiting = self._waiting
        self._waiting = []
        for request, deliver in waiting:
            length = request.sampling.max_new_tokens
            deliver(0, plain_sample([7] * length, [-0.5] * length, "length", 1))

    def assemble(self, prompts: DataProto, rows: DataProto, version: int) -> DataProto:
        return with_prompts(prompts, rows, version, pad_token_id=0)


class FakeReward:
    """Reward that scores the samples of prompts in `mixed` as 1 and 0, all others as 1, and greedy samples as
    their prompt's number."""

    may_begin = True

    def __init__(
        self, mixed: Sequence[int], failed: tuple[int, int] | None = None, *, scores_rounds: bool = False
    ) -> None:
        """Configure the scores.

        Args:
            failed: The number of a prompt, and which of its samples could not be scored.
        """
        self._mixed = mixed
        self._failed = failed
        self._begun: dict[str, list[float]] = {}
        self.scores_rounds = scores_rounds

    def begin(self, groups: DataProto) -> None:
        self._begun |= self.score_round(groups)

    def scored(self) -> dict[str, list[float]]:
        assert not self.scores_rounds
        scored = self._begun
        self._begun = {}
        return scored

    def score_round(self, groups: DataProto) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {}
        scored = self.score(groups)
        rows = zip(
            groups.non_tensor_batch["uid"],
            scored.non_tensor_batch["score"],
            scored.tensors["is_scored"].tolist(),
            strict=True,
        )
        for uid, score, is_scored in rows:
            scores.setdefault(uid, []).extend([float(score)] if is_scored else [])
        return scores

    def finish(self, batch: DataProto) -> Any:
        return self.score(batch)

    def score(self, batch: DataProto) -> Any:
        numbers = (batch.tensors["prompts"][:, -1] - 1).tolist()
        sample = [row % NUM_SAMPLES for row in range(len(batch))]
        scores = [
            float(k == 0 or number not in self._mixed) for number, k in zip(numbers, sample, strict=True)
        ]
        zeros = RaggedTensor.constant(0.0, batch.ragged["response_mask"].lengths, torch.float32)

        return DataProto.from_dict(
            {
                "token_level_scores": zeros,
                "score_parts": torch.tensor(scores)[:, None],
                "is_scored": torch.tensor(
                    [(number, k) != self._failed for number, k in zip(numbers, sample, strict=True)]
                ),
            },
            {"score": scores},
            {"reward/error_rate": 0.25},
        )


class Scene:
    """A run from `step` on, whose weights do not change."""

    def __init__(
        self,
        reward: FakeReward,
        rules: GroupRules,
        step: int = 1,
        size: int = 12,
        served: dict[str, Any] | None = None,
    ) -> None:
        self.rollout = FakeRollout()
        self.loader = BatchLoader(Rows(size), 4, shuffle=False, seed=0)
        if served is not None:
            self.loader.load_state_dict(served)
        weights = SimpleNamespace(version=1, actor_version=1, bring_in=lambda: None)
        self._buffered = StepRollout(
            self.rollout,  # type: ignore[arg-type]
            weights,  # type: ignore[arg-type]
            self.loader,
            reward,
            rules,
            OnUpdate.continue_,
            lambda version: StalenessController(
                max_staleness=0,
                prompts_per_step=4,
                total_steps=9,
                next_step=step,
                version=version,
                step_pushes=lambda step: False,
            ),
        )
        self._sampling = Sampling(self._buffered, reward, rules)  # type: ignore[arg-type]

    def sample(self, step: int) -> tuple[DataProto, list[DerivedFuture], dict[str, float]]:
        groups = self._buffered.next_step()
        batch, metrics = self._sampling.generate(groups, step)
        return batch, self._sampling.score(batch, groups), metrics


def dynamic(
    mixed: Sequence[int],
    max_generations: int,
    *,
    failed: tuple[int, int] | None = None,
    scores_rounds: bool = False,
    **of_scene: Any,
) -> Scene:
    rules = GroupRules(SAMPLING, max_without_signal=(max_generations - 1) * 4)
    return Scene(FakeReward(mixed, failed, scores_rounds=scores_rounds), rules, **of_scene)


def prompts_of(batch: DataProto) -> list[int]:
    return (batch.tensors["prompts"][:, -1] - 1).tolist()


@pytest.mark.parametrize("scores_rounds", [False, True])
def test_prompts_without_signal_are_replaced(scores_rounds: bool) -> None:
    """Only prompts 1 and 2 of 0 to 3 have a signal. Two more are needed and half have a signal, so four
    are drawn, and of these 4 is kept. The last one is expected among 8 to 10, and the margin of a fifth
    adds 11."""
    scene = dynamic([1, 2, 4, 9, 8], max_generations=3, scores_rounds=scores_rounds, step=5)
    batch, scores, metrics = scene.sample(5)
    assert prompts_of(batch) == [1, 1, 2, 2, 4, 4, 8, 8]
    assert [(number, step, generation) for number, _, step, generation in scene.rollout.asked] == [
        (4, 5, 0),
        (4, 5, 1),
        (4, 5, 2),
    ]
    # A resumed run continues after everything that was drawn.
    assert scene.loader.state_dict()["num_served"] == [12]
    assert scores == []
    assert metrics == pytest.approx(
        {
            "dynamic_sampling/num_generations": 3,
            "dynamic_sampling/num_prompts": 12,
            "dynamic_sampling/num_without_signal": 7,
            "dynamic_sampling/num_surplus": 1,
            "dynamic_sampling/score_mean": (7 * 2 + 5) / 24,
        }
    )
    assert batch.meta_info == {"weight_version": 1, "reward/error_rate": 0.25}


def test_a_sample_that_failed_makes_no_signal() -> None:
    """Prompt 1's second sample scores 0 because its scoring failed. Its first sample has nothing to be
    compared with, and 5 takes its place."""
    scene = dynamic([0, 1, 2, 3, 5], max_generations=2, failed=(1, 1))
    assert prompts_of(scene.sample(1)[0]) == [0, 0, 2, 2, 3, 3, 5, 5]


def test_samples_of_all_generations_have_one_width() -> None:
    tensors = dynamic([0, 1, 2, 5, 6], max_generations=2).sample(1)[0].tensors
    assert tensors["responses"].tolist() == [[7, 0]] * 6 + [[7, 7]] * 2
    assert tensors["response_mask"].tolist() == [[True, False]] * 6 + [[True, True]] * 2
    assert tensors["attention_mask"].tolist() == [[1, 1, 0]] * 6 + [[1, 1, 1]] * 2
    assert tensors["position_ids"].tolist() == [[0, 1, 1]] * 6 + [[0, 1, 2]] * 2
    assert tensors["input_ids"][:, :2].tolist() == [[number, 7] for number in (1, 1, 2, 2, 3, 3, 6, 6)]
    assert tensors["token_level_scores"].shape == (8, 2)
    assert tensors["score_parts"].shape == (8, 1)


def test_a_batch_full_of_signal_is_one_generation() -> None:
    scene = dynamic(range(12), max_generations=1)
    batch, _, metrics = scene.sample(1)
    assert prompts_of(batch) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(scene.rollout.asked) == 1
    assert metrics["dynamic_sampling/num_without_signal"] == 0


def test_a_spent_budget_ends_the_run() -> None:
    scene = dynamic([1], max_generations=3, step=2)
    with pytest.raises(
        NoSignalError,
        match=r"step 2: only 1 of 12 prompts .* and 4 are needed; the mean score is "
        r"0\.958.*max_generations=3 ",
    ):
        scene.sample(2)

    assert len(scene.rollout.asked) == 3
    assert scene.loader.state_dict()["num_served"] == [12]
    with pytest.raises(NoSignalError, match=r"only 0 of 8 prompts"):
        dynamic([], max_generations=2).sample(1)


def test_a_resumed_run_draws_what_the_other_would_have_drawn() -> None:
    mixed = [1, 2, 4, 9, 8, 12, 13, 15, 17, 18]
    scene = dynamic(mixed, max_generations=3, size=40)
    scene.sample(1)
    state = scene.loader.state_dict()
    following = prompts_of(scene.sample(2)[0])
    resumed = dynamic(mixed, max_generations=3, size=40, step=2, served=state)
    assert prompts_of(resumed.sample(2)[0]) == following


class Done(RemoteFuture):
    """Call that has completed."""

    calls = ()

    def __init__(self, result: DataProto) -> None:
        self._result = result

    def get(self, timeout: float | None = None) -> DataProto:
        return self._result


def test_the_greedy_baseline_is_generated_and_scored() -> None:
    """Greedy responses score the numbers of their prompts, and every sample of a prompt has its prompt's
    baseline."""

    class ByTemperature(FakeReward):
        def score(self, batch: DataProto) -> Any:
            if len(batch) == 4 * NUM_SAMPLES:
                return super().score(batch)
            numbers = prompts_of(batch)
            is_scored = torch.tensor([number != 0 for number in numbers])
            return Done(
                DataProto.from_dict(
                    {"is_scored": is_scored}, {"score": [float(number) for number in numbers]}
                )
            )

    scene = Scene(ByTemperature([]), GroupRules(SAMPLING, greedy=True, scores_early=False), step=3)
    _, scores, _ = scene.sample(3)
    assert [
        (number, sampling.n, sampling.temperature, step) for number, sampling, step, _ in scene.rollout.asked
    ] == [
        (4, 2, 0.7, 3),
        (4, 1, 0, 3),
    ]
    _, baseline = scores
    assert baseline.get().tensors["baseline_scores"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert baseline.get().tensors["is_baseline_scored"].tolist() == [False, False] + [True] * 6


def test_plain_samples_are_scored_while_the_loop_goes_on() -> None:
    scene = Scene(FakeReward([0]), GroupRules(SAMPLING), step=3)
    _, scores, metrics = scene.sample(3)
    assert scene.rollout.asked == [(4, SAMPLING, 3, 0)]
    assert len(scores) == 1
    assert metrics == {}
