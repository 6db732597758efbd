"""Scores a program by the fraction of its tests that it passes in the sandbox.

    # reward.py, which reward.functions names
    from megarl.rewards.code import answer_from_truth, check_truth, compute_score

The ground truth is a list of tests, or such a list as JSON:

    {"call": "add(2, 3)", "returns": 5}              an expression of the program, and its value
    "assert add(2, 3) == 5"                          an assertion, preceded by the imports that it needs
    {"stdin": "2 3\\n", "stdout": "5\\n"}              input and expected output of the whole program

Floats in `returns` and `stdout` have a tolerance, see `compute_score`; assertions are exact.
Expected values never enter the process that runs the program, and values are compared outside of it.
"""

from __future__ import annotations

import ast
import decimal
import functools
import re
import signal
import textwrap
import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from markdown_it import MarkdownIt

from megarl.machine.sandbox import run_program, strongest
from megarl.machine.sandbox_levels import Level, SandboxLimits
from megarl.rewards.code_interpreters import Judge, ProgramSide, Value
from megarl.rewards.code_tests import AssertTest, CallTest, CodeTest, StreamTest, long_integers, read_tests
from megarl.rewards.code_values import decode, same_as_json
from megarl.rewards.confined_call import sample_limit_s
from megarl.rewards.thinking import outside_thinking

__all__ = ["answer_from_truth", "check_truth", "compute_score", "program_of", "read_tests", "run_tests"]

LIMITS = SandboxLimits(memory_mb=512, cpu_s=4, wall_s=6.0, output_kb=4096)  # per test
TOLERANCE = 1e-6  # of floats, absolute or relative
QUICK_WALL_S = 1.0  # per test in the first attempt, in a process shared with other tests
_SHARED_CPU_S = 60  # for all tests that share a process
# Fraction of the time limit of a sample after which remaining tests fail, if a test has run out of time.
_SHARE_OF_TIME = 0.7


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Score a response by its program.

    There is no `answer`, and so no maj@k, because equivalent programs rarely have the same text.

    Args:
        tolerance: By how much numbers in a value or an output may differ from expected floats, absolute or
            relative to them. Assertions are exact. 0: floats must be equal, in any notation.

    Returns:
        score: The fraction of the tests that pass.
        all_passed: 1.0 or 0.0.

    Raises:
        ValueError: `ground_truth` is not a list of tests that can be run.
        SandboxError: No sandbox works on this machine.
    """
    passed = run_tests(program_of(solution_str), read_tests(ground_truth), tolerance)
    return {"score": sum(passed) / len(passed), "all_passed": float(all(passed))}


def answer_from_truth(ground_truth: Any) -> str | None:
    """Return None, because a program cannot be derived from its tests."""
    return None


def check_truth(ground_truth: Any) -> None:
    """Check that a program can pass the ground truth.

    Raises:
        ValueError: The ground truth is not a list of tests, or a test cannot be run.
    """
    read_tests(ground_truth)


@long_integers()
def run_tests(program: str, tests: Sequence[CodeTest], tolerance: float = TOLERANCE) -> list[bool]:
    """Return whether each test passes.

    In the first attempt, the tests share a process and have QUICK_WALL_S each. A test that takes longer, or
    whose process ends after another test has run in it, is tried again in its own process with all of LIMITS.
    Testing ends with the first test that runs out of time there. The order of `tests` does not matter: they
    always run in the order of their texts.

    Args:
        tolerance: See compute_score.
    """
    passed = [False] * len(tests)
    if not program.strip():
        return passed
    deadline = time.monotonic() + _SHARE_OF_TIME * sample_limit_s()
    again: list[int] = []

    # First attempt: all tests share processes.
    quick = replace(LIMITS, wall_s=min(QUICK_WALL_S, LIMITS.wall_s))
    with closing(ProgramTester(program, quick, shared=True, tolerance=tolerance)) as tester:
        for number in sorted(range(len(tests)), key=lambda number: repr(tests[number])):
            # The deadline applies only once a test has run out of time.
            if again and time.monotonic() > deadline:
                break
            outcome = tester.passes(number, tests[number])
            passed[number] = outcome is True
            again += [number] if outcome is None else []

    # Second attempt: one process per test.
    for number in again:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        limits = replace(LIMITS, wall_s=min(left, LIMITS.wall_s))
        with closing(ProgramTester(program, limits, shared=False, tolerance=tolerance)) as tester:
            outcome = tester.passes(number, tests[number])
        passed[number] = outcome is True
        if outcome is None:
            break

    return passed


class ProgramTester:
    """Runs the tests of one program under the same limits.

    Args:
        shared: Whether processes run several tests. A process that ends may then have been affected by an
            earlier test.
        tolerance: See compute_score.
    """

    def __init__(
        self, program: str, limits: SandboxLimits, shared: bool, tolerance: float = TOLERANCE
    ) -> None:
        self._program = program
        self._tolerance = tolerance
        self._limits = limits
        self._shared = shared
        of_processes = replace(limits, cpu_s=_SHARED_CPU_S) if shared else limits
        self._side = ProgramSide(program, _level(), of_processes)
        self._judge = Judge(_level(), replace(LIMITS, cpu_s=_SHARED_CPU_S))

    def passes(self, number: int, test: CodeTest) -> bool | None:
        """Return whether the test passes; None if a second attempt may have another result."""
        match test:
            case StreamTest():
                return self._prints(test)
            case CallTest():
                value = self._side.value(number, test.call, test.imports)
                if value.how != "value":
                    return self._failure(value)
                return is_expected_value(value.data, test, self._tolerance)
            case AssertTest():
                holds, missing = self._judge.holds(number, test, self._side)
                return holds if missing is None else self._failure(missing)

    def close(self) -> None:
        self._side.close()
        self._judge.close()

    def _failure(self, value: Value) -> bool | None:
        may_change = value.how == "time" or (value.how == "died" and self._shared and not value.was_fresh)
        return None if may_change else False

    def _prints(self, test: StreamTest) -> bool | None:
        # Leave room for the expected output, or the output of a correct program would be truncated.
        output_kb = max(self._limits.output_kb, 2 * len(test.stdout.encode()) // 1024)
        finished = run_program(
            self._program, _level(), replace(self._limits, output_kb=output_kb), test.stdin
        )
        # A kill may be due to the CPU limit, so a second attempt may have another result.
        if finished.ended == "time" or finished.status in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return None

        return (
            finished.ended == "itself"
            and finished.status == 0
            and same_output(finished.output, test.stdout, self._tolerance)
        )


def is_expected_value(data: Any, test: CallTest, tolerance: float = TOLERANCE) -> bool:
    """Compare a value sent by the program's process, which may be arbitrary data."""
    try:
        value = decode(data)
        if test.is_json:
            return same_as_json(value, test.returns, tolerance)
        return bool(value == test.returns)
    except (
        ValueError,
        TypeError,
        ArithmeticError,
        RecursionError,
        MemoryError,
    ):  # not a value, or one that cannot be compared
        return False


@functools.cache
def _level() -> Level:
    return strongest()


# ---- the program of a response

_PYTHON = ("python", "python3", "py", "py3")
_WORD = re.compile(r"\w+")
# HTML parsing would hide a fence after a tag such as <answer>, so only the Markdown rules for fences and for
# blocks that indent them are enabled.
_MARKDOWN = MarkdownIt("zero").enable(["fence", "list", "blockquote", "code"])
_INDENTED_FENCE = re.compile(r"^[ \t]+(?=```|~~~)", re.MULTILINE)
_TAG = re.compile(r"<code[^>]*>\n?(.*?)(?:</code>|\Z)", re.DOTALL | re.IGNORECASE)
_CLOSING_FENCE = re.compile(r"(`{3,}|~{3,})\s*\Z")


def program_of(response: str) -> str:
    """Return the program in a response, ignoring its thinking.

    The program is the last block between ```python and ```. Without one, it is the last block without a
    language that defines something, or else the last one that Python can compile; then the text between
    <code> and </code>; then the whole response. An unclosed block extends to the end of the response.
    """
    response = outside_thinking(response).replace("\r\n", "\n").encode(errors="replace").decode()

    # Models also indent fences outside of lists, and write lists around programs that are not indented like
    # the list.
    parsed = [_blocks(response), _blocks(_INDENTED_FENCE.sub("", response))]

    for blocks in parsed:
        tagged = [text for language, text in blocks if language in _PYTHON and text.strip()]
        if tagged:
            return tagged[-1]

    for blocks in parsed:
        untagged = _best_untagged([text for language, text in blocks if not language])
        if untagged is not None:
            return untagged

    between_tags = [text for text in _TAG.findall(response) if text.strip()]
    return between_tags[-1] if between_tags else _without_closing_fence(response)


def _blocks(response: str) -> list[tuple[str, str]]:
    """Return the language and the text of each fenced block.

    The language is the first word after the fence, in lower case; empty if there is none.
    """
    fences = [token for token in _MARKDOWN.parse(response) if token.type == "fence"]
    languages = [_WORD.search(fence.info.lower()) for fence in fences]
    return [
        (language.group() if language else "", _without_closing_fence(_dedent(fence.content)))
        for language, fence in zip(languages, fences, strict=True)
    ]


def _dedent(text: str) -> str:
    """Dedent a text that begins with whitespace.

    Other texts are unchanged, because `textwrap.dedent` also empties lines of spaces, even in strings.
    """
    return textwrap.dedent(text) if text[:1].isspace() else text


def _without_closing_fence(text: str) -> str:
    """Remove a closing fence that is not one in Markdown.

    Such a fence does not begin its line, or matches no opening fence.
    """
    return _CLOSING_FENCE.sub("", text)


def _best_untagged(texts: Sequence[str]) -> str | None:
    """Return the last text that defines something.

    Without one, it is the last text that performs an action, and then the last that compiles, as printed
    output may too.
    """
    found = [(text, tree) for text in reversed(texts) if (tree := _tree(text)) is not None]
    # Apply the strictest criterion to all blocks before the next one.
    for is_wanted in (_defines, _does, bool):
        for text, tree in found:
            if any(map(is_wanted, tree.body)):
                return text

    return None


def _tree(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last three: NUL, deep nesting
        return None


def _defines(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _does(statement: ast.stmt) -> bool:
    return not isinstance(statement, ast.Expr) or any(
        isinstance(node, ast.Call) for node in ast.walk(statement)
    )


# ---- what a program printed

# A number between spaces, brackets or commas. Quantifiers are possessive, so that long texts are read once.
_NUMBER = re.compile(
    r"(?<![\w.+-])([+-]?+(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?+[0-9]{1,4}+)?+)(?![\w.+-])"
)
_MARKS_OF_FLOATS = re.compile("[.eE]")
_CONTEXT = decimal.Context(prec=40, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    """Return whether a program's output is the expected one, as the judges of APPS and TACO compare it.

    Spaces at the ends of lines and blank lines at the beginning and the end are ignored. A number may be
    written in another way, such as 2.50 for 2.5 or 5.0 for 5, if one of the two has a decimal point or an
    exponent. If the expected one has, they may also differ by `tolerance`, absolute or relative to it.
    """
    lines = _lines(printed)
    expected_lines = _lines(expected)
    return len(lines) == len(expected_lines) and all(
        line == wanted or _same_line(line, wanted, tolerance)
        for line, wanted in zip(lines, expected_lines, strict=True)
    )


def _lines(text: str) -> list[str]:
    # At the beginning, only whole lines are removed, because indentation is a part of the output.
    lines = [line.rstrip() for line in text.rstrip().split("\n")]
    start = next((number for number, line in enumerate(lines) if line), 0)
    return lines[start:]


def _same_line(line: str, expected: str, tolerance: float) -> bool:
    # Numbers are the odd parts of a line, between the texts around them.
    parts = _NUMBER.split(line)
    wanted = _NUMBER.split(expected)
    return (
        len(parts) == len(wanted)
        and parts[::2] == wanted[::2]
        and all(
            part == want or _same_number(part, want, tolerance)
            for part, want in zip(parts[1::2], wanted[1::2], strict=True)
        )
    )


def _same_number(text: str, expected: str, tolerance: float) -> bool:
    is_float = bool(_MARKS_OF_FLOATS.search(expected))
    if not (is_float or _MARKS_OF_FLOATS.search(text)):
        return False

    number = decimal.Decimal(text)
    wanted = decimal.Decimal(expected)
    if not is_float:
        return number == wanted
    allowed = _CONTEXT.multiply(decimal.Decimal(str(tolerance)), _CONTEXT.max(1, _CONTEXT.abs(wanted)))
    return _CONTEXT.abs(_CONTEXT.subtract(number, wanted)) <= allowed
