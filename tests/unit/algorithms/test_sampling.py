"""Overlong shaping, groups with signal, and metrics of k samples."""

import itertools
import statistics
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.groups import group_metrics, overlong_penalty, penalise_overlong, rows_with_signal
from megarl.algorithms.metrics import (
    Estimate,
    best_at_k,
    majority_at_k,
    mean_difference,
    mean_over_prompts,
)
from megarl.config.schema import OverlongConfig

NAN = float("nan")


def test_overlong_penalty_by_hand():
    # limit 10, buffer 4: free up to 6, then a quarter for each token
    penalty = overlong_penalty(
        torch.tensor([0, 1, 6, 7, 9, 10, 12]), 10, OverlongConfig(buffer_share=0.4, penalty=2.0)
    )
    assert penalty.tolist() == [0.0, 0.0, 0.0, -0.5, -1.5, -2.0, -2.0]
    assert overlong_penalty(torch.tensor([10]), 10, OverlongConfig()).tolist() == [0.0]


def test_overlong_penalty_stands_with_the_score():
    # full; short; full of which one slot is a tool's
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]]).bool()
    scores = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, NAN, NAN], [0.0, NAN, 0.0, 1.0]])
    shaped, metrics = penalise_overlong(scores, mask, 4, OverlongConfig(buffer_share=0.5, penalty=1.0))
    torch.testing.assert_close(shaped[mask], torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.5]))
    assert metrics == pytest.approx({"reward/overlong_penalty": -0.5, "reward/overlong_fraction": 2 / 3})


def uids(names):
    return np.array(list(names), dtype=object)


def test_rows_with_signal_by_hand():
    scores = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.5])
    assert rows_with_signal(scores, uids("abbaccd")).tolist() == [True, False, False, True, True, True, False]


def test_group_metrics_by_hand():
    # a: differ; b: all best; c: all worst; d: one sample in between
    metrics = group_metrics(torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.5]), uids("aabbcd"))
    assert metrics == pytest.approx(
        {"groups/without_signal": 3 / 4, "groups/at_best": 1 / 4, "groups/at_worst": 1 / 4}
    )
    equal = group_metrics(torch.tensor([1.0, 1.0]), uids("ab"))
    assert equal == {"groups/without_signal": 1.0, "groups/at_best": 0.0, "groups/at_worst": 0.0}
    assert group_metrics(torch.zeros(0), uids("")) == {}


def test_samples_whose_scoring_failed_are_compared_with_no_other():
    """a: one of two failed; b: the failed one is not why they differ; c: all failed.

    Of the prompts with a score, a and d are flat.
    """
    scores = torch.tensor([1.0, 0.0, 1.0, 0.5, 0.0, 0.0, 0.0, 1.0])
    is_scored = torch.tensor([True, False, True, True, False, False, False, True])
    names = uids("aabbbccd")
    metrics = group_metrics(scores, names, is_scored)
    assert metrics == pytest.approx(
        {"groups/without_signal": 2 / 3, "groups/at_best": 2 / 3, "groups/at_worst": 0}
    )
    assert group_metrics(scores[1:2], names[1:2], is_scored[1:2]) == {}
    assert rows_with_signal(torch.zeros(0), uids("")).tolist() == []


def test_a_score_that_is_no_number_is_not_taken_for_equal():
    with pytest.raises(ValueError, match=r"the score is nan for 1 of 2 samples \(uid a\)"):
        rows_with_signal(torch.tensor([NAN, 0.0]), uids("ab"))


@settings(max_examples=40, deadline=None)
@given(scores=st.lists(st.integers(0, 2), min_size=1, max_size=8), seed=st.integers(0, 100))
def test_rows_with_signal_match_a_loop_in_any_order(scores, seed):
    uid = np.random.default_rng(seed).choice(list("abc"), len(scores)).astype(object)
    got = rows_with_signal(torch.tensor(scores, dtype=torch.float32), uid)
    assert got.tolist() == [
        len({s for s, other in zip(scores, uid, strict=True) if other == own}) > 1 for own in uid
    ]
    order = np.random.default_rng(seed).permutation(len(scores))
    assert torch.equal(
        rows_with_signal(torch.tensor(scores, dtype=torch.float32)[order], uid[order]), got[order]
    )


def test_pass_at_k_by_hand():
    def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
        return best_at_k([1.0] * num_correct + [0.0] * (num_samples - num_correct), k)

    assert pass_at_k(4, 2, 1) == pytest.approx(0.5)
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert (pass_at_k(4, 2, 3), pass_at_k(4, 0, 4), pass_at_k(4, 4, 1)) == (1.0, 0.0, 1.0)
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)


def test_majority_by_hand():
    # Samples a, a, b, c: pairs aa (a), ab twice, ac twice, bc: a in 1 + 4 halves = 3 of 6, b and c in 2 halves and
    # 1 half: 1.5
    assert majority_at_k("aabc", [1.0, 1.0, 0.0, 0.0], 2) == pytest.approx(0.5)
    assert majority_at_k("aabc", [0.0, 0.0, 1.0, 0.0], 2) == pytest.approx(0.25)
    assert majority_at_k("aabb", [1.0, 1.0, 0.0, 0.0], 4) == pytest.approx(0.5)
    assert majority_at_k("aab", [1.0, 1.0, 0.0], 3) == 1.0


def all_subsets(number, k):
    return list(itertools.combinations(range(number), k))


def majority_of(answers, scores):
    """Return the mean over the most frequent answers, each with the mean score of all samples that give
    it."""
    votes = Counter(answers)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return statistics.fmean(scores[winner] for winner in winners)


@settings(max_examples=60, deadline=None)
@given(answers=st.lists(st.sampled_from("abcd"), min_size=1, max_size=8), data=st.data())
def test_what_k_samples_achieve_is_the_mean_over_all_subsets(answers, data):
    number = len(answers)
    k = data.draw(st.integers(1, len(answers)))
    by_answer = {answer: data.draw(st.sampled_from([0.0, 0.5, 1.0])) for answer in sorted(set(answers))}
    scores = [by_answer[answer] for answer in answers]
    subsets = all_subsets(number, k)
    majority = statistics.fmean(majority_of([answers[i] for i in subset], by_answer) for subset in subsets)
    assert majority_at_k(answers, scores, k) == pytest.approx(majority)
    assert best_at_k(scores, k) == pytest.approx(
        statistics.fmean(max(scores[i] for i in subset) for subset in subsets)
    )
    passed = statistics.fmean(any(scores[i] == 1.0 for i in subset) for subset in subsets)
    assert best_at_k([float(score == 1.0) for score in scores], k) == pytest.approx(passed)


def test_sixty_four_samples_of_many_answers_are_no_burden():
    answers = [number % 20 for number in range(64)]
    scores = [float(answer == 0) for answer in answers]
    assert 0.0 < majority_at_k(answers, scores, 32) < best_at_k(scores, 32) <= 1.0


@pytest.mark.parametrize("k", [0, 5])
def test_a_k_that_the_samples_do_not_allow_is_refused(k):
    for call in (lambda: best_at_k([0.0] * 4, k), lambda: majority_at_k("abcd", [0.0] * 4, k)):
        with pytest.raises(ValueError, match=f"k is {k}, but must be between 1 and 4"):
            call()


def test_errors_over_prompts_by_hand():
    """1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9 = 14, so sqrt(14 / 3 / 4). Minus 1, 1, 3, 3:
    0, 1, 0, 3."""
    assert mean_over_prompts([1, 2, 3, 6]) == (3, pytest.approx((14 / 12) ** 0.5))
    assert mean_difference([1, 2, 3, 6], [1, 1, 3, 3]) == (1, pytest.approx((6 / 12) ** 0.5))
    assert mean_difference([5, 7], [1, 3]) == (4, 0)  # independent of the variance between prompts
    assert mean_over_prompts([2]) == Estimate(2, None)
    with pytest.raises(ValueError, match="at least one prompt"):
        mean_over_prompts([])
