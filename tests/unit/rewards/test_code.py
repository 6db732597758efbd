"""Programs and their tests: which programs pass, and that a program passes only by computing the value."""

import json
import math
from dataclasses import replace
from itertools import permutations

import pytest

from megarl.rewards import code, code_interpreters, code_values
from megarl.rewards.code import (
    answer_from_truth,
    check_truth,
    compute_score,
    program_of,
    read_tests,
    run_tests,
)
from tests.unit.rewards.code_cases import ADD, CASES

TESTS = [
    {"call": "add(2, 3)", "returns": 5},
    "assert add('a', 'b') == 'ab'",
    {"call": "add((1,), (2,))", "returns": [1, 2]},
    {"call": "add(1, 1)", "returns": 3},
]


@pytest.fixture
def little_cpu(monkeypatch):
    """Limit CPU time so that loops end after a second, while programs that terminate have enough time on a
    busy machine."""
    monkeypatch.setattr(code, "LIMITS", replace(code.LIMITS, cpu_s=1, wall_s=60.0))
    monkeypatch.setattr(code, "sample_limit_s", lambda: 1000.0)


def test_the_score_is_the_share_that_passes():
    said = compute_score("mbpp", f"Here it is:\n```python\n{ADD}```\nDone.", json.dumps(TESTS), {})
    assert said == {"score": 0.75, "all_passed": 0.0}
    assert compute_score("mbpp", ADD, TESTS[:3], {}) == {"score": 1.0, "all_passed": 1.0}


def test_a_score_does_not_depend_on_the_order_of_the_tests(little_cpu):
    """This holds even if the program patches its own process in one call."""
    program = (
        "import builtins\ndef f(x):\n    if x == 2: builtins.abs = lambda x: 7\n    return x == 3 and "
        "1 / 0 or abs(x)"
    )
    tests = read_tests(["assert f(1) == 1", "assert f(2) == 2", "assert f(-4) == 4"])
    passed = {
        tuple(sorted(zip(map(repr, order), run_tests(program, order), strict=True)))
        for order in permutations(tests)
    }
    assert len(passed) == 1


def test_tests_that_take_long_are_tried_again_by_themselves(little_cpu, monkeypatch):
    monkeypatch.setattr(code, "QUICK_WALL_S", 0.05)
    program = "import time\ndef f(x):\n    time.sleep(0.2 * x)\n    return x"
    assert run_tests(program, read_tests([f"assert f({x}) == {x}" for x in (0, 1, 2)])) == [True] * 3


def test_a_program_that_never_ends_takes_less_than_the_time_for_a_sample(monkeypatch):
    """A sample that exceeds the time limit would end the run."""
    monkeypatch.setattr(code, "sample_limit_s", lambda: 1.0)
    monkeypatch.setattr(code, "QUICK_WALL_S", 0.2)
    clock = iter(range(1000))
    monkeypatch.setattr(code.time, "monotonic", lambda: next(clock) / 10)
    begun = []
    inner = code.ProgramTester.passes
    monkeypatch.setattr(
        code.ProgramTester,
        "passes",
        lambda self, number, test: begun.append(number) or inner(self, number, test),
    )
    assert (
        run_tests("def f(x):\n    while True: pass", read_tests([f"assert f({x}) == 0" for x in range(50)]))
        == [False] * 50
    )
    assert 1 <= len(begun) < 10


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\na\n```\ntext\n```py\nb\n```", "b\n"),
        ("```\nc\n```", "c\n"),
        ("```Python \nd", "d"),
        ("```text\n1\n```\n```\n[1, 2\n```", "```text\n1\n```\n```\n[1, 2\n"),
    ],
)
def test_the_last_block_is_the_program(response, program):
    assert program_of(response) == program


@pytest.mark.parametrize(
    "text", ["> - " * 9000, "```\n" * 9000, "<code>" * 9000, "- a\n" * 9000, "\n" + " " * 50_000 + "`"]
)
def test_odd_markdown_is_read_in_little_time(text):
    """Each case takes less than a second. Superlinear growth would show in the sum of the test's time."""
    assert isinstance(program_of(text), str)


UNREADABLE = [
    ("42", "the ground truth '42' is not a list of tests"),
    ("no JSON", "the ground truth 'no JSON' is not a list of tests as JSON"),
    ("[" * 100_000, "is not a list of tests as JSON"),
    (None, "the ground truth 'None' is not a list of tests"),
    (math.nan, "the ground truth 'nan' is not a list of tests"),
    ({"call": "f(1)", "returns": 1}, "is not a list of tests"),
    ([], "is not a list of tests with at least one"),
    ([None], "the test 'None' must be {call, returns}, {stdin, stdout} or an assert statement"),
    ([{"call": "f(1)"}], "must be {call, returns}, {stdin, stdout} or an assert statement"),
    ([{"call": "f(1)", "returns": 1, "points": 3}], "must be {call, returns}"),
    ([{"call": "f(", "returns": 1}], "the call 'f(' of a test is not a Python expression"),
    ([{"call": "x = 1", "returns": 1}], "the call 'x = 1' of a test is not a Python expression"),
    ([{"call": "f()", "returns": object()}], "of a type that cannot leave the sandbox"),
    (["assert f(1"], "the test 'assert f(1' is not a Python assert statement: '(' was never closed"),
    (["assert f(1) == (yield)"], "is not a Python assert statement"),
    (["assert f(\0)"], "is not a Python assert statement"),
    (["f(1)"], "the test 'f(1)' has a statement that is neither an assert nor an import"),
    (["import math"], "the test 'import math' has no assert statement"),
    (
        ["import numpy as np\nassert f(1) == np.int64(1)"],
        "imports numpy, but the sandbox has only the standard library",
    ),
    (["assert (f(1) == 2, 'two')"], "asserts a tuple, which is always true; leave out the parentheses"),
    (
        ["assert 1 == 1"],
        "calls nothing that only the program defines; it must call a function of the program",
    ),
    (["assert set(list(x for x in [1])) == set([1])"], "calls nothing that only the program defines"),
    (["assert " + "-" * 100_000 + "f(1)"], "^the test "),  # too deep at any recursion limit
    (["assert f(1) == '\ud800'"], "has the lone surrogate '\\ud800' at position 16"),
    (
        [{"stdin": "\ud800", "stdout": "1"}],
        "has the lone surrogate '\\ud800' at position 0, which no response can contain",
    ),
    ([{"call": "f()", "returns": {"a": ["x\udfff"]}}], "has the lone surrogate '\\udfff' at position 1"),
]


@pytest.mark.parametrize(("truth", "says"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_ground_truths_that_cannot_be_passed(truth, says):
    for reads in (check_truth, read_tests, lambda truth: compute_score("d", ADD, truth, {})):
        with pytest.raises(ValueError, match="^the ") as raised:
            reads(truth)
        assert says.removeprefix("^") in str(raised.value)


def test_ground_truths_that_can_be_passed():
    for _, _, tests, _ in CASES:
        check_truth(tests)
        assert answer_from_truth(tests) is None


def test_expected_values_do_not_enter_the_process_of_the_program(monkeypatch):
    streams = []
    sessions = {}
    inner = code.run_program
    monkeypatch.setattr(code, "run_program", lambda *given: streams.append(given) or inner(*given))
    ask = code_interpreters.SandboxedInterpreter.ask
    monkeypatch.setattr(
        code_interpreters.SandboxedInterpreter,
        "ask",
        lambda self, text: sessions.setdefault(self._setup, []).append(text) or ask(self, text),
    )
    expected = [
        "assert add('hun', 'ter2') == 'hunter2'",
        "assert add('hun', 'ter2') in ('hunter2', 'hunter3')",
    ]
    tests = read_tests(
        [*expected, {"call": "add('hun', 'ter2')", "returns": "hunter2"}, {"stdin": "", "stdout": "hunter2"}]
    )
    assert run_tests(ADD, tests) == [True, True, True, False]
    [program] = [setup for setup in sessions if repr(ADD) in setup]
    [judge] = [setup for setup in sessions if repr(ADD) not in setup]
    assert len(sessions[program]) == 3
    assert "hunter2" not in str([program, sessions[program], streams])
    assert "hunter3" in str(sessions[judge])


def test_values_are_rebuilt_as_they_were():
    values = [
        None,
        True,
        1,
        2**70,
        -(3**99),
        0.1,
        -0.0,
        math.inf,
        "a\ud800\0",
        b"\0",
        (1, [2, {3: {4}}]),
        frozenset(),
        range(3),
        2j,
    ]
    assert [
        code_values.decode(json.loads(json.dumps(code_values.encode(value)))) for value in values
    ] == values


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        ["list"],
        ["os.system", ["true"]],
        [["list"], []],
        ["int", "zz"],
        ["int", 5],
        ["set", [["list", []]]],
        ["dict", [[["dict", []], 1]]],
        ["fractions.Fraction", [1, 0]],
        ["fractions.Fraction", [["int", "f" * 100_000], 3]],
        ["decimal.Decimal", ["x"]],
        ["datetime.date", [0, 0, 0]],
        ["set", [["int", hex(number * (2**61 - 1))] for number in range(20_000)]],
    ],
)
def test_what_a_program_writes_in_place_of_a_value_is_a_wrong_answer(data):
    assert not code.is_expected_value(data, read_tests([{"call": "f()", "returns": 5}])[0])
    assert not code.is_expected_value(data, read_tests(["assert f() == 5"])[0])
