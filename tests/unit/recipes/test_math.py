"""The reward and the data of the large configurations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megarl.config.schema import DataConfig, LossyText
from megarl.data.prompts import PromptDataset
from megarl.recipes.math.prepare import convert_gsm8k
from megarl.recipes.math.reward import compute_score
from megarl.recipes.quickstart.prepare import make_tokenizer

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("so it is \\boxed{18}", "18", 1.0),
        ("the answer is 18.", "18", 1.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{1,000}", "1000", 1.0),
        ("first \\boxed{5} but then \\boxed{6}", "6", 1.0),
        ("\\boxed{17}", "18", 0.0),
        ("I do not know", "18", 0.0),
    ],
)
def test_an_answer_is_right_or_wrong(solution: str, truth: str, score: float) -> None:
    assert compute_score("gsm8k", solution, truth, {}) == score


def test_a_ground_truth_that_is_no_mathematics_is_an_error() -> None:
    with pytest.raises(ValueError, match="the ground truth '' is no mathematical expression"):
        compute_score("gsm8k", "\\boxed{1}", "", {})


def gsm8k(file: Path, *answers: str) -> Path:
    rows = [{"question": f"How many, {number}?", "answer": answer} for number, answer in enumerate(answers)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def test_gsm8k_becomes_the_data_of_a_run(tmp_path: Path) -> None:
    source = gsm8k(tmp_path / "source.parquet", "Two and two.\n#### 4", "Many.\n#### 1,200")
    command = [sys.executable, "-m", "megarl.recipes.math.prepare", "gsm8k", "--train", str(source), str(source), "--test", str(source)]
    subprocess.run([*command, "--output-dir", str(tmp_path / "data")], cwd=REPOSITORY, check=True, capture_output=True)
    rows = pyarrow.parquet.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["4", "1200", "4", "1200"]
    assert rows[2]["extra_info"] == {"split": "train", "index": 2}
    assert rows[0]["prompt"][0]["content"].startswith("How many, 0? Think step by step")
    assert len(PromptDataset([str(tmp_path / "data" / "test.parquet")], make_tokenizer(), DataConfig(lossy=LossyText.allow))) == 2


def test_an_answer_without_its_last_line_is_an_error(tmp_path: Path) -> None:
    source = gsm8k(tmp_path / "source.parquet", "Two and two.\n#### 4", "Many.")
    with pytest.raises(ValueError, match="row 1 of test: the answer has no line '#### NUMBER': 'Many.'"):
        convert_gsm8k([str(source)], "test", tmp_path / "made.parquet")


def test_every_problem_is_kept_once(tmp_path: Path) -> None:
    """As DAPO-Math-17k is published: with a column more, and repeated."""
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
    command = [sys.executable, "-m", "megarl.recipes.math.prepare", "dapo-math", "--files", str(tmp_path / "source.parquet")]
    ended = subprocess.run([*command, "--output-dir", str(tmp_path)], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert "train.parquet: 3 rows" in ended.stdout
    made = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert made == [{name: value for name, value in row.items() if name != "ability"} for row in rows[:3]]
    assert len(PromptDataset([str(tmp_path / "train.parquet")], make_tokenizer(), DataConfig(lossy=LossyText.allow))) == 3
