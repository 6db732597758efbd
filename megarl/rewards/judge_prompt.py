"""Renders the prompts of judges from jinja2 templates, in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megarl.machine.user_functions import UserFunctionError

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
