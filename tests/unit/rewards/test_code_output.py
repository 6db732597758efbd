"""Test when a program's output is the expected one."""

from __future__ import annotations

import time

import pytest

from megarl.rewards import code
from megarl.rewards.code import same_output
from megarl.rewards.code_values import same_as_json


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("0.333333", "0.333333333333", True),
        ("0.33333", "0.333333333333", False),
        ("2.50", "2.5", True),
        ("5.0", "5", True),
        ("5", "5.0", True),
        ("5.0000001", "5", False),  # an integer is exact
        ("5", "5.0000001", True),
        ("1000001", "1000000", False),
        ("1000001", "1000000.0", True),  # relative
        ("1000002", "1000000.0", False),
        ("0.0000009", "0.0", True),  # absolute
        ("-0.0", "0.0", True),
        ("-0.5", "0.5", False),
        ("1e-7", "0.0", True),
        ("5e-1", "0.5", True),
        ("0101", "101", False),
        ("2020-1-5", "2020-01-05", False),
        ("1.2.30", "1.2.3", False),
        ("v2.50", "v2.5", False),
        ("It is 2.50.", "It is 2.5.", False),  # the end of a sentence is no number
        ("[0.3333333, 'a', (2.50)]", "[0.33333333, 'a', (2.5)]", True),
        ("[0.3333333, 'b', (2.50)]", "[0.33333333, 'a', (2.5)]", False),
        ("x = 2.50, y=1", "x = 2.5, y=1", True),
        ("0.5 0.5", "0.5", False),
        ("0.5  1", "0.5 1", False),
        ("0.5\n0.25", "0.50\n0.250", True),
        ("\n\n  \na\nb \n\n", "a\nb", True),
        ("a\n\nb", "a\nb", False),
        ("  a", "a", False),
        ("a", "\n\na\n", True),
        ("", "\n \n", True),
        ("nan", "nan", True),
        ("nan", "0.5", False),
        ("inf", "1e400", False),
        ("1e400", "1e400", True),
        ("1e401", "1e400", False),
        ("1e9999", "0.5", False),
        ("1e99999", "1.0", False),
        ("1_0.0", "10.0", False),
        ("٢.٥", "2.5", False),
        ("1" + "0" * 5000 + ".0", "1" + "0" * 5000, True),
        ("1" + "0" * 4999 + "1", "1" + "0" * 5000, False),
    ],
)
def test_numbers_are_compared_by_their_values(printed: str, expected: str, is_same: bool) -> None:
    assert same_output(printed, expected, 1e-6) == is_same


def test_the_tolerance_is_an_argument() -> None:
    assert same_output("0.51", "0.5", 0.1)
    assert not same_output("0.3333333", "0.33333333", 0.0)
    assert same_output("2.50", "2.5", 0.0)
    assert same_as_json([0.31], (0.3,), 0.1)
    assert not same_as_json(0.1 + 0.2, 0.3)

    program = "```python\nprint(0.51)\ndef f(): return 0.51\n```"
    tests = [{"stdin": "", "stdout": "0.5"}, {"call": "f()", "returns": 0.5}, "assert f() == 0.5"]
    assert code.compute_score("", program, tests, {})["score"] == 0
    assert code.compute_score("", program, tests, {}, tolerance=0.1)["score"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "text",
    [
        "1" * 2_000_000,
        "1." * 1_000_000,
        "-" * 2_000_000,
        "1e" * 1_000_000,
        "1.5 " * 500_000,
        "[" * 2_000_000,
        "\n" * 2_000_000,
        "0." + "3" * 2_000_000,
    ],
)
def test_long_outputs_take_linear_time(text: str) -> None:
    """Each takes about a second at most; time that grows with the square would be hours."""
    start_s = time.process_time()
    assert not same_output(f"{text}x", f"{text}y", 1e-6)
    same_output(f"{text}1", f"{text}1.0", 1e-6)
    assert time.process_time() - start_s < 60
