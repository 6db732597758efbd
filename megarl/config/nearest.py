"""The nearest values that work, for messages: pure integer arithmetic."""

from __future__ import annotations


def nearest_multiples(value: int, divisor: int) -> list[int]:
    """The positive multiples of `divisor` around `value`: at most one below, one above."""
    below = value // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple > 0]


def nearest_divisors(number: int, value: int) -> list[int]:
    """The divisors of `number` around `value`: at most one below, one above."""
    divisors = [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    below = [divisor for divisor in divisors if divisor <= value]
    above = [divisor for divisor in divisors if divisor > value]
    return below[-1:] + above[:1]


def either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)
