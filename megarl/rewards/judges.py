"""Asks all judges about samples, in a thread with an event loop.

Their prompts are jinja2 templates, which are rendered in a sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megarl.config.schema import JudgeConfig
from megarl.machine.background import LoopThread
from megarl.machine.user_functions import UserFunctionError
from megarl.rewards.judge_client import FIRST_PAUSE_S, JudgeClient, JudgeEndpoint
from megarl.rewards.judge_reply import JudgeReply
from megarl.rewards.process import ScoreRequest
from megarl.rewards.thinking import outside_thinking

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
