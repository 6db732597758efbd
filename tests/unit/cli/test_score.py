"""`megarl eval --rows`: what a run would give a file of responses, and where it would end."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.cli.main import main
from tests.failure_pages import check_documented

FUNCTION = """def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth) * extra_info["weight"]
"""
ROWS = [
    {"data_source": "sums", "response": "5", "ground_truth": "5", "extra_info": {"weight": 1.0}},
    {"data_source": "sums", "response": "7", "ground_truth": "6", "extra_info": {"weight": 1.0}},
    {"data_source": "sums", "response": "9", "ground_truth": "9", "extra_info": {}},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_reward.py").write_text(FUNCTION)
    path = tmp_path / "my_reward.py"
    others = "model: {path: not/read}\ndata: {train_files: [not/read.parquet]}\n"
    (tmp_path / "run.yaml").write_text(
        f"{others}reward:\n  functions: [{{path: {path}}}]\n  num_processes: 1\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    return tmp_path


def score(folder: Path, *arguments: str) -> int:
    return main(["eval", str(folder / "run.yaml"), "--rows", *arguments])


def test_an_error_is_no_score_and_the_status_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(folder, str(folder / "rows.jsonl")) == 1
    said = capsys.readouterr().out
    assert "2 rows scored: mean 0.5, min 0, max 1" in said
    assert "sample 2 (uid 2): compute_score raised KeyError: 'weight' (my_reward.py:2)" in said
    check_documented("reward-error", said)
    assert score(folder, str(folder / "rows.jsonl"), "reward.max_error_rate=0.5") == 0


def test_the_numbers_of_functions_are_printed_like_metrics(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def function(name: str, body: str) -> str:
        arguments = "data_source, solution_str, ground_truth, extra_info"
        (folder / f"{name}.py").write_text(f"def compute_score({arguments}):\n    {body}\n")
        return f"{{path: {folder / name}.py}}"

    one = function("right", "return {'score': 1.0, 'length': len(solution_str)}")
    two = function("form", "return None if solution_str == '5' else 0.5")
    rows = [
        {"data_source": "d", "ground_truth": "5", "response": text, "extra_info": {}} for text in ("5", "six")
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert score(folder, str(folder / "rows.jsonl"), f"reward.functions=[{one}, {two}]") == 0
    said = capsys.readouterr().out
    assert "reward/form.compute_score/mean: 0.5 (1 row)" in said
    assert "reward/right.compute_score/mean: 1\n" in said
    assert "reward/right.compute_score/length/mean: 2\n" in said


def test_rows_say_whether_their_prompt_opened_the_thinking(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_reward.py").write_text(
        "from megarl.rewards.thinking import outside_thinking\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(outside_thinking(solution_str) == ground_truth)\n"
    )
    row = {"data_source": "sums", "response": "so</think>5", "ground_truth": "5"}
    rows = [row, row | {"opens_thinking": True}, row | {"opens_thinking": False}]
    rows += [
        row | {"prompt": "<user>5?<think>\n"},
        row | {"prompt": [{"role": "user", "content": "<think>"}]},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert score(folder, str(folder / "rows.jsonl")) == 0
    said = capsys.readouterr().out
    for index, value in enumerate((0, 1, 0, 1, 0)):
        assert f"row {index} (uid {index}): {value} " in said

    (folder / "rows.jsonl").write_text(json.dumps(row | {"opens_thinking": "no"}) + "\n")
    assert score(folder, str(folder / "rows.jsonl")) == 2
    assert "column 'opens_thinking': found str 'no', expected bool" in capsys.readouterr().err


def test_training_data_are_scored_by_their_ground_truth(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ground truth scores like a correct response. Other data need a response."""
    rows = [{"data_source": "sums", "reward_model": {"ground_truth": "5"}, "extra_info": {"weight": 0.5}}] * 2
    pq.write_table(pa.Table.from_pylist(rows), path := folder / "train.parquet")
    assert score(folder, str(path), "--ground-truth") == 0
    assert "2 rows scored: mean 0.5" in capsys.readouterr().out
    assert score(folder, str(path)) == 2
    assert "train.parquet, row 0, column 'response': is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: is not JSON"),
        ("3", "line 1: is int, expected an object"),
        ('{"response": "5", "ground_truth": "5"}', "column 'data_source': is missing"),
        ('{"response": "5", "data_source": "sums"}', "column 'ground_truth': is missing"),
        (
            '{"response": 5, "data_source": "sums", "ground_truth": 5}',
            "column 'response': found int 5, expected str",
        ),
    ],
)
def test_rows_that_cannot_be_scored_are_named(
    folder: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rows.jsonl").write_text(line + "\n")
    assert score(folder, str(folder / "rows.jsonl")) == 2
    assert said in capsys.readouterr().err


def test_a_judge_that_a_run_serves_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge = "reward.judges=[{name: own, path: folder, prompt: p.jinja, parse: {json: score}}]"
    assert score(folder, str(folder / "rows.jsonl"), judge) == 2
    assert "a run serves the models of own, and this command starts no servers" in capsys.readouterr().err
