"""Runs a program and the judge of its tests in two separate sandbox processes.

The program's process computes values and never receives the expected ones. The judge's process knows the
expected values and never runs the program; it receives values of built-in types. The program therefore cannot
change the result by manipulating its own process.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from megarl.machine.sandbox_levels import Level, SandboxLimits
from megarl.machine.sandbox_session import SandboxSession
from megarl.rewards import code_values
from megarl.rewards.code_tests import REMOTE, AssertTest

# Arguments with which an assertion calls a function that is a value of the program.
_GIVEN = "__given__"
_NAMED = "__named__"
_LONGEST_INTEGER = 20  # characters of an integer below 2**53 and its sign, and more
_IMPORTS = """
import importlib
def imported(imports):
    found = {}
    for name, path in imports.items():
        module, _, member = path.rpartition(".")
        try:
            found[name] = importlib.import_module(path)
        except ImportError:
            found[name] = getattr(importlib.import_module(module), member)
        if "." in path and member != name and module.split(".")[0] == name:
            found[name] = importlib.import_module(name)
    return found
"""

# The program runs once for each test, as a module would, so that no test sees variables left by another one.
# Its output is discarded.
_PROGRAM_SIDE = """
import os, sys
_source, _code, _test, _names = {program!r}, None, None, {{}}
def _begin(test):
    global _code, _test, _names
    _code = _code or compile(_source, "<program>", "exec", dont_inherit=True)
    _test, _names = test, {{"__name__": "program"}}
    exec(_code, _names)
def _value(test, call, imports, bound):
    try:
        if test != _test:
            _begin(test)
        return {{"value": encode(eval(call, {{**imported(imports), **_names, **bound}}))}}
    except BaseException as error:
        return {{"raised": type(error).__name__}}
def answer(test, call, imports, bound):
    kept, nowhere = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    try:
        said = json.dumps(_value(test, call, imports, decode(bound)))
        sys.__stdout__.flush()
        sys.__stderr__.flush()
    finally:
        for stream, descriptor in zip((1, 2), kept):
            os.dup2(descriptor, stream)
            os.close(descriptor)
    said = said.encode() + b"\\n"
    while said:
        said = said[os.write(1, said):]
"""

# An expression is evaluated again from the beginning whenever a value of the program arrives, until it needs
# no other value.
_JUDGE_SIDE = """
class _Needed(BaseException):
    pass
_known = []
def judge(judged, imports, is_new, value):
    if is_new:
        _known.clear()
    else:
        _known.append(value)
    values = iter(_known)
    def call_program(number, bound):
        try:
            data = next(values)
        except StopIteration:
            raise _Needed(number, bound) from None
        def call(*args, **named):
            return call_program(number, {{**bound, {given!r}: args, {named!r}: named}})
        return decode(data, None if {given!r} in bound else call)
    try:
        said = {{"holds": bool(eval(judged, {{**imported(imports), {remote!r}: call_program}}))}}
    except _Needed as needed:
        number, bound = needed.args
        said = {{"needs": number, "bound": encode(bound)}}
    except Exception:
        said = {{"holds": False}}
    print(json.dumps(said))
"""


class Value(NamedTuple):
    """The result of an expression that the program evaluated.

    Attributes:
        data: The value as returned by `code_values.encode`; None unless `how` is "value".
        how: "value"; "raised"; "time": the time limit was exceeded; "died": the process ended or printed too
            much.
        was_fresh: Whether nothing had run in its process before.
    """

    data: Any
    how: Literal["value", "raised", "time", "died"]
    was_fresh: bool


class SandboxedInterpreter:
    """A Python interpreter in the sandbox that has run `setup`.

    It is restarted when its process has ended.
    """

    def __init__(self, setup: str, level: Level, limits: SandboxLimits) -> None:
        self._setup = "\n".join((inspect.getsource(code_values), _IMPORTS, setup))
        self._session = SandboxSession(level, limits)
        self._is_ready = False

    def ask(self, expression: str) -> Value:
        """Return the JSON that the expression prints."""
        was_fresh = not self._is_ready
        # A fresh process must run the setup first.
        program = expression if self._is_ready else f"{self._setup}\n{expression}"
        finished, self._is_ready = self._session.run(program)

        # A shell reports a killed process as 137.
        if finished.ended == "time" or finished.status in (-9, 137):
            return Value(None, "time", was_fresh)
        try:
            # Output that is too long ends in the middle.
            output = "" if finished.ended == "output" else finished.output
            said = json.loads(output, parse_int=_short_integer)
        except (ValueError, RecursionError):
            said = None
        return Value(said, "died" if said is None else "value", was_fresh)

    def close(self) -> None:
        self._session.close()


def _short_integer(digits: str) -> int:
    """Convert an integer of a reply.

    `encode` writes long integers in base 16, which are read in linear time.
    """
    if len(digits) > _LONGEST_INTEGER:
        raise ValueError("the integer was not written by `encode`")
    return int(digits)


class ProgramSide(SandboxedInterpreter):
    """A program that evaluates expressions in its own process."""

    def __init__(self, program: str, level: Level, limits: SandboxLimits) -> None:
        super().__init__(_PROGRAM_SIDE.format(program=program), level, limits)

    def value(self, test: int, source: str, imports: Mapping[str, str], bound: Any = None) -> Value:
        """Evaluate `source` after running the program, which is run again for each `test`.

        Args:
            bound: Additional variables, encoded.
        """
        given = ["dict", []] if bound is None else bound
        answer = self.ask(
            f"answer({test!r}, {source!r}, {dict(imports)!r}, json.loads({json.dumps(given)!r}))"
        )
        if answer.how != "value":
            return answer
        # The program may have printed anything, so check the form.
        if isinstance(answer.data, dict) and "value" in answer.data:
            return answer._replace(data=answer.data["value"])

        return Value(None, "raised", answer.was_fresh)


class Judge(SandboxedInterpreter):
    """Decides assertions about values of a program, in a process that never runs the program."""

    def __init__(self, level: Level, limits: SandboxLimits) -> None:
        super().__init__(_JUDGE_SIDE.format(remote=REMOTE, given=_GIVEN, named=_NAMED), level, limits)

    def holds(self, number: int, test: AssertTest, program: ProgramSide) -> tuple[bool, Value | None]:
        """Return whether the assertion holds. If a value of the program is missing, it is returned too."""
        imports = dict(test.imports)
        is_new = True
        data = None

        # The judge requests one value of the program at a time, until the assertion is decided.
        while True:
            arguments = f"{test.judged!r}, {imports!r}, {is_new}, json.loads({json.dumps(data)!r})"
            said = self.ask(f"judge({arguments})").data
            if said is None or "holds" in said:
                return said is not None and said["holds"], None
            source = test.sources[said["needs"]]
            # The assertion calls a function that the program returned, which only the program's process can
            # do.
            if any(key == _GIVEN for key, _ in said["bound"][1]):
                source = f"({source})(*{_GIVEN}, **{_NAMED})"
            value = program.value(number, source, imports, said["bound"])
            if value.how != "value":
                return False, value
            is_new = False
            data = value.data
