"""Generation without a model.

Each request ends after its number of tokens, which are attributed to the weights loaded at the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

import numpy as np

from megarl.rollout.interface import FailedRequest, FinishedRequest, GenerationRequest, Sample, VersionSpan

FinishReason = Literal["stop", "length"]
# the token of which every simulated sample consists
_TOKEN = 5
_LOG_PROB = -1.0


class WrittenTokens(NamedTuple):
    """The tokens of a sample, with the same fields as Sample."""

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: FinishReason


def equal_tokens(request: GenerationRequest, length: int) -> WrittenTokens:
    """Write a sample of `length` tokens that are all the same."""
    reason: FinishReason = "length" if length == request.sampling.max_new_tokens else "stop"
    token_ids = np.full(length, _TOKEN, dtype=np.int32)
    log_probs = np.full(length, _LOG_PROB, dtype=np.float32)

    return WrittenTokens(token_ids, log_probs, reason)


class _InFlight:
    """A request in flight.

    It records when its sample is ready, and which versions wrote its tokens before the last update.
    """

    def __init__(self, request: GenerationRequest, length: int, ready_s: float) -> None:
        self.request = request
        self.length = length
        self.ready_s = ready_s
        self.spans: list[VersionSpan] = []

    def written_until(self, end: int, version: int) -> None:
        """Record that `version` sampled the tokens up to `end` that were not recorded before."""
        if end > (self.spans[-1].end if self.spans else 0):
            self.spans.append(VersionSpan(version, end))


class SimulatedGeneration:
    """The requests in flight at one engine.

    Args:
        now_s: Returns the time.
        length_of: Returns the number of tokens of a request's sample, or 0 if the request fails after one
            token.
        write: Returns the tokens of a sample that is ready.
        token_s: Time per token. If 0, every sample is ready at once.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        length_of: Callable[[GenerationRequest], int],
        write: Callable[[GenerationRequest, int], WrittenTokens] = equal_tokens,
        token_s: float = 1.0,
        version: int = 0,
    ) -> None:
        self._now_s = now_s
        self._length_of = length_of
        self._write = write
        self._token_s = token_s
        self._version = version
        self._requests: dict[int, _InFlight] = {}

    @property
    def next_s(self) -> float:
        """The time at which the next sample is ready."""
        return min((each.ready_s for each in self._requests.values()), default=math.inf)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start generating samples.

        Each takes the time of its own tokens, regardless of the number of requests.
        """
        now_s = self._now_s()
        for request in requests:
            length = self._length_of(request)
            ready_s = now_s + max(1, length) * self._token_s
            self._requests[request.request_id] = _InFlight(request, length, ready_s)

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        """Drop these requests, or all. Some may have completed already."""
        for number in list(self._requests) if request_ids is None else request_ids:
            self._requests.pop(number, None)

    def collect(self, at_most: int | None = None) -> list[FinishedRequest | FailedRequest]:
        """Return completed requests in the order in which they were submitted."""
        now_s = self._now_s()
        ready = [number for number, each in self._requests.items() if each.ready_s <= now_s]
        return [self._end(self._requests.pop(number)) for number in ready[:at_most]]

    def update(self, version: int, pause_s: float = 0.0) -> None:
        """Continue with the weights of `version` after a pause. Tokens written so far are kept."""
        now_s = self._now_s()
        for each in self._requests.values():
            if self._token_s:
                # The small number keeps rounding errors from counting another token.
                left = math.ceil((each.ready_s - now_s) / self._token_s - 1e-9)
                each.written_until(each.length - max(0, left), self._version)
            each.ready_s += pause_s

        self._version = version

    def _end(self, ended: _InFlight) -> FinishedRequest | FailedRequest:
        number = ended.request.request_id
        if not ended.length:
            return FailedRequest(number, "scripted")
        tokens = self._write(ended.request, ended.length)
        ended.written_until(len(tokens.token_ids), self._version)

        return FinishedRequest(number, Sample(*tokens, spans=tuple(ended.spans)))
