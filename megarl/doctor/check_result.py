"""The result of a check: a status, a message of one line, and a hint unless the status is ok."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

DATA = "data"  # the check of a run's data files


class Status(str, Enum):
    ok = "ok"
    warning = "warning"  # the run will start, but may be slow, or fail later
    error = "error"  # the run will not work


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of a check.

    Attributes:
        facts: The values of the message, as JSON types.
        is_whole: Whether the message already contains the hint.
    """

    check: str
    status: Status
    message: str
    hint: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    is_whole: bool = False

    def __post_init__(self) -> None:
        assert (self.hint is None) == (self.status is Status.ok), (
            "a result has a hint unless its status is ok"
        )

    def __str__(self) -> str:
        """Return the message and the hint in one line."""
        return self.message if self.is_whole or self.hint is None else f"{self.message}; {self.hint}"


def good(check: str, message: str, **facts: Any) -> CheckResult:
    return CheckResult(check=check, status=Status.ok, message=message, facts=facts)


def doubtful(check: str, message: str, hint: str, **facts: Any) -> CheckResult:
    return CheckResult(check=check, status=Status.warning, message=message, hint=hint, facts=facts)


def wrong(check: str, message: str, hint: str, **facts: Any) -> CheckResult:
    return CheckResult(check=check, status=Status.error, message=message, hint=hint, facts=facts)


def refused(check: str, key: str, error: Exception, hint: str, **facts: Any) -> CheckResult:
    """Return the result for an error that a run would raise, whose message contains a hint.

    Args:
        key: The configuration key, which is prepended unless the message starts with it.
        hint: A shorter hint.
    """
    message = str(error) if str(error).startswith(key) else f"{key}: {error}"
    return CheckResult(
        check=check, status=Status.error, message=message, hint=hint, facts=facts, is_whole=True
    )


def worst(results: Sequence[CheckResult]) -> Status:
    order = list(Status)
    return max((finding.status for finding in results), key=order.index, default=Status.ok)


def as_json(finding: CheckResult) -> dict[str, Any]:
    return {
        "check": finding.check,
        "status": finding.status.value,
        "message": finding.message,
        "remedy": finding.hint,
        "facts": dict(finding.facts),
    }
