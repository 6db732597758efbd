"""Reads the bodies of requests. Their size is limited, and large ones are processed in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from megarl.endpoint.api_error import ApiError
from megarl.machine.background import in_background
from megarl.machine.strict_json import load_strictly

_LARGE = 1 << 14  # bytes; the tokens of smaller bodies take a few milliseconds
_MOST_THREADS = 2  # large bodies that are processed at the same time


class BodyTooLargeError(ApiError):
    """A body is larger than any conversation of the run."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            f"the body has more than {max_bytes} bytes, too many for a conversation of "
            "data.max_prompt_length + data.max_response_length tokens. Please reduce the "
            "length of the messages.",
            status=413,
            code="context_length_exceeded",
        )


class RequestBodies:
    """Reads and processes the bodies that a server receives.

    Args:
        max_bytes: Size of the largest body that is accepted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._threads = asyncio.Semaphore(_MOST_THREADS)

    async def process[Result](self, request: Request, work: Callable[[dict[str, Any]], Result]) -> Result:
        """Return the result of `work` for the JSON object that a request contains.

        For a large body, parsing and `work` run in a thread, so that other requests are answered meanwhile.

        Raises:
            BodyTooLargeError: It was not parsed.
            ApiError: It is not a JSON object.
        """
        body = await self._read(request)
        if len(body) < _LARGE:
            return work(_parsed(body))

        async with self._threads:
            return await asyncio.wrap_future(in_background(lambda: work(_parsed(body)), "large body"))

    async def _read(self, request: Request) -> bytes:
        """Return the body of a request. The server receives and drops the rest of one that is too large."""
        if int(request.headers.get("content-length", 0)) > self._max_bytes:
            raise BodyTooLargeError(self._max_bytes)

        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_bytes:
                raise BodyTooLargeError(self._max_bytes)
        return bytes(body)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        parsed = load_strictly(body)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(parsed, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    return parsed


def bearer_key(request: Request) -> str:
    """Return the key of a request, from the header of either API."""
    headers = request.headers
    return headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")


async def disconnected(request: Request) -> None:
    """Wait until the client disconnects. The body of the request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
