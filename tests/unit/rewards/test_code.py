"""Programs and their tests: who passes what, and that nothing but making the value passes."""

import json

import pytest

from megarl.machine.sandbox import SandboxLimits
from megarl.rewards import code
from megarl.rewards.code import compute_score, program_of, read_tests, run_tests
from megarl.rewards.code_interpreters import Judge, ProgramSide

ADD = "def add(left, right):\n    return left + right\n"
TESTS = [
    {"call": "add(2, 3)", "returns": 5},
    "assert add('a', 'b') == 'ab'",
    {"call": "add((1,), (2,))", "returns": [1, 2]},
    {"call": "add(1, 1)", "returns": 3},
]


def test_the_score_is_the_share_that_passes():
    said = compute_score("mbpp", f"Here it is:\n```python\n{ADD}```\nDone.", json.dumps(TESTS), {})
    assert said == {"score": 0.75, "all_passed": 0.0}
    assert compute_score("mbpp", ADD, TESTS[:3], {}) == {"score": 1.0, "all_passed": 1.0}


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("def f(x):\n    return x", [True, True, True, False]),
        ("def f(x):\n    if x == 2:\n        while True: pass\n    return x", [True, False, True, False]),
        ("def f(x):\n    if x == 2: raise ValueError\n    return 3 if x == 3 else x", [True, False, True, False]),
        ("def f(x):\n    print('7 3', x)\n    return {1: True, 2: 2.0, 3: '3', 4: {'a': (1, None)}}[x]", [True, True, False, True]),
        ("def f(x):\n    return x\nif __name__ == '__main__':\n    print(f(input()))", [True, True, True, False]),
        ("from __future__ import annotations\ndef f(x: int) -> Any:\n    return x", [True, True, True, False]),
        ("import sys\nsys.exit(0)", [False] * 4),
        ("import os\nos._exit(0)", [False] * 4),
        ("def f(x:", [False] * 4),
        ("class All:\n    def __eq__(self, other): return True\n    def __repr__(self): return 'x'\ndef f(x): return All()", [False] * 4),
        ("open('/etc/passwd')\ndef f(x): return x", [False] * 4),
        ("def f(x):\n    return [[]] * 10**6", [False] * 4),
    ],
)
def test_calls(program, passed, monkeypatch):
    monkeypatch.setattr(code, "LIMITS", SandboxLimits(cpu_s=1, wall_s=1.5))
    with_value = [{"call": "f(3)", "returns": 3}, {"call": "f(4)", "returns": {"a": [1, None]}}]
    tests = read_tests(["assert f(1) == 1", "assert f(2) == 2", *with_value])
    assert run_tests(program, tests) == passed


def test_programs_that_read_and_print():
    tests = read_tests([{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "1 1", "stdout": "2"}, {"stdin": "1 1", "stdout": "3"}])
    assert run_tests("print(sum(map(int, input().split())), ' ')", tests) == [True, True, False]
    assert run_tests("print(5)\nraise SystemExit(1)", tests[:1]) == [False]


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\na\n```\ntext\n```py\nb\n```", "b\n"),
        ("```\nc\n```", "c\n"),
        ("```Python \nd", "d"),
    ],
)
def test_the_last_block_is_the_program(response, program):
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        ("42", "the ground truth '42' is not a list of tests"),
        ([], "is not a list of tests with at least one"),
        (["assert (f(1) == 1, 'wrong')"], "asserts a tuple, which is always true"),
        (["assert 1 == 1"], "calls nothing that only the program defines"),
        (["x = f(1)"], "a statement that is neither an assert nor an import"),
        (["assert f(1) =="], "is not an assert statement of Python"),
        (["import numpy\nassert f(1) == numpy.ones(1)"], "imports numpy, and the sandbox has the standard library alone"),
        ([{"call": "f(1)"}], "is none of {call, returns}, {stdin, stdout} and an assert statement"),
        ([{"call": "f(1)", "returns": 1, "points": 3}], "is none of"),
    ],
)
def test_tests_that_cannot_be_read(truth, says):
    with pytest.raises(ValueError, match="^the ") as raised:
        read_tests(truth)
    assert says in str(raised.value)


def test_expected_values_do_not_enter_the_process_of_the_program(monkeypatch):
    """The judge's process gets them, and never runs the program."""
    seen, judged = [], []
    run, ask = code.run_program, ProgramSide.value
    monkeypatch.setattr(code, "run_program", lambda program, *rest: seen.append((program, rest)) or run(program, *rest))
    monkeypatch.setattr(ProgramSide, "value", lambda side, *asked: seen.append(asked) or ask(side, *asked))
    monkeypatch.setattr(Judge, "holds", lambda judge, number, test, side: judged.append(test) or (False, None))
    tests = [{"call": "add(1, 2)", "returns": "hunter2"}, {"stdin": "", "stdout": "hunter2"}, "assert add(1, 2) < 'hunter2'"]
    assert run_tests(ADD, read_tests(tests)) == [False] * 3
    assert len(seen) == 2
    assert not any("hunter2" in str(each) for each in seen)
    assert "hunter2" in str(judged)
