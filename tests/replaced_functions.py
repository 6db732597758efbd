"""Comparison of functions that megarl replaces in other packages with the originals.

A replacement must accept every call that the original accepts. A replaced function is found by its code, which
lies in megarl's folder; the original is looked up in a process without replacements.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import megarl

OURS = str(Path(megarl.__file__).parent)
ROOT = Path(OURS).parent
_STUBS = str(Path(OURS, "rollout", "sglang", "stubs"))


class Argument(NamedTuple):
    name: str
    kind: str
    is_required: bool


def arguments_of(function: Callable[..., Any], *, follow_wrapped: bool) -> list[Argument]:
    try:
        signature = inspect.signature(function, follow_wrapped=follow_wrapped)
    except ValueError:  # of a class in C++
        return _arguments_of_binding(function)
    return [
        Argument(parameter.name, parameter.kind.name, parameter.default is parameter.empty)
        for parameter in signature.parameters.values()
    ]


def _arguments_of_binding(bound: Any) -> list[Argument]:
    """Return the arguments of a class that pybind11 made, from the first line of its constructor's help."""
    line = bound.__init__.__doc__.splitlines()[0].removeprefix("__init__(").removesuffix(") -> None")
    _, *arguments = re.split(r", (?=\w+: )", line)  # without self
    return [
        Argument(argument.split(":")[0], "POSITIONAL_OR_KEYWORD", " = " not in argument)
        for argument in arguments
    ]


def is_ours(value: object) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    # No attribute of another object is read: lazy ones would import or start something.
    if not isinstance(value, FunctionType):
        return False
    file = value.__code__.co_filename
    return file.startswith(OURS) and not file.startswith(_STUBS)  # stubs stand for packages that are absent


def replaced_in(*packages: str) -> dict[str, list[Argument]]:
    """Return the replaced functions and methods of the packages' imported modules, by their address."""
    # A wrapper must accept the arguments itself: the signature that it copies from the original is no proof.
    return {
        address: arguments_of(value, follow_wrapped=False)
        for module in sorted(sys.modules)
        if module.split(".")[0] in packages
        for address, value in _functions(module)
        if is_ours(value)
    }


def _functions(module: str) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(sys.modules[module] or object).items()):
        yield f"{module}:{name}", value
        if isinstance(value, type) and value.__module__ == module:
            for attribute, member in list(vars(value).items()):
                is_wrapped = isinstance(member, staticmethod | classmethod)
                yield f"{module}:{name}.{attribute}", member.__func__ if is_wrapped else member


def original(address: str) -> list[Argument] | None:
    """Return the arguments of the function at an address, in a process without replacements; None for one
    of an absent package, whose stub accepts anything."""
    module, name = address.split(":")
    function = functools.reduce(getattr, name.split("."), __import__(module, fromlist=["_"]))
    assert not is_ours(function), address
    if isinstance(function, FunctionType) and function.__code__.co_filename.startswith(_STUBS):
        return None
    return arguments_of(function, follow_wrapped=True)


_ORIGINALS = """
import json, sys, warnings
warnings.simplefilter("ignore")
from tests.replaced_functions import original
print(json.dumps({address: original(address) for address in json.loads(sys.argv[1])}))
"""


def problems(ours: Mapping[str, list[Argument]], python: Sequence[str] = (sys.executable,)) -> list[str]:
    """Return what replacements do not accept, compared with the originals in a fresh process of `python`."""
    run = subprocess.run(
        [*python, "-c", _ORIGINALS, json.dumps(sorted(ours))],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    theirs = json.loads(run.stdout.splitlines()[-1])
    return [
        f"{address}: {problem}"
        for address, arguments in ours.items()
        if theirs[address] is not None
        and (problem := accepts(arguments, [Argument(*each) for each in theirs[address]])) is not None
    ]


def accepts(ours: Sequence[Argument], theirs: Sequence[Argument]) -> str | None:
    """Return why a call of the original may fail with ours, or None if none can."""
    kinds = {argument.kind for argument in ours}
    takes_any_position = "VAR_POSITIONAL" in kinds
    takes_any_name = "VAR_KEYWORD" in kinds
    named = [argument for argument in ours if not argument.kind.startswith("VAR_")]

    for place, argument in enumerate(theirs):
        own = next((each for each in named if each.name == argument.name), None)
        if argument.kind == "VAR_POSITIONAL":
            if not takes_any_position:
                return f"*{argument.name} is not accepted"
            continue
        if argument.kind == "VAR_KEYWORD":
            if not takes_any_name:
                return f"**{argument.name} is not accepted"
            continue
        if own is None and not takes_any_name and argument.kind != "POSITIONAL_ONLY":
            return f"{argument.name} is not accepted by name"
        if own is None and not takes_any_position and argument.kind != "KEYWORD_ONLY":
            return f"{argument.name} is not accepted by position"
        if own is not None and argument.kind != "KEYWORD_ONLY" and named.index(own) != place:
            return f"{argument.name} is at position {named.index(own)}, in the original at {place}"
        if own is not None and own.is_required and not argument.is_required:
            return f"{argument.name} is required, but optional in the original"

    known = {argument.name for argument in theirs}
    for argument in named:
        if argument.is_required and argument.name not in known:
            return f"{argument.name} is required, but the original does not have it"
    return None
