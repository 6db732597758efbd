"""What k samples of a prompt achieve, estimated without bias from n >= k samples of it: the mean over all
subsets of k."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from fractions import Fraction
from math import comb, sqrt
from statistics import fmean, variance
from typing import NamedTuple


class Estimate(NamedTuple):
    """standard_error: of `value`, were other prompts drawn from where these come from; None for a single
    prompt."""

    value: float
    standard_error: float | None


def mean_over_prompts(values: Sequence[float]) -> Estimate:
    """The mean of one value for each prompt, such as the mean score of its samples; s / sqrt(P), s their
    deviation with P - 1.

    Samples of a prompt are alike, so that an error over samples would be too small (Miller 2024, arXiv
    2411.00640). Raises ValueError without a value.
    """
    if not values:
        raise ValueError("a mean over prompts needs at least one prompt")
    return Estimate(fmean(values), sqrt(variance(values) / len(values)) if len(values) > 1 else None)


def mean_difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Of two models on the same prompts, in the same order: the mean of `values` less `others`, and its
    error, in which what makes a prompt hard for both is gone. Raises ValueError for other numbers of prompts.
    """
    return mean_over_prompts([value - other for value, other in zip(values, others, strict=True)])


def best_at_k(scores: Sequence[float], k: int) -> float:
    """The expected best of k scores: sum over i of s_(i) C(i - 1, k - 1) / C(n, k), scores in rising order, i
    from 1.

    Of scores 0 and 1 it is pass@k, the chance that one of k samples is right: 1 - C(n - c, k) / C(n, k),
    where c of n are (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    num_samples = len(scores)
    _check(num_samples, k)
    return sum(score * comb(rank, k - 1) for rank, score in enumerate(sorted(scores))) / comb(num_samples, k)


def majority_at_k(answers: Sequence[Hashable], scores: Sequence[float], k: int) -> float:
    """The expected score of the answer that most of k samples give; ties are broken by lot, at even chances.

    answers: one of each sample, equal where the samples agree; scores: of each sample, averaged where the
    same answer has several. An answer with m samples wins j of the k votes in C(m, j) ways, times the ways of
    the others to share k - j votes with none above j; a tie with t others leaves it 1 / (t + 1) of them.
    """
    _check(len(answers), k)
    votes = Counter(answers)
    totals: dict[Hashable, float] = defaultdict(float)
    for answer, score in zip(answers, scores, strict=True):
        totals[answer] += score
    expected = 0.0

    for answer, count in votes.items():
        others = [votes[other] for other in votes if other != answer]
        # Integers and fractions count exactly, and do not overflow as floats would.
        ways = sum(
            comb(count, won) * _ways_of_others(others, k - won, won) for won in range(1, min(count, k) + 1)
        )
        expected += totals[answer] / count * float(Fraction(ways) / comb(len(answers), k))

    return expected


def _ways_of_others(counts: Sequence[int], votes: int, most: int) -> Fraction:
    """Ways to give `votes` votes to answers with so many samples, none above `most`, each divided by 1 + the
    number that reach it."""
    ways = {(0, 0): 1}  # (votes given, answers at `most`) -> ways
    # Dynamic programming: each answer extends the table of those before it.
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
            f"k is {k}, but must be between 1 and the {num_samples} samples of the prompt; use another k, "
            f"or more samples"
        )
