"""Asks all judges about samples, in a thread with an event loop.

Their prompts are jinja2 templates, which are rendered in a sandbox.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megarl.config.schema import JudgeConfig
from megarl.machine.background import LoopThread
from megarl.machine.user_functions import UserFunctionError
from megarl.rewards.judge_reply import JudgeReply
from megarl.rewards.process import ScoreRequest
from megarl.rewards.thinking import outside_thinking

FIRST_PAUSE_S = 0.5  # doubled after each attempt
_LONGEST_PAUSE_S = 60.0
_LONGEST_OWN_PAUSE_S = 4.0  # for a server of the run, which only this process asks
_RETRIED = (408, 429)  # and all from 500
_RESTART_LIMIT_S = 900.0  # how long a server of the run may be away, which includes the start of its model
_FIELDS: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": 1024}  # of requests, unless set
_NUM_SHOWN = 200  # characters of a server's message in an error
VARIABLES = (
    "messages",
    "solution",
    "solution_without_thinking",
    "ground_truth",
    "extra_info",
    "data_source",
    "turns",
)


class JudgePromptError(UserFunctionError):
    """A template cannot be read or rendered. The message names the file and the fix."""


class JudgePanel:
    """The judges of a run.

    Raises:
        UserFunctionError: A template cannot be loaded, or an API key is missing.
    """

    def __init__(self, judges: Sequence[JudgeConfig], first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._judges = list(judges)
        self._templates: list[Template] = [load_template(judge.prompt) for judge in judges]
        self._clients = [
            JudgeClient(judge, f"reward.judges[{index}]", first_pause_s) for index, judge in enumerate(judges)
        ]
        self._loop = LoopThread("judges")

    def use(self, endpoints: Mapping[str, Sequence[JudgeEndpoint]]) -> None:
        """Set the servers of the judges that the run serves, by the judge's name.

        They must be set before the first question.
        """
        for judge, client in zip(self._judges, self._clients, strict=True):
            if judge.name in endpoints:
                client.endpoints = endpoints[judge.name]

    def ask[Result](
        self, score: Callable[[ScoreRequest, Sequence[JudgeReply]], Future[Result]], request: ScoreRequest
    ) -> Future[Result]:
        """Ask every judge about a sample, and then score it. Returns immediately."""

        async def scored() -> Result:
            replies = await asyncio.gather(
                *(self._reply(index, request) for index in range(len(self._judges)))
            )
            return await asyncio.wrap_future(score(request, replies))

        return self._loop.submit(scored())

    def close(self) -> None:
        """Cancel all requests, and end the thread."""
        self._loop.submit(self._cancel()).result()
        self._loop.stop()

    async def _reply(self, index: int, request: ScoreRequest) -> JudgeReply:
        try:
            prompt = render(self._templates[index], self._judges[index].prompt, prompt_variables(request))
        except JudgePromptError as error:
            return JudgeReply("", 0.0, str(error))
        return await self._clients[index].reply(prompt)

    async def _cancel(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()


def prompt_variables(request: ScoreRequest) -> dict[str, object]:
    """Return the variables of a judge's template, see VARIABLES."""
    return {
        "messages": request.messages,
        "solution": request.solution_str,
        "solution_without_thinking": outside_thinking(request.solution_str, request.opens_thinking),
        "ground_truth": request.ground_truth,
        "extra_info": request.extra_info,
        "data_source": request.data_source,
        "turns": request.turns or [{"role": "assistant", "content": request.solution_str}],
    }


def load_template(path: str) -> Template:
    """Load a template, which can neither include other files nor call unsafe functions.

    Raises:
        JudgePromptError: There is no such file, or it is not a template.
    """
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    try:
        return environment.from_string(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise JudgePromptError(f"the judge's prompt {path!r} cannot be read: {error}") from error
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        place = path if line is None else f"{path}:{line}"
        raise JudgePromptError(f"the judge's prompt {place} is not a jinja2 template: {error}") from error


def render(template: Template, path: str, variables: Mapping[str, Any]) -> str:
    """Render the prompt of one sample.

    Args:
        path: The template's file, for errors.
        variables: The values of VARIABLES.

    Raises:
        JudgePromptError: The template cannot be rendered, for example because a variable does not exist.
    """
    try:
        return template.render(variables)
    except Exception as error:  # noqa: BLE001  (an expression of the user's template may raise anything)
        raise JudgePromptError(
            f"the judge's prompt {path} cannot be rendered: {type(error).__name__}: {error}; its "
            f"variables are {', '.join(VARIABLES)}"
        ) from error


# ---- the client of one judge: OpenAI's chat completions API, with retries


class JudgeEndpoint(NamedTuple):
    """A server of a judge.

    Attributes:
        url: The base URL of its API.
        key: Its API key. None: it needs none.
        opens_thinking: Whether its chat template opens the thinking of replies.
    """

    url: str
    key: str | None = None
    opens_thinking: bool = False


class _AttemptError(Exception):
    """An attempt gave no text.

    Attributes:
        may_retry: Whether another attempt may succeed.
        pause_s: The pause that the server asks for.
        is_lost: Whether there was no connection to the server, or it ended.
    """

    def __init__(
        self, why: str, *, may_retry: bool = False, pause_s: float | None = None, is_lost: bool = False
    ) -> None:
        super().__init__(why)
        self.may_retry = may_retry
        self.pause_s = pause_s
        self.is_lost = is_lost


def request_body(config: JudgeConfig, prompt: str) -> dict[str, Any]:
    """Return the body of a request. Equal prompts have equal requests."""
    chosen = _FIELDS | config.request
    return {
        "model": config.model or config.name,  # a server of the run has only one
        "messages": [{"role": "user", "content": prompt}],
        **{name: value for name, value in chosen.items() if value is not None},
    }


def read_api_key(config: JudgeConfig, key: str) -> str | None:
    """Return the API key of a judge's server, or None if it needs none.

    Args:
        key: The configuration key of the judge, for errors, which never contain the API key.

    Raises:
        UserFunctionError: The environment variable is not set, or its value cannot be sent.
    """
    if config.api_key_env is None:
        return None
    secret = os.environ.get(config.api_key_env, "")
    if not secret:
        raise UserFunctionError(
            f"{key}.api_key_env: the environment variable {config.api_key_env} is not set on "
            f"{socket.gethostname()}; export it before the run, or before `ray start` on a cluster"
        )
    # The error of the library would show the value.
    if not (secret.isascii() and secret.isprintable()):
        raise UserFunctionError(
            f"{key}.api_key_env: the value of {config.api_key_env} has characters that a request cannot "
            "contain, such as a line break; export it without them"
        )
    return secret


class JudgeClient:
    """Connections to the servers of a judge. Everything except the constructor runs in one event loop.

    A judge with `path` has no server before `endpoints` is set.

    Args:
        key: The configuration key of the judge, for errors.
        first_pause_s: Pause after the first failed attempt.

    Raises:
        UserFunctionError: See `read_api_key`.
    """

    def __init__(self, config: JudgeConfig, key: str, first_pause_s: float = FIRST_PAUSE_S) -> None:
        secret = read_api_key(config, key)
        self._config = config
        self.endpoints: Sequence[JudgeEndpoint] = (
            [] if config.url is None else [JudgeEndpoint(config.url.rstrip("/"), secret)]
        )
        self._turns = itertools.count()
        self._first_pause_s = first_pause_s
        self._running = asyncio.Semaphore(config.max_concurrency)
        self._client = httpx.AsyncClient(
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
            for attempt in itertools.count(1):
                # The servers are asked in turn, so that an attempt after the loss of one goes to another.
                endpoint = self.endpoints[next(self._turns) % len(self.endpoints)]
                try:
                    text = await self._attempt(endpoint, body)
                    return JudgeReply(
                        text, time.monotonic() - start_s, opens_thinking=endpoint.opens_thinking
                    )
                except _AttemptError as error:
                    may_try = attempt < self._config.max_attempts or self._is_restarted(error, start_s)
                    if not (error.may_retry and may_try):
                        attempts = f" after {attempt} attempts" if attempt > 1 else ""
                        why = f"{error}{attempts}, from {endpoint.url}/chat/completions"
                        return JudgeReply("", time.monotonic() - start_s, why)
                    pause_s = self._pause_s(attempt, error.pause_s)
                # A pause keeps its place, so that an overloaded server gets fewer requests.
                await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns")

    def _is_restarted(self, error: _AttemptError, start_s: float) -> bool:
        """Whether a server of the run may return, which takes longer than the pauses between attempts."""
        is_own = self._config.path is not None
        return is_own and error.is_lost and time.monotonic() - start_s < _RESTART_LIMIT_S

    def _pause_s(self, attempt: int, asked_s: float | None) -> float:
        if asked_s is not None:
            return min(asked_s, _LONGEST_PAUSE_S)
        # Random pauses keep the requests that an outage has stopped from returning all at once.
        most_s = _LONGEST_PAUSE_S if self._config.path is None else _LONGEST_OWN_PAUSE_S
        return min(self._first_pause_s * 2 ** (attempt - 1), most_s) * random.uniform(0.5, 1.0)

    async def _attempt(self, endpoint: JudgeEndpoint, body: dict[str, Any]) -> str:
        limit_s = self._config.time_limit_s
        headers = {} if endpoint.key is None else {"Authorization": f"Bearer {endpoint.key}"}
        try:
            async with asyncio.timeout(limit_s):
                response = await self._client.post(
                    f"{endpoint.url}/chat/completions", json=body, headers=headers
                )
        except TimeoutError:
            raise _AttemptError(f"no reply within time_limit_s={limit_s:g} s", may_retry=True) from None
        except httpx.TransportError as error:
            # Some of httpx's errors have no text.
            reason = str(error) or type(error).__name__
            raise _AttemptError(f"the connection failed ({reason})", may_retry=True, is_lost=True) from error

        if response.status_code != httpx.codes.OK:
            raise _AttemptError(
                f"status {response.status_code} ({' '.join(response.text.split())[:_NUM_SHOWN]})",
                may_retry=is_temporary(response.status_code),
                pause_s=_seconds(response.headers.get("Retry-After")),
            )

        return self._content(response)

    def _content(self, response: httpx.Response) -> str:
        """Return the text of a completion. A second attempt would give the same one."""
        try:
            choice = response.json()["choices"][0]
            text = choice["message"]["content"]
            reason = choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _AttemptError(
                f"the reply is no chat completion ({response.text[:_NUM_SHOWN]!r})"
            ) from error

        # The score of a truncated reply could be a part of a number.
        if reason == "length":
            limit = (_FIELDS | self._config.request)["max_tokens"]
            raise _AttemptError(f"the reply was truncated at its token limit (max_tokens={limit})")
        # SGLang completes the requests of a server that ends with what it has.
        if reason == "abort":
            raise _AttemptError("the server aborted the reply", may_retry=True, is_lost=True)
        if not isinstance(text, str):
            raise _AttemptError(f"the reply has no text (finish_reason {reason!r})")
        return text


def is_temporary(status: int) -> bool:
    """Return whether a request that failed with this status is repeated."""
    return status in _RETRIED or status >= 500


def _seconds(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None without one, or if it is a date."""
    return float(header) if header is not None and header.isdecimal() else None
