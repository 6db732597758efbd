"""How a step's samples come about, with a rollout and a reward that are made up: dynamic sampling and its
budget, greedy baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import DynamicSamplingConfig, SamplingConfig
from megarl.controller.futures import RemoteFuture
from megarl.data.loader import BatchLoader
from megarl.data.tables import RowIdentity
from megarl.machine.errors import RunError
from megarl.trainers.sampling import DynamicSampling, GreedyBaseline, PlainSampling

NUM_SAMPLES = 2
SAMPLING = SamplingConfig(n=NUM_SAMPLES, temperature=0.7)


class Rows:
    """Prompt i is the token i + 1."""

    identity = RowIdentity("rows")

    def __init__(self, size: int = 12) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        prompts = RaggedTensor.of_rows([[index + 1] for index in indices], torch.int32, on_left=True)
        return DataProto.from_dict({"prompts": prompts}, {"uid": list(uids)})


class FakeRollout:
    """The response to a prompt has as many tokens as there were generations before in the step, and one
    more."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, SamplingConfig, int, int]] = []

    def generate(
        self,
        prompts: DataProto,
        sampling: SamplingConfig,
        step: int,
        generation: int = 0,
        scoring: object = None,
    ) -> DataProto:
        self.asked.append((len(prompts), sampling, step, generation))
        batch = prompts.repeat(sampling.n)
        length = generation + 1
        lengths = torch.full((len(batch),), length)
        made = {
            "responses": RaggedTensor.constant(7, lengths, torch.int32),
            "response_mask": RaggedTensor.constant(True, lengths, torch.bool),
            "rollout_log_probs": RaggedTensor.constant(-0.5, lengths, torch.float32),
        }

        return batch.union(DataProto.from_dict(made))


class FakeReward:
    """The samples of a prompt whose number is in `mixed` score 1 and 0, those of the others all 1; greedy
    ones score their number."""

    def __init__(self, mixed: Sequence[int], failed: tuple[int, int] | None = None) -> None:
        """failed: the number of a prompt, and which of its samples could not be scored."""
        self._mixed = mixed
        self._failed = failed

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
            {"reward/error_rate": 0.25 if len(batch) == 8 else 0.0},
        )


def dynamic(
    mixed: Sequence[int], max_generations: int, size: int = 12, failed: tuple[int, int] | None = None
) -> tuple[DynamicSampling, BatchLoader, FakeRollout]:
    rollout = FakeRollout()
    loader = BatchLoader(Rows(size), 4, shuffle=False, seed=0)
    config = DynamicSamplingConfig(enabled=True, max_generations=max_generations)

    return (
        DynamicSampling(rollout, FakeReward(mixed, failed), loader, SAMPLING, config, wanted=4),
        loader,
        rollout,
    )  # type: ignore[arg-type]


def prompts_of(batch: DataProto) -> list[int]:
    return (batch.tensors["prompts"][:, -1] - 1).tolist()


def test_prompts_without_signal_are_replaced() -> None:
    """Of 0 to 3 only 1 and 2 have one: two more are wanted where half have one, so that four are drawn, and
    of these 4 is kept; the last one is expected among 8 to 10, and with the margin of a fifth 11 is drawn
    too."""
    sampling, loader, rollout = dynamic(mixed=[1, 2, 4, 9, 8], max_generations=3)
    samples = sampling(next(loader), step=5)
    assert prompts_of(samples.batch) == [1, 1, 2, 2, 4, 4, 8, 8]
    assert [(number, step, generation) for number, _, step, generation in rollout.asked] == [
        (4, 5, 0),
        (4, 5, 1),
        (4, 5, 2),
    ]
    assert loader.state_dict()["num_served"] == [12]  # a resumed run goes on behind all that was drawn
    assert samples.scores == []
    assert samples.metrics == pytest.approx(
        {
            "dynamic_sampling/num_generations": 3,
            "dynamic_sampling/num_prompts": 12,
            "dynamic_sampling/num_without_signal": 7,
            "dynamic_sampling/num_surplus": 1,
            "dynamic_sampling/score_mean": (7 * 2 + 5) / 24,
        }
    )
    assert samples.batch.meta_info == {"reward/error_rate": pytest.approx(0.25)}


def test_a_sample_that_failed_makes_no_signal() -> None:
    """Prompt 1's second sample scores 0 for its scoring failed: its first has nothing to be compared with,
    and 5 takes its place."""
    sampling, loader, _ = dynamic(mixed=[0, 1, 2, 3, 5], max_generations=2, failed=(1, 1))
    assert prompts_of(sampling(next(loader), step=1).batch) == [0, 0, 2, 2, 3, 3, 5, 5]


def test_samples_of_all_generations_have_one_width() -> None:
    sampling, loader, _ = dynamic(mixed=[0, 1, 2, 5, 6], max_generations=2)
    tensors = sampling(next(loader), step=1).batch.tensors
    assert tensors["responses"].tolist() == [[7, 0]] * 6 + [[7, 7]] * 2
    assert tensors["response_mask"].tolist() == [[True, False]] * 6 + [[True, True]] * 2
    assert tensors["attention_mask"].tolist() == [[1, 1, 0]] * 6 + [[1, 1, 1]] * 2
    assert tensors["position_ids"].tolist() == [[0, 1, 1]] * 6 + [[0, 1, 2]] * 2
    assert tensors["input_ids"][:, :2].tolist() == [[number, 7] for number in (1, 1, 2, 2, 3, 3, 6, 6)]
    assert tensors["token_level_scores"].shape == (8, 2)
    assert tensors["score_parts"].shape == (8, 1)


def test_a_batch_full_of_signal_is_one_generation() -> None:
    sampling, loader, rollout = dynamic(mixed=range(12), max_generations=1)
    samples = sampling(next(loader), step=1)
    assert prompts_of(samples.batch) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(rollout.asked) == 1
    assert samples.metrics["dynamic_sampling/num_without_signal"] == 0


def test_a_spent_budget_ends_the_run() -> None:
    sampling, loader, rollout = dynamic(mixed=[1], max_generations=3)
    with pytest.raises(
        RunError,
        match=r"step 2: only 1 of 12 prompts .* and 4 are needed; the mean score is "
        r"0\.958.*max_generations=3 ",
    ):
        sampling(next(loader), step=2)

    assert len(rollout.asked) == 3
    assert loader.state_dict()["num_served"] == [12]
    nothing, loader, _ = dynamic(mixed=[], max_generations=2)
    with pytest.raises(RunError, match=r"only 0 of 8 prompts"):
        nothing(next(loader), step=2)


def test_a_resumed_run_draws_what_the_other_would_have_drawn() -> None:
    mixed = [1, 2, 4, 9, 8, 12, 13, 15, 17, 18]
    sampling, loader, _ = dynamic(mixed, max_generations=3, size=40)
    sampling(next(loader), step=1)
    state = loader.state_dict()
    following = prompts_of(sampling(next(loader), step=2).batch)
    resumed, other, _ = dynamic(mixed, max_generations=3, size=40)
    other.load_state_dict(state)
    assert prompts_of(resumed(next(other), step=2).batch) == following


class Done(RemoteFuture):
    """A call that has ended."""

    calls = ()

    def __init__(self, result: DataProto) -> None:
        self._result = result

    def get(self, timeout: float | None = None) -> DataProto:
        return self._result


def test_the_greedy_baseline_is_generated_and_scored() -> None:
    """Prompts 4, 0, 2: greedy responses score their numbers, and every sample of a prompt has its
    prompt's."""

    class ByTemperature(FakeReward):
        def score(self, batch: DataProto) -> Done:
            numbers = prompts_of(batch)
            is_scored = torch.tensor([number != 0 for number in numbers])
            return Done(
                DataProto.from_dict(
                    {"is_scored": is_scored}, {"score": [float(number) for number in numbers]}
                )
            )

    rollout = FakeRollout()
    prompts = Rows().batch([4, 0, 2], ["a", "b", "c"])
    samples = GreedyBaseline(rollout, ByTemperature([]), SAMPLING)(prompts, step=3)  # type: ignore[arg-type]
    assert [
        (number, sampling.n, sampling.temperature, step) for number, sampling, step, _ in rollout.asked
    ] == [
        (3, 2, 0.7, 3),
        (3, 1, 0, 3),
    ]
    _, baseline = samples.scores
    assert baseline.get().tensors["baseline_scores"].tolist() == [4, 4, 0, 0, 2, 2]
    assert baseline.get().tensors["is_baseline_scored"].tolist() == [True, True, False, False, True, True]


def test_plain_samples_are_scored_while_the_loop_goes_on() -> None:
    rollout = FakeRollout()
    samples = PlainSampling(rollout, FakeReward([0]), SAMPLING)(Rows().batch([0, 1], ["a", "b"]), step=3)  # type: ignore[arg-type]
    assert rollout.asked == [(2, SAMPLING, 3, 0)]
    assert len(samples.scores) == 1
    assert samples.metrics == {}
