"""The lengths of prompts and responses that a step is predicted for. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import NormalDist, fmean, pstdev
from typing import NamedTuple

from megarl.config.schema import RunConfig

# The spread of log lengths among the samples of a step. Where most samples end at the limit, it is smaller.
_SPREAD = 0.6
_SPREAD_NEAR_LIMIT = 0.45
_NUM_QUANTILES = 256


class Lengths(NamedTuple):
    """The lengths of a step's samples.

    Attributes:
        prompt: The mean tokens of a prompt.
        responses: The tokens of responses in ascending order, at evenly spaced quantiles.
    """

    prompt: int
    responses: tuple[int, ...]

    @property
    def response(self) -> float:
        """The mean tokens of a response."""
        return fmean(self.responses)

    @property
    def row(self) -> float:
        """The mean tokens of a row."""
        return self.prompt + self.response

    def spread(self, count: int, parts: int = 1) -> tuple[int, ...]:
        """Return `count` response lengths at evenly spaced quantiles, in ascending order.

        Args:
            count: The number of lengths.
            parts: The number of equal parts of all responses. Those of the part with the longest one are
                returned.
        """
        return _spread(self.responses, count, parts)

    def sample(self, count: int) -> tuple[int, ...]:
        """Return `count` response lengths with the mean and, if there are several, the mean square of all.

        Longer rows cost more than their share of attention, which grows with the square of the length.
        """
        return _sample(self.responses, count)


@lru_cache(maxsize=256)
def _spread(responses: tuple[int, ...], count: int, parts: int) -> tuple[int, ...]:
    last = len(responses) - 1
    spread = []
    for index in range(count):
        # Every `parts`-th of all responses, the last of them included.
        quantile = (parts * (index + 1) - 0.5) / (parts * count)
        place = min(last, max(0.0, quantile * len(responses) - 0.5))
        below = responses[int(place)]
        above = responses[min(last, int(place) + 1)]
        spread.append(round(below + place % 1 * (above - below)))
    return tuple(spread)


@lru_cache(maxsize=256)
def _sample(responses: tuple[int, ...], count: int) -> tuple[int, ...]:
    # Quantiles have about the right moments. A shift and a factor make them exact.
    quantiles = _spread(responses, count, 1)
    spread = pstdev(quantiles)
    factor = pstdev(responses) / spread if spread else 0.0
    mean = fmean(responses)
    center = fmean(quantiles)

    # Rounding sums instead of lengths keeps the mean.
    sums = [0, *(round(each) for each in accumulate(mean + factor * (each - center) for each in quantiles))]
    return tuple(max(1, after - before) for before, after in pairwise(sums))


def expected_lengths(
    config: RunConfig, prompt: float | None = None, response: float | None = None
) -> Lengths:
    """Return the lengths to predict a run for.

    Args:
        prompt: The mean tokens of a prompt; None: a quarter of the longest.
        response: The mean tokens of a response; None: half of the longest.

    Raises:
        ValueError: A mean is above the configured maximum or below 1.
    """
    longest = config.longest_prompt
    mean = max(1.0, longest / 4) if prompt is None else prompt
    if not 1 <= mean <= longest:
        raise ValueError(f"a mean prompt of {mean:g} tokens: must be in [1, {longest:,}], the longest prompt")
    return assumed_lengths(
        round(mean), config.longest_response / 2 if response is None else response, config.longest_response
    )


def measured_lengths(prompt: float, responses: Sequence[int]) -> Lengths:
    """Return the distribution of measured lengths."""
    return Lengths(round(prompt), tuple(sorted(responses)))


@lru_cache(maxsize=64)
def assumed_lengths(prompt: int, mean: float, longest: int) -> Lengths:
    """Return log-normal response lengths that are truncated at `longest` and have this mean.

    Raises:
        ValueError: The mean is not between 1 and `longest`.
    """
    if not 1 <= mean <= longest:
        raise ValueError(
            f"a mean response of {mean:g} tokens: must be in [1, {longest:,}], the longest response"
        )

    spread = _SPREAD if mean < 0.5 * longest else _SPREAD_NEAR_LIMIT
    normal = NormalDist()
    deviations = [spread * normal.inv_cdf((index + 0.5) / _NUM_QUANTILES) for index in range(_NUM_QUANTILES)]

    # The mean grows with the center, so bisection finds the center that gives the mean.
    low, high = -3.0, math.log(longest) + 4 * spread
    # Each step halves the interval, and 60 of them exhaust the digits of a float.
    for _ in range(60):
        center = (low + high) / 2
        found = fmean(min(float(longest), math.exp(center + deviation)) for deviation in deviations)
        low, high = (center, high) if found < mean else (low, center)

    return Lengths(
        prompt, tuple(max(1, min(longest, round(math.exp(high + deviation)))) for deviation in deviations)
    )
