"""Metrics of k samples of a prompt, such as pass@k.

They are unbiased estimates from n >= k samples: the mean over all subsets of size k.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from fractions import Fraction
from math import comb, sqrt
from statistics import fmean, variance
from typing import NamedTuple


class Estimate(NamedTuple):
    """An estimate with its standard error over prompts.

    The error refers to another draw of prompts from the same distribution. It is None for a single prompt.
    """

    value: float
    standard_error: float | None


def mean_over_prompts(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per prompt, such as the mean score of its samples.

    The standard error is s / sqrt(P), where s is the standard deviation over the P prompts with divisor P -
    1. Samples of the same prompt are correlated, so an error over samples would be too small (Miller 2024,
    arXiv 2411.00640).

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("a mean over prompts needs at least one prompt")
    return Estimate(fmean(values), sqrt(variance(values) / len(values)) if len(values) > 1 else None)


def mean_difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Return the paired difference of two models on the same prompts, in the same order.

    This is the mean of `values` minus `others`. Pairing removes the variance of prompt difficulty from the
    standard error.

    Raises:
        ValueError: The numbers of prompts differ.
    """
    return mean_over_prompts([value - other for value, other in zip(values, others, strict=True)])


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Return the expected maximum of k of the scores.

    The result is the sum over i of s_(i) C(i - 1, k - 1) / C(n, k), with scores in ascending order and i from
    1.

    For scores of 0 and 1 this is pass@k, the probability that at least one of k samples is correct: 1 - C(n -
    c, k) / C(n, k), where c of n samples are correct (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    num_samples = len(scores)
    _check(num_samples, k)
    return sum(score * comb(rank, k - 1) for rank, score in enumerate(sorted(scores))) / comb(num_samples, k)


def majority_at_k(answers: Sequence[Hashable], scores: Sequence[float], k: int) -> float:
    """Return the expected score of the most frequent answer of k samples.

    Ties are broken uniformly at random.

    An answer with m samples wins j of the k votes in C(m, j) ways, times the ways in which the others share k
    - j votes with none above j. If t others tie with it, it gets 1 / (t + 1) of them.

    Args:
        answers: The answer of each sample; equal answers count together.
        scores: The score of each sample, averaged over the samples with the same answer.
    """
    _check(len(answers), k)
    votes = Counter(answers)
    totals: dict[Hashable, float] = defaultdict(float)
    for answer, score in zip(answers, scores, strict=True):
        totals[answer] += score
    expected = 0.0

    for answer, count in votes.items():
        others = [votes[other] for other in votes if other != answer]
        # Integers and fractions are exact and do not overflow, unlike floats.
        ways = sum(
            comb(count, won) * _ways_of_others(others, k - won, won) for won in range(1, min(count, k) + 1)
        )
        expected += totals[answer] / count * float(Fraction(ways) / comb(len(answers), k))

    return expected


def _ways_of_others(counts: Sequence[int], votes: int, most: int) -> Fraction:
    """Return the number of ways to distribute `votes` votes over answers with these sample counts.

    No answer may get more than `most` votes. Each way is divided by 1 + the number of answers that reach
    `most`.
    """
    ways = {(0, 0): 1}  # (votes given, answers at `most`) -> ways
    # Dynamic programming: each answer extends the table of the previous ones.
    for count in counts:
        longer: dict[tuple[int, int], int] = defaultdict(int)
        for (given, tied), number in ways.items():
            for more in range(min(count, most, votes - given) + 1):
                longer[given + more, tied + (more == most)] += number * comb(count, more)
        ways = longer

    return sum(
        (Fraction(number, tied + 1) for (given, tied), number in ways.items() if given == votes), Fraction(0)
    )


def _check(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"k is {k}, but must be between 1 and {num_samples}, the number of samples of the prompt; use "
            f"another k or more samples"
        )
