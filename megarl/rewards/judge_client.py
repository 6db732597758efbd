"""Asks a judge over OpenAI's chat completions API, with retries."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from typing import Any, NamedTuple

import httpx

from megarl.config.schema import JudgeConfig
from megarl.machine.user_functions import UserFunctionError
from megarl.rewards.judge_reply import JudgeReply

FIRST_PAUSE_S = 0.5  # doubled after each attempt
_LONGEST_PAUSE_S = 60.0
_RETRIED = (408, 429)  # and all from 500
_NUM_SHOWN = 200  # characters of a server's message in an error


class _Answer(NamedTuple):
    """The result of one attempt.

    Attributes:
        error: Why there is no text.
        may_retry: Whether another attempt may succeed.
        pause_s: The pause that the server asks for.
    """

    text: str = ""
    error: str | None = None
    may_retry: bool = False
    pause_s: float | None = None


def request_body(config: JudgeConfig, prompt: str) -> dict[str, Any]:
    """Return the body of a request. Equal prompts have equal requests."""
    chosen = {"temperature": config.temperature, "seed": config.seed, "max_tokens": config.max_tokens}
    return {
        "model": config.model,
        "messages": [{"role": "user", "content": prompt}],
        **{name: value for name, value in chosen.items() if value is not None},
        **config.request,
    }


class JudgeClient:
    """Connections to the server of a judge. Everything except the constructor runs in one event loop.

    Args:
        key: The configuration key of the judge, for errors.
        first_pause_s: Pause after the first failed attempt.

    Raises:
        UserFunctionError: The environment variable with the API key is not set.
    """

    def __init__(self, config: JudgeConfig, key: str, first_pause_s: float = FIRST_PAUSE_S) -> None:
        headers = {}
        if config.api_key_env is not None:
            secret = os.environ.get(config.api_key_env, "")
            if not secret:
                raise UserFunctionError(
                    f"{key}.api_key_env: the environment variable {config.api_key_env} is not set on "
                    f"{socket.gethostname()}; export it before the run, or before `ray start` on a cluster"
                )
            headers["Authorization"] = f"Bearer {secret}"

        self._config = config
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._first_pause_s = first_pause_s
        self._running = asyncio.Semaphore(config.max_concurrency)
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=None,  # `_attempt` limits the whole request
            limits=httpx.Limits(max_connections=config.max_concurrency),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def reply(self, prompt: str) -> JudgeReply:
        """Return the reply to a prompt. A failure is the reply's `error`."""
        body = request_body(self._config, prompt)
        async with self._running:
            start_s = time.monotonic()
            attempt = 1
            answer = await self._attempt(body)
            while answer.may_retry and attempt < self._config.max_attempts:
                # A pause keeps its place, so that an overloaded server gets fewer requests.
                await asyncio.sleep(self._pause_s(attempt, answer.pause_s))
                attempt += 1
                answer = await self._attempt(body)

        latency_s = time.monotonic() - start_s
        if answer.error is None:
            return JudgeReply(answer.text, latency_s)
        attempts = f" after {attempt} attempts" if attempt > 1 else ""
        return JudgeReply("", latency_s, f"{answer.error}{attempts}, from {self._url}")

    def _pause_s(self, attempt: int, asked_s: float | None) -> float:
        if asked_s is not None:
            return min(asked_s, _LONGEST_PAUSE_S)
        # Random pauses keep the requests that an outage has stopped from returning all at once.
        longest_s = min(self._first_pause_s * 2 ** (attempt - 1), _LONGEST_PAUSE_S)
        return longest_s * random.uniform(0.5, 1.0)

    async def _attempt(self, body: dict[str, Any]) -> _Answer:
        limit_s = self._config.time_limit_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._client.post(self._url, json=body)
        except TimeoutError:
            return _Answer(error=f"no reply within time_limit_s={limit_s:g} s", may_retry=True)
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            return _Answer(error=f"the connection failed ({reason})", may_retry=True)

        if response.status_code != httpx.codes.OK:
            return _Answer(
                error=f"status {response.status_code} ({' '.join(response.text.split())[:_NUM_SHOWN]})",
                may_retry=response.status_code in _RETRIED or response.status_code >= 500,
                pause_s=_seconds(response.headers.get("Retry-After")),
            )
        return self._content(response)

    def _content(self, response: httpx.Response) -> _Answer:
        """Return the text of a completion. A second attempt would give the same one."""
        try:
            choice = response.json()["choices"][0]
            text = choice["message"]["content"]
            reason = choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError):
            return _Answer(error=f"the reply is no chat completion ({response.text[:_NUM_SHOWN]!r})")

        # The score of a truncated reply could be a part of a number.
        if reason == "length":
            limit = self._config.max_tokens
            return _Answer(error=f"the reply was truncated at its token limit (max_tokens={limit})")
        if not isinstance(text, str):
            return _Answer(error=f"the reply has no text (finish_reason {reason!r})")
        return _Answer(text)


def _seconds(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None without one, or if it is a date."""
    return float(header) if header is not None and header.isdecimal() else None
