"""Reward functions from files: loading one, and the checks that make a mistake in it an error before the run starts."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

RewardFunction = Callable[..., Any]
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
EXAMPLE = "def compute_score(data_source, solution_str, ground_truth, extra_info):"


class RewardFunctionError(ValueError):
    """A reward function cannot be used; the message names the file, the function and what to change."""


def load_reward_function(path: str, name: str) -> RewardFunction:
    """The function `name` of the Python file `path`, which is run once. It will be called with the four keywords of ARGUMENTS.

    Raises RewardFunctionError for a file that is absent or cannot be run, and for a name that is absent, is not a plain function
    (a coroutine, for instance) or does not take the four keywords.
    """
    if not Path(path).is_file():
        raise RewardFunctionError(f"reward function file {path!r}: there is no such file (looked in {Path(path).absolute().parent})")
    module = _run_file(path)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise RewardFunctionError(f"reward function {name!r} is not in {path!r}, which defines {functions}; set reward.functions' name")
    function = getattr(module, name)
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine function" if callable(function) else f"a {type(function).__name__}"
        raise RewardFunctionError(f"reward function {name!r} in {path!r} is {kind}, expected a plain function: {EXAMPLE}")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise RewardFunctionError(
            f"reward function {name}{signature} in {path!r} cannot be called with the keywords {', '.join(ARGUMENTS)} ({error}); "
            f"write it as {EXAMPLE}"
        ) from error
    return function


def _run_file(path: str) -> ModuleType:
    module_name = "megarl_reward_" + hashlib.sha256(str(Path(path).absolute()).encode()).hexdigest()[:16]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise RewardFunctionError(f"reward function file {path!r} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the user's code may raise anything)
        del sys.modules[module_name]
        raise RewardFunctionError(f"reward function file {path!r} cannot be run: {last_line(error)}") from error
    return module


def last_line(error: BaseException) -> str:
    """The last line of the traceback, with the place that raised: `ZeroDivisionError: division by zero (reward.py:12)`."""
    line = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename is not None:
        place = f"{Path(error.filename).name}:{error.lineno}"
    elif frames:
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    else:
        return line
    return f"{line} ({place})"
