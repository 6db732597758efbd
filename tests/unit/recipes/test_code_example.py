"""Parts of examples/code without its runs.

They are tasks, teachers, the tokenizer as a run loads it, the reward, and the commands of the stages.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.code import prepare, reward, run
from examples.code.prepare import Operation, demonstration, make_tasks, program, question, unit_tests
from megarl.cli.main import main
from megarl.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "code"
TASK = (Operation("add", 3), Operation("times", 2), Operation("subtract", 4))


def passes(text: str, task: prepare.Task) -> bool:
    """Run here, as what is run is known."""
    names: dict[str, Callable[[int], int]] = {}
    exec(text, names)
    return all(eval(test["call"], dict(names)) == test["returns"] for test in unit_tests(task))


def test_a_right_program_passes_and_a_slip_never_does() -> None:
    assert question(TASK) == "add 3, times 2, subtract 4"
    assert program(TASK) == "def f(x):\n    return (x + 3) * 2 - 4"
    assert unit_tests(TASK)[0] == {"call": "f(2)", "returns": 6}
    tasks = make_tasks(0)
    chance = random.Random(0)
    assert len(set(tasks)) == prepare.NUM_TASKS
    shown = [(task, demonstration(task, chance)) for task in tasks[:500]]
    assert all(passes(program(task), task) for task, _ in shown)
    right = [passes(text, task) for task, text in shown]
    assert right == [text == program(task) for task, text in shown]
    assert 0.4 < sum(right) / len(right) < 0.6


def test_all_of_it_can_be_written_in_the_tokens_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "NUM_TASKS", 200)
    prepare.prepare(tmp_path, seed=1)

    # The tokenizer has the class that Transformers selects for a Qwen2 model.
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    for task in make_tasks(1):
        for text in (question(task), program(task)):
            ids = tokenizer.encode(text)
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text

    files = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "validation")
    }
    prompts = {name: {row["prompt"] for row in rows} for name, rows in files.items()}
    assert prompts["train"].isdisjoint(prompts["validation"])
    assert [len(rows) for rows in files.values()] == [200 - prepare.NUM_VALIDATION, prepare.NUM_VALIDATION]


def test_the_reward_is_of_programs_that_pass_all_tests() -> None:
    tests = json.dumps(unit_tests(TASK))
    for text, score, share in (
        (program(TASK), 1.0, 1.0),
        ("def f(x):\n    return 6", 0.0, 1 / 3),
        ("def f(x", 0.0, 0.0),
    ):
        assert reward.compute_score("functions", text, tests, {}) == {
            "score": score,
            "tests_passed": pytest.approx(share),
        }


def test_each_stage_is_a_command_and_its_configuration_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = run.stages(["trainer.seed=1", "trainer.total_steps=2"])
    assert [stage[1:3] for stage in stages] == [
        ["examples.code.prepare", "--seed"],
        ["megarl", "train"],
        ["megarl", "train"],
    ]
    assert stages[2][3:] == [
        "examples/code/grpo.yaml",
        "trainer.seed=1",
        "data.seed=1",
        "trainer.seed=1",
        "trainer.total_steps=2",
    ]
    monkeypatch.setattr(prepare, "NUM_TASKS", 200)
    prepare.prepare(tmp_path, seed=0)
    model = f"model.path={tmp_path}/model"
    files = {name: f"[{tmp_path}/{name}.jsonl]" for name in ("train", "validation")}
    given = [
        model,
        f"data.train_files={files['train']}",
        f"data.val_files={files['validation']}",
        f"trainer.output_dir={tmp_path}/run",
    ]
    assert main(["check", str(FOLDER / "grpo.yaml"), *given]) == 0, capsys.readouterr().err
    given = [
        each.replace("/train.jsonl", "/sft_train.jsonl").replace("/validation.jsonl", "/sft_validation.jsonl")
        for each in given
    ]
    assert main(["check", str(FOLDER / "sft.yaml"), *given]) == 0, capsys.readouterr().err
