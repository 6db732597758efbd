"""The reward and the data of the large configurations."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from math_verify import parse, verify

from megarl.config.schema import DataConfig, LossyText
from megarl.data.prompts import PromptDataset
from megarl.recipes.math import equality
from megarl.recipes.math.prepare import convert_gsm8k
from megarl.recipes.math.reward import answer_from_truth, check_truth, compute_score
from megarl.recipes.quickstart.prepare import make_tokenizer
from tests.unit.recipes.math_cases import CASES
from tests.unit.recipes.math_truths import BY_TRUTH, MATH_VERIFY_DIFFERS

REPOSITORY = Path(__file__).parents[3]


def test_answers_are_judged_as_a_mathematician_does() -> None:
    wrong = [
        (response, truth)
        for response, truth, right in CASES
        if compute_score("d", response, truth, {})["score"] != right
    ]
    assert wrong == []


def test_the_table_has_both_kinds() -> None:
    assert len({case[:2] for case in CASES}) == len(CASES) >= 450
    assert sum(right for *_, right in CASES) >= 300
    assert sum(not right for *_, right in CASES) >= 120


def test_truths_accept_their_answers_and_no_others() -> None:
    """A wrong answer that scores 1 is what a policy learns; each table has more of its kind."""
    wrong = [
        (truth, answer, is_right)
        for truth, *answers in BY_TRUTH
        for is_right, each in zip((True, False), answers, strict=True)
        for answer in each
        if compute_score("d", f"\\boxed{{{answer}}}", truth, {})["score"] != is_right
    ]
    assert wrong == []


def test_this_reward_and_math_verify_disagree_where_the_table_says() -> None:
    def by_math_verify(truth: str, answer: str) -> bool:
        left, right = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
        return verify(left, right, timeout_seconds=None, allow_set_relation_comp=True)

    for reason, is_right, pairs in MATH_VERIFY_DIFFERS:
        scores = {pair: compute_score("d", f"\\boxed{{{pair[1]}}}", pair[0], {})["score"] for pair in pairs}
        assert scores == dict.fromkeys(pairs, float(is_right)), reason
        verdicts = {pair: by_math_verify(*pair) for pair in pairs}
        assert verdicts == dict.fromkeys(pairs, not is_right), reason


@pytest.mark.parametrize(
    "truth",
    [
        r"x^2+y^2 \le 4",
        "x^2+y^2 < 4",
        r"a^2 + b^2 \ge 2ab",
        r"1 \le x^2+y^2 < 4",
        r"x^2+y^2 \ne z^2",
        r"\{1,2,\ldots,10\}",
    ],
)
def test_truths_that_data_sets_contain_are_accepted(truth: str) -> None:
    check_truth(truth)
    assert compute_score("d", answer_from_truth(truth), truth, {})["score"] == 1.0
    assert compute_score("d", answer_from_truth(truth.replace("2", "3")), truth, {})["score"] == 0.0


@pytest.mark.parametrize(
    "answers",
    [
        [
            "18",
            "18.0",
            "1.8e1",
            r"\frac{36}{2}",
            r"x = 18",
            r"18\text{ cm}",
            r"\text{The answer is } 18",
            "１８",
        ],
        [r"\frac{1}{3}", "1/3", r"0.\overline{3}", "2/6"],
        [r"\sqrt{2}", r"2^{1/2}", r"\frac{2}{\sqrt{2}}"],
        ["x^2+2x+1", "(x+1)^2", "(1+x)(x+1)", "y = (x+1)^2"],
        ["1, 2", "2, 1", r"\{1, 2\}", r"x=1 \text{ or } x=2", r"\{2, 1, 1\}"],
        ["x+y=5", "2x+2y=10", "y+x-5=0"],
        [r"x^2+y^2 \le 4", r"4 \ge x^2+y^2", r"-4+x^2+y^2 \le 0"],
        ["60, 180", r"180, 60", r"60,180"],
        ["277", "m = 277", r"277\ "],
        ["1/3", r"x = \frac13 = \frac26"],
        [r"x \le 3", r"(-\infty, 3]", r"3 \ge x", r"-3 \le -x"],
        ["(0,2)", r"(0,1]\cup(1,2)", r"(1,2)\cup(0,1]"],
        [r"\emptyset", r"\text{no solution}", "∅"],
        ["(A)", "A", r"\textbf{(A)}"],
        [r"\text{Friday}", "friday"],
    ],
    ids=lambda answers: answers[0],
)
def test_equal_answers_have_one_text(answers: list[str]) -> None:
    """The metric maj@k counts these texts."""
    scored = [compute_score("d", f"\\boxed{{{answer}}}", answers[0].strip("()"), {}) for answer in answers]
    assert len({score["answer"] for score in scored}) == 1, scored
    others = [
        compute_score("d", rf"\boxed{{{answer}}}", "18", {})["answer"]
        for answer in ("17", r"\sqrt{3}", "x", "(1,2)", r"x<3", "B")
    ]
    assert not {score["answer"] for score in scored} & set(others)


def test_different_answers_have_different_texts() -> None:
    answers = [
        "18",
        "-18",
        "1/18",
        r"\sqrt{18}",
        "x",
        "y",
        "x^2",
        "(1,2)",
        "(2,1)",
        "[1,2]",
        "1,2",
        "x<1",
        r"x\le 1",
        "x>1",
        r"50\%",
        "50",
    ]
    assert len({compute_score("d", f"\\boxed{{{answer}}}", "7", {})["answer"] for answer in answers}) == len(
        answers
    )


def test_a_response_without_an_answer_has_none() -> None:
    assert compute_score("d", "<think>18", "18", {}) == {"score": 0.0, "answer": None}


@pytest.mark.parametrize(
    "truth", [None, math.nan, math.inf, True, ["5", "6"], {"a": 1}, "", " ", "nan", "null", "\ud800"]
)
def test_ground_truths_that_no_answer_matches(truth: Any) -> None:
    with pytest.raises(ValueError, match="^the ground truth "):
        check_truth(truth)
    if truth != "\ud800":
        with pytest.raises(ValueError, match="^the ground truth "):
            compute_score("d", "\\boxed{18}", truth, {})


def test_numbers_that_json_reads_are_ground_truths() -> None:
    for truth in (18, 18.0, "18"):
        check_truth(truth)
        assert compute_score("d", "\\boxed{18}", truth, {})["score"] == 1.0


def test_ground_truths_are_right_answers_in_their_own_form() -> None:
    truths = {truth for _, truth, _ in CASES}
    wrong = [
        truth for truth in truths if compute_score("d", answer_from_truth(truth), truth, {})["score"] != 1.0
    ]
    assert wrong == []
    for truth in truths:
        check_truth(truth)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}", "x" * 1999, "1+" * 999 + "1", r"\frac{" * 300, r"\sqrt{" * 300 + "2" + "}" * 300, "2^" * 900 + "2", "x!" * 900,
        "|" * 1900, "1," * 900 + "1", "x=" * 900 + "1", r"\{" * 300 + r"\}" * 300, "a or " * 380 + "b", "is " * 600, "no " * 600,
        "0." + "1" * 1900 + "...", "-" * 1900 + "1", "5000!" * 380, "A long sentence of words, which is " * 50, "1 " * 900,
        r"\sum_{i=1}^{9999}\sum_{j=1}^{9999} ij", r"\prod_{k=1}^{9999}(k!)", r"\tan 7^{7^7}", "(10^{10})!", r"\int \frac{1}{x^5+x+1} dx",
        r"\(" * 20_000, r"\boxed{" * 9000,
        "x^" * 900 + "x", r"\sin" * 400 + " x", "x_1" * 600, "|x" * 600 + "|", r"\frac12" * 250,
        "x + " * 400 + "x'", "x * - " * 300 + "x'", "1A" * 900,
        "x" + " " * 1900 + "y", "x" + "~" * 1900 + "y", r"\{" * 250 + "1, " * 300 + r"\}" * 250,
    ],
    ids=range(37),
)  # fmt: skip
def test_slow_answers_are_wrong_in_little_time(answer: str) -> None:
    """Without a limit some of these would take hours of the processor."""
    before = time.process_time()
    for response in (f"\\boxed{{{answer}}}", answer):
        assert compute_score("d", response, "18", {})["score"] == 0.0
    assert time.process_time() - before < 20


def test_a_comparison_by_math_verify_that_takes_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*given: Any, **named: Any) -> bool:
        while True:
            with contextlib.suppress(Exception):  # as sympy does
                math.factorial(100)

    monkeypatch.setattr(equality, "LIMIT_S", 0.05)
    monkeypatch.setattr(equality, "verify", endless)
    matrix = r"\begin{pmatrix}1\\2\end{pmatrix}"
    assert compute_score("d", f"\\boxed{{{matrix}}}", matrix.replace("1", "3"), {})["score"] == 0.0
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def gsm8k(file: Path, *answers: str) -> Path:
    rows = [{"question": f"How many, {number}?", "answer": answer} for number, answer in enumerate(answers)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def test_gsm8k_becomes_the_data_of_a_run(tmp_path: Path) -> None:
    source = gsm8k(tmp_path / "source.parquet", "Two and two.\n#### 4", "Many.\n#### 1,200")
    command = [
        sys.executable,
        "-m",
        "megarl.recipes.math.prepare",
        "gsm8k",
        "--train",
        str(source),
        str(source),
        "--test",
        str(source),
    ]
    subprocess.run(
        [*command, "--output-dir", str(tmp_path / "data")], cwd=REPOSITORY, check=True, capture_output=True
    )
    rows = pyarrow.parquet.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["4", "1200", "4", "1200"]
    assert rows[2]["extra_info"] == {"split": "train", "index": 2}
    assert rows[0]["prompt"][0]["content"].startswith("How many, 0? Think step by step")
    assert (
        len(
            PromptDataset(
                [str(tmp_path / "data" / "test.parquet")], make_tokenizer(), DataConfig(lossy=LossyText.allow)
            )
        )
        == 2
    )


def test_an_answer_without_its_last_line_is_an_error(tmp_path: Path) -> None:
    source = gsm8k(tmp_path / "source.parquet", "Two and two.\n#### 4", "Many.")
    with pytest.raises(ValueError, match="row 1 of test: the answer has no line '#### NUMBER': 'Many.'"):
        convert_gsm8k([str(source)], "test", tmp_path / "made.parquet")


def test_every_problem_is_kept_once(tmp_path: Path) -> None:
    """The file is like the published DAPO-Math-17k: it has an additional column and repeated rows."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Problem {number % 3}"}],
            "data_source": "math_dapo",
            "ability": "MATH",
            "reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": str(number % 3)},
            "extra_info": {"index": f"row {number}"},
        }
        for number in range(7)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "source.parquet")
    command = [
        sys.executable,
        "-m",
        "megarl.recipes.math.prepare",
        "dapo-math",
        "--files",
        str(tmp_path / "source.parquet"),
    ]
    ended = subprocess.run(
        [*command, "--output-dir", str(tmp_path)], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    assert "train.parquet: 3 rows" in ended.stdout
    made = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert made == [{name: value for name, value in row.items() if name != "ability"} for row in rows[:3]]
    assert (
        len(
            PromptDataset(
                [str(tmp_path / "train.parquet")], make_tokenizer(), DataConfig(lossy=LossyText.allow)
            )
        )
        == 3
    )
