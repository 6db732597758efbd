"""Validation over a small data set, with a rollout and a reward that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.config.schema import SamplingConfig
from megarl.trainers.evaluation import Evaluation, ScoredSample, prompt_values
from megarl.trainers.evaluation_results import read_samples, sample_lines

SOURCES = ["sums", "sums", "words", "sums", "words"]


class Rows:
    """Five prompts of two sources."""

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
    """Sample k of prompt i scores i + k / 2."""

    def score(self, batch: DataProto, with_texts: bool) -> DataProto:
        assert with_texts
        prompts = batch.tensors["prompts"][:, 0].tolist()
        scores = [prompt + 0.5 * (row % 2) for row, prompt in enumerate(prompts)]
        texts = [f"text {prompt}" for prompt in prompts]
        return DataProto.from_dict(non_tensors={"score": scores, "response_text": texts, "answer": texts})


def run(num_generations: int) -> tuple[Any, FakeRollout]:
    rollout = FakeRollout()
    evaluation = Evaluation(Rows(), SamplingConfig(n=2, temperature=0.3), batch_size=2, num_generations=num_generations)  # type: ignore[arg-type]
    return evaluation.run(rollout, FakeReward()), rollout  # type: ignore[arg-type]


def test_means_are_over_all_samples_of_a_source() -> None:
    """sums: prompts 0, 1, 3; words: prompts 2, 4; each prompt's two samples average to its number + 0.25."""
    result, rollout = run(num_generations=0)
    assert result.metrics == pytest.approx(
        {
            "val/sums/score/mean": 4 / 3 + 0.25,
            "val/words/score/mean": 3.25,
            "val/score/mean": 2.25,
            "val/sums/best@2": 4 / 3 + 0.5,
            "val/words/best@2": 3.5,
            "val/best@2": 2.5,  # the better of the two
            "val/sums/maj@2": 4 / 3 + 0.25,
            "val/words/maj@2": 3.25,
            "val/maj@2": 2.25,  # both give the same answer
        }
    )
    assert [num_prompts for num_prompts, _, _ in rollout.asked] == [2, 2, 1]
    assert {(sampling.temperature, sampling.n, step) for _, sampling, step in rollout.asked} == {(0.3, 2, 0)}
    assert result.generations == []


def test_the_first_rows_are_kept_to_be_read() -> None:
    result, _ = run(num_generations=5)  # one of them is of the second batch
    assert [row["uid"] for row in result.generations] == ["0", "0", "1", "1", "2"]
    assert result.generations[1] == {
        "uid": "0",
        "data_source": "sums",
        "response": "text 0",
        "ground_truth": "truth 0",
        "extra_info": {"index": 0},
        "score": 0.5,
    }


def sample(uid: str, score: float, answer: str) -> ScoredSample:
    return ScoredSample(uid, "sums", [], answer, "", {}, score, answer, 1, "stop")


def test_what_k_of_four_samples_achieve() -> None:
    """Right are 2 of 4: of the 6 pairs one has none right. Answers 7 7 8 9: the pair of sevens wins itself, every other pair by lot.

    maj@2: the pair (7, 7) scores 1; (7, 8) and (7, 9), two each, 1/2; (8, 9) scores 0: (1 + 4 / 2) / 6. maj@4: 7.
    """
    right, wrong = [1.0, 1.0, 0.0, 0.0], [0.0] * 4
    samples = [
        *(sample("0", *given) for given in zip(right, "7789", strict=True)),
        *(sample("1", *given) for given in zip(wrong, "1111", strict=True)),
    ]
    assert prompt_values(samples) == {
        "score/mean": [0.5, 0],
        "pass@2": pytest.approx([5 / 6, 0]),
        "maj@2": pytest.approx([1 / 2, 0]),
        "pass@4": [1, 0],
        "maj@4": [1, 0],
    }
    assert prompt_values([sample("0", 1.0, "7")]) == {"score/mean": [1]}
    partial = [sample("0", *given) for given in zip([0.5, 0.0, 1.0], "abc", strict=True)]
    assert prompt_values(partial)["best@2"] == pytest.approx([(0.5 + 1 + 1) / 3])
    episodes = [sample(uid, 1.0, "7")._replace(num_turns=turns) for uid, turns in (("0", 2), ("0", 3), ("1", 1))]
    assert prompt_values(episodes)["turns/mean"] == [2.5, 1]


def test_each_sample_has_what_is_kept_of_it() -> None:
    (first, _), *_ = Evaluation(Rows(), SamplingConfig(n=1), batch_size=2).samples(FakeRollout(), FakeReward())  # type: ignore[arg-type]
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
    )


def test_samples_are_written_and_read_again_whatever_their_text(tmp_path):
    """A reward function may give any text as the answer that it found."""
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
