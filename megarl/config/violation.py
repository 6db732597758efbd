"""A violation of a configuration rule, and helpers that suggest the nearest valid values."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple
from urllib.parse import urlsplit


class Absence(Enum):
    """Something that is missing on this machine but may be available on the run's machines."""

    input = auto()  # a file or a folder that the run reads
    gpu = auto()
    package = auto()


class Violation(NamedTuple):
    """A violation of a configuration rule.

    Attributes:
        keys: The dotted keys, one of which has to change.
        message: The problem, with the value and the fix.
        absence: Set if the only problem is that something is missing on this machine.
    """

    keys: tuple[str, ...]
    message: str
    absence: Absence | None = None

    def __str__(self) -> str:
        return f"{', '.join(self.keys)}: {self.message}"


Violations = Iterator[Violation]


def nearest_multiples(value: int, divisor: int) -> list[int]:
    """Return the positive multiples of `divisor` nearest to `value`: at most one below and one above."""
    below = value // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple > 0]


def nearest_divisors(number: int, value: int) -> list[int]:
    """Return the divisors of `number` nearest to `value`: at most one below and one above."""
    divisors = [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    below = [divisor for divisor in divisors if divisor <= value]
    above = [divisor for divisor in divisors if divisor > value]
    return below[-1:] + above[:1]


def is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is not a number
        return False


def either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)
