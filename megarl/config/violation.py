"""One thing that is wrong with a configuration, the keys that can mend it, and the nearest values that work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Violation(NamedTuple):
    """`keys`: the dotted keys of which one has to change."""

    keys: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{', '.join(self.keys)}: {self.message}"


Violations = Iterator[Violation]


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
