"""Test validation on a small data set, with a fake rollout and reward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.config.schema import PPOConfig, RewardConfig, RolloutConfig, SamplingConfig
from megarl.config.validation_metrics import RewardKeys, source_metrics, validation_metrics
from megarl.machine.errors import ConfigError
from megarl.trainers.evaluation import (
    Evaluation,
    ScoredSample,
    compare,
    prompt_values,
    read_chat_time,
    read_samples,
    results_of,
    sample_lines,
)

SOURCES = ["sums", "sums", "words", "sums", "words"]


class Rows:
    """Data set of five prompts from two sources."""

    def __len__(self) -> int:
        return len(SOURCES)

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        return DataProto.from_dict(
            {"prompts": torch.tensor(list(indices))[:, None]},
            {
                "uid": list(uids),
                "messages": [[{"role": "user", "content": f"question {index}"}] for index in indices],
                "data_source": [SOURCES[index] for index in indices],
                "reward_model": [{"ground_truth": f"truth {index}"} for index in indices],
                "extra_info": [{"index": index} for index in indices],
            },
        )


class FakeRollout:
    def __init__(self) -> None:
        self.asked: list[tuple[int, SamplingConfig, int]] = []

    def generate(self, prompts: DataProto, sampling: SamplingConfig, step: int) -> DataProto:
        self.asked.append((len(prompts), sampling, step))
        batch = prompts.repeat(sampling.n)
        written = {"response_mask": torch.ones(len(batch), 3, dtype=torch.bool)}
        return batch.union(DataProto.from_dict(written, {"finish_reason": ["stop"] * len(batch)}))


class FakeReward:
    """Reward whose score for sample k of prompt i is i + k / 2."""

    def score(self, batch: DataProto, with_texts: bool) -> DataProto:
        assert with_texts
        prompts = batch.tensors["prompts"][:, 0].tolist()
        scores = [prompt + 0.5 * (row % 2) for row, prompt in enumerate(prompts)]
        texts = [f"text {prompt}" for prompt in prompts]
        arrays = {"score": scores, "response_text": texts, "answer": texts, "has_answer": [True] * len(batch)}
        numbers = [{"length": prompt + 2.0} for prompt in prompts]
        is_scored = torch.ones(len(batch), dtype=torch.bool)

        return DataProto.from_dict({"is_scored": is_scored}, {**arrays, "reward_numbers": numbers})


def run(num_generations: int) -> tuple[Any, FakeRollout]:
    rollout = FakeRollout()
    evaluation = Evaluation(
        Rows(),
        SamplingConfig(n=2, temperature=0.3),
        batch_size=2,
        num_generations=num_generations,
        pass_score=1,
    )  # type: ignore[arg-type]
    return evaluation.run(rollout, FakeReward()), rollout  # type: ignore[arg-type]


def test_means_are_over_all_samples_of_a_source() -> None:
    """sums: prompts 0, 1, 3; words: prompts 2, 4. Each prompt's two samples average to its number + 0.25."""
    (metrics, generations), rollout = run(num_generations=0)
    assert metrics == pytest.approx(
        {
            "val/sums/score/mean": 4 / 3 + 0.25,
            "val/words/score/mean": 3.25,
            "val/score/mean": 2.25,
            "val/sums/best@2": 4 / 3 + 0.5,
            "val/words/best@2": 3.5,
            "val/best@2": 2.5,  # the better of the two
            "val/sums/maj@2": 4 / 3 + 0.25,
            "val/words/maj@2": 3.25,
            "val/maj@2": 2.25,  # both have the same answer
            "val/sums/pass@2": 2 / 3,  # all but prompt 0, whose samples score 0 and 0.5
            "val/words/pass@2": 1,
            "val/pass@2": 4 / 5,
            "val/sums/reward/length/mean": 4 / 3 + 2,
            "val/words/reward/length/mean": 5,
            "val/reward/length/mean": 4,
            "val/sums/reward/error_rate": 0,
            "val/words/reward/error_rate": 0,
            "val/reward/error_rate": 0,
        }
    )
    assert [num_prompts for num_prompts, _, _ in rollout.asked] == [2, 2, 1]
    assert {(sampling.temperature, sampling.n, step) for _, sampling, step in rollout.asked} == {(0.3, 2, 0)}
    assert generations == []


def test_the_first_rows_are_kept_to_be_read() -> None:
    (_, generations), _ = run(num_generations=5)  # one of them is in the second batch
    assert [row["uid"] for row in generations] == ["0", "0", "1", "1", "2"]
    assert generations[1] == {
        "uid": "0",
        "data_source": "sums",
        "response": "text 0",
        "ground_truth": "truth 0",
        "extra_info": {"index": 0},
        "score": 0.5,
        "reward_numbers": {"length": 2},
    }


def sample(uid: str, score: float, answer: str) -> ScoredSample:
    return ScoredSample(uid, "sums", [], answer, "", {}, score, answer, 1, "stop", has_answer=True)


def test_what_k_of_four_samples_achieve() -> None:
    """2 of 4 samples are right, so one of the 6 pairs has no right sample. The answers are 7 7 8 9: the pair
    of sevens has a majority, every other pair is a tie.

    maj@2: the pair (7, 7) scores 1; (7, 8) and (7, 9), two each, 1/2; (8, 9) scores 0: (1 + 4 / 2) / 6.
    maj@4: 7.
    """
    right = [1.0, 1.0, 0.0, 0.0]
    wrong = [0.0] * 4
    samples = [
        *(sample("0", *given) for given in zip(right, "7789", strict=True)),
        *(sample("1", *given) for given in zip(wrong, "1111", strict=True)),
    ]
    assert prompt_values(samples, 1.0) == {
        "score/mean": [0.5, 0],
        "best@2": pytest.approx([5 / 6, 0]),
        "pass@2": pytest.approx([5 / 6, 0]),
        "maj@2": pytest.approx([1 / 2, 0]),
        "best@4": [1, 0],
        "pass@4": [1, 0],
        "maj@4": [1, 0],
        "reward/error_rate": [0, 0],
    }
    assert prompt_values([sample("0", 1.0, "7")], 1.0) == {"score/mean": [1], "reward/error_rate": [0]}
    episodes = [
        sample(uid, 1.0, "7")._replace(num_turns=turns) for uid, turns in (("0", 2), ("0", 3), ("1", 1))
    ]
    assert prompt_values(episodes, 1.0)["turns/mean"] == [2.5, 1]


def test_names_of_metrics_do_not_depend_on_scores() -> None:
    """One of 0.5, 0 and 1 (0.1 * 3 + 0.7 in floating point) passes with 1, two with 0.5. The best of pairs is
    0.5, 1, 1."""
    partial = [
        sample("0", *given) for given in zip([0.5, 0.0, 0.1 + 0.1 + 0.1 + 0.7 - 1e-9], "abc", strict=True)
    ]
    right = [one._replace(score=1.0) for one in partial]
    assert list(prompt_values(partial, 1.0)) == list(prompt_values(right, 1.0))
    assert prompt_values(partial, 1.0)["best@2"] == pytest.approx([(0.5 + 1 + 1) / 3])
    assert prompt_values(partial, 1.0)["pass@2"] == pytest.approx([2 / 3])
    assert prompt_values(partial, 0.5)["pass@2"] == [1]
    assert "pass@2" not in prompt_values(partial, None)


def test_answers_are_compared_only_where_the_reward_returns_them() -> None:
    """Whole responses never replace answers. Samples without an answer (None) agree with each other."""
    texts = [
        sample("0", *given)._replace(has_answer=False)
        for given in ((1.0, "so 18"), (1.0, "18!"), (1.0, "it is 18"), (0.0, "7"))
    ]
    assert not any(name.startswith("maj") for name in prompt_values(texts, 1.0))
    answers = [
        one._replace(has_answer=True, answer=answer)
        for one, answer in zip(texts, ("18", "18", "18", "7"), strict=True)
    ]
    assert prompt_values(answers, 1.0)["maj@4"] == [1]
    silent = [
        one._replace(answer=answer) for one, answer in zip(answers, ("18", None, None, None), strict=True)
    ]

    # the mean score of the three that agree
    assert prompt_values(silent, 1.0)["maj@4"] == pytest.approx([2 / 3])


def test_samples_whose_scoring_failed_do_not_count() -> None:
    """Prompt 0 is left with 1, 0 and 0 of four samples, prompt 1 with none. One of the 3 pairs has no 1."""
    samples = [sample("0", *given) for given in ((1.0, "7"), (0.0, "8"), (0.0, "9"), (0.0, "failed"))]
    samples += [sample("1", 0.0, "failed") for _ in range(4)]
    samples = [
        one._replace(
            is_scored=one.answer != "failed", reward_numbers={"length": 4.0} if one.answer == "7" else {}
        )
        for one in samples
    ]
    values = prompt_values(samples, 1.0)
    expected: dict[str, list[float]] = {
        "score/mean": [1 / 3, math.nan],
        "best@2": [2 / 3, math.nan],
        "pass@2": [2 / 3, math.nan],
        "maj@2": [1 / 3, math.nan],  # each pair disagrees
        "best@4": [math.nan] * 2,
        "pass@4": [math.nan] * 2,
        "maj@4": [math.nan] * 2,
        "reward/length/mean": [4, math.nan],
        "reward/error_rate": [1 / 4, 1],
    }
    assert values.keys() == expected.keys()
    for name, of_prompts in expected.items():
        assert values[name] == pytest.approx(of_prompts, nan_ok=True), name
    found = results_of(samples, 1.0)["sums"].metrics
    assert found["best@2"] == (pytest.approx(2 / 3), None)
    assert math.isnan(found["best@4"].value)


def test_a_comparison_names_what_only_one_side_has() -> None:
    """This evaluation has 4 samples without answers, the other has 2 with answers. The only prompt's means
    differ by 0.25 - 1."""
    here = [
        sample("0", score, "7")._replace(has_answer=False, reward_numbers={"length": 1.0})
        for score in (1.0, 0.0, 0.0, 0.0)
    ]
    there = [sample("0", 1.0, "7") for _ in range(2)]
    (comparison,) = compare(here, there, 1.0).values()
    assert comparison.differences["score/mean"] == (-0.75, None)
    assert comparison.only_here == ["best@4", "pass@4", "reward/length/mean"]
    assert comparison.only_there == ["maj@2"]


def test_names_of_metrics_are_known_before_a_run() -> None:
    """The names derived from a configuration are those that a validation measures, in every combination."""
    for n, pass_score, has_answer in itertools.product((1, 2, 5), (None, 0.5), (False, True)):
        config = PPOConfig(
            rollout=RolloutConfig(validation=SamplingConfig(n=n)), reward=RewardConfig(pass_score=pass_score)
        )
        keys = RewardKeys(has_answer, frozenset(["length"]))
        samples = [
            sample("0", 0.3, "a")._replace(has_answer=has_answer, reward_numbers={"length": 1.0})
            for _ in range(n)
        ]
        assert set(prompt_values(samples, pass_score)) == set(source_metrics(config, keys))

    names = validation_metrics(config, {"a": keys, "b": RewardKeys()})
    assert {
        "val/best@4",
        "val/a/maj@4",
        "val/reward/length/mean",
        "val/a/reward/length/mean",
        "val/b/pass@2",
    } <= set(names)

    # not all samples have an answer
    assert not {"val/maj@4", "val/b/maj@4", "val/b/reward/length/mean"} & set(names)


def test_each_sample_has_what_is_kept_of_it() -> None:
    (first, _), *_ = Evaluation(Rows(), SamplingConfig(n=1), batch_size=2, pass_score=1).samples(
        FakeRollout(), FakeReward()
    )  # type: ignore[arg-type]
    assert first == ScoredSample(
        uid="0",
        data_source="sums",
        messages=[{"role": "user", "content": "question 0"}],
        response="text 0",
        ground_truth="truth 0",
        extra_info={"index": 0},
        score=0,
        answer="text 0",
        num_tokens=3,
        finish_reason="stop",
        has_answer=True,
        reward_numbers={"length": 2},
    )


def test_samples_are_written_and_read_again_whatever_their_text(tmp_path):
    """A reward function may return any text as the answer that it found."""
    sample = ScoredSample(
        uid="0",
        data_source="sums",
        messages=[{"role": "user", "content": "48−61"}],
        response="a",
        answer="\ud83d",
        ground_truth="5",
        extra_info={},
        score=1.0,
        num_tokens=1,
        finish_reason="stop",
    )
    file = tmp_path / "samples.jsonl"
    file.write_text(sample_lines([sample]), encoding="utf-8")
    assert read_samples(file) == [sample]


def test_an_evaluation_is_compared_at_the_time_that_the_others_template_was_told(tmp_path):
    results = tmp_path / "results.json"
    assert read_chat_time(results) is None
    results.write_text('{"step": 1}')
    assert read_chat_time(results) is None
    results.write_text('{"step": 1, "chat_time": "2026-03-02T23:59:59"}')
    assert read_chat_time(results) == datetime(2026, 3, 2, 23, 59, 59)

    for damaged in ("{", '{"chat_time": 5}'):
        results.write_text(damaged)
        with pytest.raises(ConfigError, match="results.json"):
            read_chat_time(results)
