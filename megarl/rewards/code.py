"""The reward of code: which of its tests a program passes, in the sandbox.

    # reward.py, which reward.functions names
    from megarl.rewards.code import compute_score

A sample's program is its last block between ```python and ```, or the whole response. Its ground truth is a list of tests, or such a
list as JSON:

    {"call": "add(2, 3)", "returns": 5}              an expression, and its value, which is compared outside of the sandbox
    "assert add(2, 3) == 5"                          the same
    {"stdin": "2 3\\n", "stdout": "5\\n"}              what the whole program reads and prints, but for spaces at the ends of lines

Expected values never enter the sandbox: a program cannot pass a test without making the value.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megarl.machine.sandbox import Level, SandboxLimits, run_program, strongest
from megarl.rewards.encodable import refuse_unencodable

LIMITS = SandboxLimits(memory_mb=512, cpu_s=4, wall_s=6.0, output_kb=256)
_LONGEST_VALUE = 10_000  # characters of a value's text
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
# The program is imported, as it were: what it does only as a script, such as to ask for input, is not done.
_CALLER = """
import sys
namespace = {{"__name__": "program"}}
exec(compile({program!r}, "<program>", "exec", dont_inherit=True), namespace)
for number, call in enumerate({calls!r}):
    try:
        value = repr(eval(call, namespace))
    except Exception:
        value = None
    sys.__stdout__.write(f"\\n{mark} {{number}} {{value}}\\n")
    sys.__stdout__.flush()
"""


class CodeTest(NamedTuple):
    """Either a call and the value that it should return, or what is read and what should be printed."""

    call: str | None
    returns: Any
    stdin: str = ""
    stdout: str = ""


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """score: the share of the tests that pass. all_passed: 1.0 or 0.0. answer: the program. Raises ValueError for a ground truth that is
    not a list of tests, SandboxError where no sandbox works on this machine."""
    program = program_of(solution_str)
    passed = run_tests(program, read_tests(ground_truth))
    return {"score": sum(passed) / len(passed), "all_passed": float(all(passed)), "answer": program}


def answer_from_truth(ground_truth: Any) -> str | None:
    """Returns None: a program cannot be derived from its tests."""
    return None


def check_truth(ground_truth: Any) -> None:
    """Raises ValueError for a ground truth that no program can pass: not a list of tests, or a test that cannot be carried out."""
    for test in read_tests(ground_truth):
        refuse_unencodable(tuple(test), "a test of the ground truth,")


def program_of(response: str) -> str:
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else response


def read_tests(ground_truth: Any) -> list[CodeTest]:
    """Raises ValueError."""
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise ValueError(f"the ground truth {str(tests)[:60]!r} is not a list of tests with at least one; see megarl/rewards/code.py")
    return [_test(test) for test in tests]


def _test(test: Any) -> CodeTest:
    match test:
        case str():
            return _of_assert(test)
        case {"call": str(call), "returns": value, **others} if not others:
            return CodeTest(call, value)
        case {"stdin": str(stdin), "stdout": str(stdout), **others} if not others:
            return CodeTest(None, None, stdin, stdout)
    raise ValueError(f"the test {str(test)[:100]!r} is none of {{call, returns}}, {{stdin, stdout}} and 'assert CALL == VALUE'")


def _of_assert(text: str) -> CodeTest:
    try:
        match ast.parse(text.strip()).body:
            case [ast.Assert(test=ast.Compare(left=call, ops=[ast.Eq()], comparators=[value]))]:
                return CodeTest(ast.unparse(call), ast.literal_eval(value))
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"the test {text[:100]!r} is not 'assert CALL == VALUE' with a value that Python can read without running anything")


def run_tests(program: str, tests: Sequence[CodeTest]) -> list[bool]:
    """Whether each passes. All calls are made in one process, one after the other; each input has a process of its own."""
    calls = [test.call for test in tests if test.call is not None]
    values = iter(_values(program, calls) if calls else [])
    return [_prints(program, test) if test.call is None else _same(next(values), test.returns) for test in tests]


def _values(program: str, calls: Sequence[str]) -> list[str | None]:
    """The text of what each returns; None where it raises, or was not reached."""
    mark = secrets.token_hex(16)  # what the program prints itself is not taken for an answer
    finished = run_program(_CALLER.format(program=program, calls=calls, mark=mark), _level(), LIMITS)
    found = dict(re.findall(rf"^{mark} (\d+) (.*)$", finished.output, re.MULTILINE))
    return [found.get(str(number)) for number in range(len(calls))]


def _same(text: str | None, expected: Any) -> bool:
    if text is None or len(text) > _LONGEST_VALUE:
        return False
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # not a value of plain Python
        return False
    return bool(_as_json(value) == _as_json(expected)) and isinstance(value, bool) == isinstance(expected, bool)


def _as_json(value: Any) -> Any:
    """Tuples are lists, as in data."""
    match value:
        case tuple() | list():
            return [_as_json(each) for each in value]
        case dict():
            return {key: _as_json(each) for key, each in value.items()}
    return value


def _prints(program: str, test: CodeTest) -> bool:
    finished = run_program(program, _level(), replace(LIMITS, output_kb=max(LIMITS.output_kb, 2 * len(test.stdout) // 1024)), test.stdin)
    return finished.status == 0 and _lines(finished.output) == _lines(test.stdout)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@functools.cache
def _level() -> Level:
    return strongest()
