"""The result of a check, and helpers that suggest the nearest valid values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any
from urllib.parse import urlsplit

CONFIGURATION = "configuration"  # the check of keys and values
DATA = "data"  # the check of a run's data files
SERVERS = "servers"  # the check of servers that a run asks


class Absence(Enum):
    """Something that is missing on this machine but may be available on the run's machines."""

    input = auto()  # a file or a folder that the run reads
    gpu = auto()
    package = auto()


class Status(str, Enum):
    ok = "ok"
    warning = "warning"  # the run will start, but may be slow, or fail later
    error = "error"  # the run will not work


@dataclass(frozen=True)
class Finding:
    """The result of a check: by default, an error of the configuration.

    Attributes:
        keys: The dotted keys, one of which has to change; empty if the message names them.
        message: The problem, with the value.
        absence: Set if the only problem is that something is missing on this machine.
        hint: What to do. None if there is no problem, or if the message says it.
        facts: The values of the message, as JSON types.
        is_whole: Whether the message already contains the hint.
    """

    keys: tuple[str, ...]
    message: str
    absence: Absence | None = None
    check: str = CONFIGURATION
    status: Status = Status.error
    hint: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)
    is_whole: bool = False

    def __post_init__(self) -> None:
        assert self.hint is None or self.status is not Status.ok, "a result without a problem has no hint"

    def __str__(self) -> str:
        """Return the keys, the message and the hint in one line."""
        named = f"{', '.join(self.keys)}: {self.message}" if self.keys else self.message
        return named if self.is_whole or self.hint is None else f"{named}; {self.hint}"


Findings = Iterator[Finding]


# Keys, whether they have the values that are refused, and why these are.
Refusal = tuple[tuple[str, ...], bool, str]


def refusals(*rows: Refusal) -> Findings:
    """Yield the rows that apply as errors of the configuration."""
    for keys, is_refused, message in rows:
        if is_refused:
            yield Finding(keys, message)


def conflicts(key: str, said: str, *others: Refusal) -> Findings:
    """Yield what a setting cannot be combined with.

    Args:
        said: The beginning of each message, such as the value of the key.
        others: The keys of each other setting, whether it has the conflicting value, and why.
    """
    yield from refusals(*(((key, *keys), is_set, said + why) for keys, is_set, why in others))


def good(check: str, message: str, **facts: Any) -> Finding:
    return Finding((), message, check=check, status=Status.ok, facts=facts)


def doubtful(check: str, message: str, hint: str, **facts: Any) -> Finding:
    return Finding((), message, check=check, status=Status.warning, hint=hint, facts=facts)


def wrong(check: str, message: str, hint: str, **facts: Any) -> Finding:
    return Finding((), message, check=check, hint=hint, facts=facts)


def refused(check: str, key: str, error: Exception, hint: str, **facts: Any) -> Finding:
    """Return the result for an error that a run would raise, whose message contains a hint.

    Args:
        key: The configuration key, which is prepended unless the message starts with it.
        hint: A shorter hint.
    """
    message = str(error) if str(error).startswith(key) else f"{key}: {error}"
    return Finding((), message, check=check, hint=hint, facts=facts, is_whole=True)


def first_case(check: str, facts: Mapping[str, Any], *cases: tuple[Any, ...]) -> Finding:
    """Return the finding of the first case that applies.

    Args:
        facts: The facts of the finding, whatever the case.
        cases: For each case whether it applies, `good`, `doubtful` or `wrong`, and the texts that this takes.
    """
    judge, *texts = next(case for applies, *case in cases if applies)
    return judge(check, *texts, **facts)


def worst(results: Sequence[Finding]) -> Status:
    return max((finding.status for finding in results), key=list(Status).index, default=Status.ok)


def nearest_multiples(value: int, divisor: int) -> list[int]:
    """Return the positive multiples of `divisor` nearest to `value`: at most one below and one above."""
    below = value // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple > 0]


def nearest_divisors(number: int, value: int) -> list[int]:
    """Return the divisors of `number` nearest to `value`: at most one below and one above."""
    divisors = [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    below = [divisor for divisor in divisors if divisor <= value]
    return below[-1:] + [divisor for divisor in divisors if divisor > value][:1]


def is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is not a number
        return False


def either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)
