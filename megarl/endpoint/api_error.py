"""Errors that a client of the endpoint receives, in the form of the API that it speaks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megarl.machine.errors import named


class ApiError(Exception):
    """A request that is refused.

    Attributes:
        status: HTTP status.
        message: What is wrong and what to change.
        code: A short name of the cause.
        parameter: The parameter of the request that is the cause.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, parameter: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.parameter = parameter

    def for_openai(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": "invalid_request_error",
                "param": self.parameter,
                "code": self.code,
            }
        }

    def for_anthropic(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 413: "request_too_large"}
        return {
            "type": "error",
            "error": {"type": kinds.get(self.status, "invalid_request_error"), "message": self.message},
        }


def invalid(parameter: str, problem: str) -> ApiError:
    """Return the error of a parameter that has an invalid value."""
    return ApiError(f"{parameter} {problem}", code="invalid_value", parameter=parameter)


def unsupported(parameter: str, hint: str = "") -> ApiError:
    """Return the error of a parameter, or of one of its values, that the endpoint does not support."""
    return ApiError(
        f"{parameter} is not supported by megarl's endpoint; {hint or 'leave it out'}",
        code="unsupported_parameter",
        parameter=parameter,
    )


# Parameters that concern the provider and not the tokens.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)


def refuse_unsupported(
    body: Mapping[str, Any],
    supported: Collection[str],
    neutral: Mapping[str, Collection[Any]],
    ignored: Collection[str],
) -> None:
    """Refuse the first parameter that would change what is sampled and is not supported.

    Null counts as absent.

    Args:
        supported: Parameters that the caller reads.
        neutral: Values with which a parameter changes nothing.
        ignored: Parameters that the run accepts without effect (`agent.harness.ignored_parameters`).

    Raises:
        ApiError: Names the parameter.
    """
    for name, value in body.items():
        is_known = name in supported or name in _WITHOUT_EFFECT or name in ignored
        if value is None or is_known or value in neutral.get(name, ()):
            continue
        shown = named(name)
        raise unsupported(
            shown,
            f"leave it out, or list {shown} in agent.harness.ignored_parameters to accept it without effect",
        )
