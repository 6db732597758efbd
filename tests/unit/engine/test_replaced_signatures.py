"""Each function of Megatron-Core that megarl replaces can be called in every way in which the original can.

A new Megatron that passes a further argument fails here, and not in the first forward pass of a user's run.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import megarl
from tests.ranks import RankPool

OURS = str(Path(megarl.__file__).parent)
ROOT = Path(OURS).parent


class Argument(NamedTuple):
    name: str
    kind: str
    is_required: bool


def arguments_of(function: Callable[..., Any], *, follow_wrapped: bool) -> list[Argument]:
    signature = inspect.signature(function, follow_wrapped=follow_wrapped)
    return [
        Argument(parameter.name, parameter.kind.name, parameter.default is parameter.empty)
        for parameter in signature.parameters.values()
    ]


def is_ours(value: object) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(OURS)


def replaced() -> dict[str, list[Argument]]:
    """Return the replaced functions of all modules of Megatron that a rank has imported, by their address."""
    from megarl.config.schema import Device
    from megarl.engine import platform

    platform.activate(Device.cpu)
    # A wrapper must accept the arguments itself: the signature that it copies from the original is no proof.
    return {
        f"{module}:{name}": arguments_of(value, follow_wrapped=False)
        for module in sorted(sys.modules)
        if module.startswith("megatron.core")
        for name, value in vars(sys.modules[module]).items()
        if is_ours(value)
    }


# Runs in a process without adaptations, with the addresses as its argument.
ORIGINALS = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
from tests.unit.engine.test_replaced_signatures import arguments_of, is_ours

originals = {}
for address in json.loads(sys.argv[1]):
    module, name = address.split(":")
    function = getattr(importlib.import_module(module), name)
    assert not is_ours(function), address
    originals[address] = arguments_of(function, follow_wrapped=True)
print(json.dumps(originals))
"""


def accepts(ours: list[Argument], theirs: list[Argument]) -> str | None:
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


def test_replaced_functions_accept_the_arguments_of_the_originals(rank_pool: RankPool) -> None:
    (ours,) = rank_pool.run(replaced, world_size=1)
    assert len(ours) >= 14, sorted(ours)
    run = subprocess.run(
        [sys.executable, "-c", ORIGINALS, json.dumps(sorted(ours))],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    theirs = json.loads(run.stdout.splitlines()[-1])
    problems = [
        f"{address}: {problem}"
        for address, arguments in ours.items()
        if (problem := accepts(arguments, [Argument(*each) for each in theirs[address]])) is not None
    ]
    assert not problems, "\n".join(problems)


def _original(first: int, second: int = 0, *, third: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda first, second=0, *, third=0: None, None),
        (lambda first, second=0, third=0, more=None: None, None),
        (lambda *arguments, **keywords: None, None),
        (lambda first, second=0, **keywords: None, None),
        (lambda first, second=0: None, "third is not accepted by name"),
        (lambda first, *unused, third=0: None, "second is not accepted by name"),
        (lambda other, second=0, *, third=0: None, "first is not accepted by name"),
        (lambda first, third=0, second=0: None, "second is at position 2, in the original at 1"),
        (lambda first, second, *, third=0: None, "second is required, but optional in the original"),
        (
            lambda first, second=0, *, third=0, more: None,
            "more is required, but the original does not have it",
        ),
    ],
)
def test_calls_that_only_the_original_accepts_are_found(
    function: Callable[..., None], problem: str | None
) -> None:
    assert (
        accepts(arguments_of(function, follow_wrapped=False), arguments_of(_original, follow_wrapped=False))
        == problem
    )
