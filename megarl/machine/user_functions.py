"""Loads functions from user files, and reports mistakes in them before the run starts."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from megarl.machine.spawn import FreshContext

_MOST_NAMES = 8  # that a message lists
_PLAIN = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset, type(None))


class UserFunctionError(ValueError):
    """A function cannot be used. The message names the file, the function and the fix."""


@dataclass(frozen=True)
class Expected:
    """The expected form of a user function.

    Attributes:
        what: The beginning of errors.
        key: The configuration key of its name.
        example: Its `def` line.
        keywords: The keyword arguments that it is called with.
        optional: Keyword arguments that are passed only if it has these parameters.
        error: The exception to raise.
    """

    what: str
    key: str
    example: str
    keywords: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    positional: int = 0
    error: type[UserFunctionError] = UserFunctionError


def load_function(path: str, name: str, expected: Expected) -> Callable[..., Any]:
    """Return the function `name` of the Python file `path`, which is run once.

    Raises `expected.error` if the file does not exist or cannot be run, or the name does not exist, is not a
    plain function (for example a coroutine function), or does not accept the arguments.
    """
    what = expected.what
    error = expected.error
    function: Callable[..., Any] = load_name(path, name, expected)

    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine function" if callable(function) else f"a {type(function).__name__}"
        raise error(f"{what} {name!r} in {path!r} is {kind}, expected a plain function: {expected.example}")

    # A function with wrong parameters must fail now, and not at the first call during the run.
    signature = inspect.signature(function)
    try:
        named = (*expected.keywords, *(name for name in expected.optional if name in signature.parameters))
        signature.bind(*[None] * expected.positional, **dict.fromkeys(named))
    except TypeError as problem:
        given = (
            f"the keywords {', '.join(expected.keywords)}"
            if expected.keywords
            else f"{expected.positional} values"
        )
        raise error(
            f"{what} {name}{signature} in {path!r} cannot be called with {given} ({problem}); write it as "
            f"{expected.example}"
        ) from problem

    return function


def load_name(path: str, name: str, expected: Expected) -> Any:
    """Return the value `name` of the Python file `path`, which is run once.

    Raises `expected.error` if the file or name does not exist, or the file cannot be run.
    """
    what = expected.what
    error = expected.error
    if not os.path.isfile(path):
        raise error(f"{what} file {path!r}: there is no such file (looked in {Path(path).absolute().parent})")
    module = _run_file(path, expected)

    if not hasattr(module, name):
        names = _names_in(module)
        near = difflib.get_close_matches(name, names, 1) or names[:1]
        defines = f"which defines {', '.join(names[:_MOST_NAMES])}" if names else "which defines nothing"
        fix = f", such as {path}:{near[0]}" if near else f", and write `{expected.example}` in it"
        raise error(f"{what} {name!r} is not in {path!r}, {defines}; set {expected.key} to FILE.py:NAME{fix}")

    return getattr(module, name)


def _names_in(module: ModuleType) -> list[str]:
    """Return the names of the functions, classes and objects that a file defines, in their order."""
    own = module.__name__
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and not isinstance(value, _PLAIN)
        and getattr(value, "__module__", own) == own
    ]


def _module_name(path: str) -> str:
    return "megarl_user_" + hashlib.sha256(str(Path(path).absolute()).encode()).hexdigest()[:16]


def companion(path: str, function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """Return the function `name` defined next to one that `load_function` loaded from `path`, or None.

    It is searched in that file, and in the module from which the file imported the function.
    """
    for namespace in (vars(sys.modules[_module_name(path)]), getattr(function, "__globals__", {})):
        if callable(found := namespace.get(name)):
            return found
    return None


def _run_file(path: str, expected: Expected) -> ModuleType:
    module_name = _module_name(path)
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise expected.error(f"{expected.what} file {path!r} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look up their module there

    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:  # noqa: BLE001  (the user's code may raise anything)
        # A later import must not find the partially executed module.
        del sys.modules[module_name]
        raise expected.error(
            f"{expected.what} file {path!r} cannot be run: {last_line(problem)}"
        ) from problem

    return module


def last_line(error: BaseException) -> str:
    """Return the last line of the traceback with its location.

    An example is `ZeroDivisionError: division by zero (reward.py:12)`.
    """
    line = traceback.format_exception_only(error)[-1].strip()

    # Attribute an error in `__getattr__` to the line that accessed the attribute.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "__getattr__"]
    if isinstance(error, SyntaxError) and error.filename is not None:
        place = f"{Path(error.filename).name}:{error.lineno}"
    elif frames:
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    else:
        return line

    return f"{line} ({place})"


class UnfinishedError(Exception):
    """The user's code has not returned. The message says whether it timed out or its process died."""


def call_in_process(function: Callable[..., Any], *arguments: Any, limit_s: float) -> Any:
    """Return the result of a function that runs the user's code, in a process that ends after a time limit.

    Raises:
        UnfinishedError: There is no result.
        Exception: The error that the function raised.
    """
    with ProcessPool(1, context=FreshContext()) as pool:
        try:
            return pool.schedule(function, args=arguments, timeout=limit_s).result()
        except TimeoutError as error:
            raise UnfinishedError(f"timed out after {limit_s:g} s") from error
        except ProcessExpired as error:
            raise UnfinishedError("the process died") from error
