"""`megarl init`: what it writes is good as it is, and nothing is written over."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from megarl.cli.main import main
from megarl.cli.run.init import USES
from megarl.config.load import load_config
from megarl.config.schema import AdvantageEstimator, PPOConfig
from tests.integration.tiny_run import save_policy
from tests.unit.agents.calling_model import save_calling_model

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_policy(folder := tmp_path_factory.mktemp("init") / "policy")
    return folder


@pytest.fixture(autouse=True)
def _nobody_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)


@pytest.mark.parametrize(
    "wishes",
    [["--algorithm", "grpo"], ["--algorithm", "ppo", "--devices", "2"], ["--kind", "sft"]],
    ids=" ".join,
)
def test_what_it_writes_passes_check_from_any_folder(
    wishes: list[str],
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(policy.parent)
    mine = tmp_path / "mine"
    assert main(["init", str(mine), "--model", "policy", "--device", "cpu", *wishes]) == 0
    said = capsys.readouterr().out
    assert f"megarl check {mine / 'run.yaml'}" in said
    monkeypatch.chdir(mine)
    assert main(["check", "run.yaml"]) == 0, capsys.readouterr().err

    if "sft" not in wishes:
        tested = subprocess.run(
            [sys.executable, "-I", str(mine / "reward.py")], capture_output=True, text=True, check=False
        )
        assert (tested.returncode, tested.stderr) == (0, "")
        config = load_config(PPOConfig, "run.yaml")
        assert config.algorithm.advantage.estimator is (
            AdvantageEstimator.gae if "ppo" in wishes else AdvantageEstimator.grpo
        )
        assert (
            config.rollout.num_replicas
            == config.actor.parallel.data_parallel_size
            == (2 if "--devices" in wishes else 1)
        )

    first, rest = (mine / "run.yaml").read_text().split("\n", 1)
    schema = json.loads((mine / first.removeprefix("# yaml-language-server: $schema=")).read_text())
    Draft202012Validator(schema).validate(yaml.safe_load(rest))  # as an editor does
    before = {file: file.read_bytes() for file in mine.iterdir() if file.is_file()}
    capsys.readouterr()
    assert main(["init", ".", "--model", str(policy), *wishes]) == 2
    assert "run.yaml" in (refused := capsys.readouterr().err)
    assert "would be overwritten" in refused
    assert {file: file.read_bytes() for file in mine.iterdir() if file.is_file()} == before


# The options of each kind; the model of an agent has a chat template that shows tools.
OPTIONS: dict[str, tuple[str, ...]] = {
    "ppo": (),
    "sft": (),
    "dpo": (),
    "reward_model": (),
    "distillation": ("--teacher", "policy"),
    "agent": (),
    # The name of a model on OpenRouter has characters that YAML reserves.
    "judge": ("--judge-url", "http://localhost:30000/v1", "--judge-model", "@preset/grader #1"),
}


def check_warnings(said: str, kind: str) -> None:
    """The server of a judge does not run here, and nothing else is doubtful."""
    expected = ["reward.judges[0].url: no server answers at"] if kind == "judge" else []
    warnings = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert [line.removeprefix("warning: ").partition(" http")[0] for line in warnings] == expected


def test_a_model_without_tools_is_refused_for_an_agent(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    assert main(["init", str(mine), "--model", str(policy), "--device", "cpu", "--kind", "agent"]) == 2
    error = capsys.readouterr().err
    assert f"--model {policy}: the chat template leaves out 'add'" in error
    assert "such as Qwen/Qwen3-0.6B, or of the tiny model that `make quickstart TASK=agent` makes" in error
    assert not mine.exists()


@pytest.mark.parametrize("kind", ["dpo", "reward_model", "distillation", "agent", "judge"])
def test_each_kind_passes_check_with_generated_data(
    kind: str,
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(policy.parent)
    if kind == "agent":
        save_calling_model(policy.parent / "calling")
    model = "calling" if kind == "agent" else "policy"
    mine = tmp_path / "mine"
    given = ["--model", model, "--device", "cpu", "--kind", kind, *OPTIONS[kind]]
    assert main(["init", str(mine), *given]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert main(["check", str(mine / "run.yaml")]) == 0, capsys.readouterr().err
    check_warnings(capsys.readouterr().out, kind)

    values = yaml.safe_load((mine / "run.yaml").read_text())
    assert values["kind"] == (kind if kind in ("dpo", "reward_model") else "ppo")
    schema = json.loads((mine / "megarl.schema.json").read_text())
    Draft202012Validator(schema).validate(values)
    for file in mine.glob("*.py"):
        if file.name != "make_data.py":
            assert f"python {file}" in said
            tested = subprocess.run([sys.executable, "-I", str(file)], capture_output=True, check=False)
            assert (tested.returncode, tested.stderr) == (0, b"")


@pytest.mark.parametrize("kind", USES)
def test_files_without_the_columns_of_a_kind_are_refused(
    kind: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"id": 1, "ticket": "1+1="}\n')
    given = ["--model", str(policy), "--data", str(data), "--kind", kind, *OPTIONS[kind]]
    assert main(["init", str(tmp_path / "mine"), *given]) == 2
    refused = capsys.readouterr().err
    assert f"{data} has the columns id, ticket, but --kind {kind} needs the " in refused
    assert ("better answer in one of chosen, preferred, " in refused) == (kind in ("dpo", "reward_model"))
    assert ("the answer in one of " in refused) == (kind in ("ppo", "sft", "agent"))
    assert "name yours, such as data.columns." in refused
    assert not (tmp_path / "mine").exists()


# Rows whose columns have names of their own, and the arguments that name them.
NAMED_COLUMNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ppo": (
        {"ticket": "{n}+1=", "category": "{more}", "facts": {"n": 1}},
        ["data.columns.prompt=ticket", "data.columns.ground_truth=category", "data.columns.extra_info=facts"],
    ),
    "sft": (
        {"dialog": [{"role": "user", "content": "{n}+1="}, {"role": "assistant", "content": "{more}"}]},
        ["data.columns.messages=dialog"],
    ),
    "dpo": (
        {"ticket": "{n}+1=", "liked": "{more}", "disliked": "{n}"},
        ["data.columns.prompt=ticket", "data.columns.chosen=liked", "data.columns.rejected=disliked"],
    ),
}


@pytest.mark.parametrize("kind", NAMED_COLUMNS)
@pytest.mark.parametrize("num_rows", [9, 40])
def test_columns_with_other_names_are_named_on_the_command_line(
    kind: str, num_rows: int, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, named = NAMED_COLUMNS[kind]
    data = tmp_path / "rows.jsonl"
    text = json.dumps(row)
    lines = [text.replace("{n}", str(n)).replace("{more}", str(n + 1)) for n in range(num_rows)]
    data.write_text("\n".join(lines) + "\n")
    given = ["--model", str(policy), "--data", str(data), "--kind", kind, "--device", "cpu"]
    mine = tmp_path / "mine"
    assert main(["init", str(mine), *named, *given]) == 0, capsys.readouterr().err

    columns = yaml.safe_load((mine / "run.yaml").read_text())["data"]["columns"]
    assert {f"data.columns.{key}={name}" for key, name in columns.items() if name} == set(named)
    held_out = mine / "validation.jsonl"
    assert held_out.exists() == (num_rows == 40)
    if num_rows == 40:
        assert row.keys() <= json.loads(held_out.read_text().splitlines()[0]).keys()
    assert main(["check", str(mine / "run.yaml")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("data.columns.prompt=inquiry", "has no column 'inquiry' (data.columns.prompt), only id, ticket"),
        ("data.columns.prompt=", "data.columns.prompt=: only the columns of --data are set here"),
        ("data.columns.chosen=ticket", "this kind of run data.columns.prompt=COLUMN, data.columns.ground_t"),
        ("rollout.n=4", "rollout.n=4: only the columns of --data are set here"),
    ],
)
def test_other_columns_and_keys_are_refused(
    named: str, problem: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"id": 1, "ticket": "1+1="}\n')
    given = ["--model", str(policy), "--data", str(data)]
    assert main(["init", str(tmp_path / "mine"), *given, named]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("kind", ["judge", "distillation", "ppo"])
def test_rows_without_answers_are_taken_where_nothing_needs_them(
    kind: str,
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(policy.parent)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}+1="}) + "\n" for n in range(40)))
    given = ["--model", "policy", "--data", str(data), "--kind", kind, "--device", "cpu", *OPTIONS[kind]]
    mine = tmp_path / "mine"
    # A run of the kind ppo has its own reward, so the user must say that there are no answers.
    if kind == "ppo":
        assert main(["init", str(mine), *given]) == 2
        assert "data.columns.reward_model=null if the rows have no answers" in capsys.readouterr().err
        given.append("data.columns.reward_model=null")
    assert main(["init", str(mine), *given]) == 0, capsys.readouterr().err

    # What the user has said is no defect, and a reward model needs no function.
    said = capsys.readouterr().out
    assert "warning" not in said
    command = f"megarl train {mine / 'run.yaml'} 'reward.functions=[]' reward.model.path=FOLDER"
    assert (command in said) == ("reward: yours, because the rows have no answers" in said) == (kind == "ppo")
    config = load_config(PPOConfig, str(mine / "run.yaml"))
    assert config.data.columns.reward_model is None
    assert (
        bool(config.data.val_files) == bool(config.trainer.validate_every_steps) == (kind != "distillation")
    )
    assert (mine / "reward.py").exists() == (kind == "ppo")
    capsys.readouterr()
    if kind != "ppo":
        assert main(["check", str(mine / "run.yaml")]) == 0, capsys.readouterr().err
        check_warnings(capsys.readouterr().out, kind)

    # A function that reads the answers is refused before the run.
    reward = tmp_path / "reads.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(solution_str == ground_truth)\n"
    )
    capsys.readouterr()
    assert main(["check", str(mine / "run.yaml"), f"reward.functions=[{{path: {reward}}}]"]) == 2
    assert "it is null, and " in capsys.readouterr().err


def test_paths_are_quoted_where_yaml_needs_it(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model #1: mine"
    model.symlink_to(policy)
    data, validation = tmp_path / "a, b.jsonl", tmp_path / "[c] #2.jsonl"
    for file in (data, validation):
        file.write_text('{"question": "1+1=", "answer": "2"}\n')
    given = ["--model", str(model), "--data", str(data), "--val", str(validation), "--device", "cpu"]
    assert main(["init", str(tmp_path / "mine"), *given]) == 0, capsys.readouterr().err
    values = yaml.safe_load((tmp_path / "mine" / "run.yaml").read_text())
    assert values["model"]["path"] == str(model)
    assert (values["data"]["train_files"], values["data"]["val_files"]) == ([str(data)], [str(validation)])


CHATS = [[{"role": "user", "content": f"{n}+1="}] for n in range(20)]


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (
            [{"instruction": f"{n}+1=", "preferred": str(n + 1), "dispreferred": str(n)} for n in range(20)],
            {"prompt": "instruction", "chosen": "preferred", "rejected": "dispreferred"},
        ),
        (
            [
                {
                    "chosen": [*chat, {"role": "assistant", "content": str(answer)}],
                    "rejected": [*chat, {"role": "assistant", "content": "0"}],
                }
                for chat in CHATS
                for answer in (1, 2)
            ],
            None,
        ),
    ],
    ids=["other names", "whole chats"],
)
def test_pairs_are_found_and_held_out_by_their_prompts(
    rows: list[dict[str, Any]],
    columns: dict[str, str] | None,
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = written(tmp_path, policy, rows, "--kind", "dpo")
    count = len(rows) // 20
    assert f"{2 * count} of the {20 * count} rows are held out" in capsys.readouterr().out
    assert yaml.safe_load((mine / "run.yaml").read_text())["data"].get("columns") == columns
    assert main(["check", str(mine / "run.yaml")]) == 0, capsys.readouterr().err

    train, held_out = (
        {str(row.get("instruction", row.get("chosen", [])[:1])) for row in map(json.loads, lines)}
        for lines in ((mine / name).read_text().splitlines() for name in ("train.jsonl", "validation.jsonl"))
    )
    assert not train & held_out


def test_options_of_other_kinds_are_refused_and_those_of_a_kind_required(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["init", str(tmp_path / "mine"), "--model", str(policy), "--device", "cpu"]
    assert main([*given, "--teacher", str(policy)]) == 2
    assert "--kind ppo does not use --teacher" in capsys.readouterr().err
    assert main([*given, "--kind", "distillation"]) == 2
    assert "--teacher is required" in capsys.readouterr().err
    assert main([*given, "--kind", "judge", "--judge-url", "http://localhost:30000/v1"]) == 2
    assert "--judge-model is required" in capsys.readouterr().err


def test_data_of_ones_own_are_named_with_their_columns(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text(
        "".join(json.dumps({"id": n, "problem": f"{n}+1=", "solution": str(n + 1)}) + "\n" for n in range(9))
    )
    given = ["--model", str(policy), "--data", str(data), "--device", "cpu"]
    assert main(["init", str(tmp_path / "mine"), *given]) == 0
    said = capsys.readouterr().out
    assert "tested: 9 of 9 answers score 1 as a response, empty responses score 0" in said
    assert (
        f"validation: none, because {data} has fewer than 20 questions; give held-out rows with --val, or "
        f"set data.val_files" in said
    )
    assert sorted(file.name for file in (tmp_path / "mine").iterdir()) == [
        "megarl.schema.json",
        "reward.py",
        "run.yaml",
    ]
    config = load_config(PPOConfig, str(tmp_path / "mine" / "run.yaml"))
    assert (config.data.val_files, config.trainer.validate_every_steps, config.trainer.validate_before) == (
        [],
        0,
        False,
    )
    assert (
        config.data.columns.prompt,
        config.data.columns.ground_truth,
        config.trainer.prompts_per_step,
    ) == ("problem", "solution", 9)
    assert main(["check", str(tmp_path / "mine" / "run.yaml")]) == 0, capsys.readouterr().err
    data.write_text('{"id": 1, "text": "a"}\n')
    assert main(["init", str(tmp_path / "other"), *given]) == 2
    assert (
        f"{data} has the columns id, text, but --kind ppo needs the question in one of question, prompt, "
        in capsys.readouterr().err
    )
    assert not (tmp_path / "other").exists()


def test_a_terminal_is_asked_and_others_are_told(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "mine")]) == 2
    assert "--model is required" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "mine"), "--model", str(policy), "--algorithm", "pppo"]) == 2
    assert "algorithm=pppo: there is no such preset; available: async_dapo, " in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

    # a model there must be; and what to do is a choice
    answers = iter(["", str(policy), "", "reinforcement", "", "rloo", "cpu", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main(["init", str(tmp_path / "mine")]) == 0
    config = load_config(PPOConfig, str(tmp_path / "mine" / "run.yaml"))
    assert (config.algorithm.advantage.estimator, config.device.value) == (AdvantageEstimator.rloo, "cpu")
    assert list(answers) == []


def written(folder: Path, policy: Path, rows: Sequence[dict[str, Any]], *more: str) -> Path:
    """Return the folder that `megarl init` writes for a file of these rows."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        main(
            [
                "init",
                str(folder / "mine"),
                "--model",
                str(policy),
                "--data",
                str(data),
                "--device",
                "cpu",
                *more,
            ]
        )
        == 0
    )

    return folder / "mine"


def scores(folder: Path, *pairs: tuple[str, Any]) -> list[float]:
    """Return what the written reward gives to responses, each with its ground truth."""
    compute_score = runpy.run_path(str(folder / "reward.py"))["compute_score"]
    return [compute_score("rows", response, truth, {})["score"] for response, truth in pairs]


def gsm8k(total: int) -> str:
    return f"They have {total - 3}+3=<<{total - 3}+3={total}>>{total} apples.\n#### {total:,}"


ADD = "```python\ndef add_{n}(x):\n    return x + {n}\n```"
# answers, what is said, right and wrong ones
KINDS: dict[str, tuple[list[Any], str, list[tuple[str, Any]], list[tuple[str, Any]]]] = {
    "gsm8k": (
        [gsm8k(total) for total in range(985, 1010)],
        "the answers are numbers",
        [("998 + 3 makes $1,001.00", gsm8k(1001)), ("<think>7</think> 1001", gsm8k(1001))],
        [("1001 or 1002", gsm8k(1001)), ("<think>1001", gsm8k(1001)), ("1e4", gsm8k(1001))],
    ),
    "numbers": (
        [*(f"-${n}.5" for n in range(21)), 7, 9007199254740993],
        "the answers are numbers",
        [
            ("so x = -3.50", "-$3.5"),
            ("10-5", 5),
            ("1" * 20000 + ".1.1, so .5e1", 5),
            ("\u22127", "-7"),
            ("9007199254740993", 9007199254740993),
        ],
        [("so x = 3.5", "-$3.5"), ("9007199254740992", 9007199254740993), ("", 7)],
    ),
    "mathematics": (
        [*(f"\\frac{{{n}}}{{7}}" for n in range(1, 21)), "x^2+2x+1", "[0,1)", "3"],
        "the answers are mathematical expressions",
        [("\\boxed{6/14}", "\\frac{3}{7}"), ("\\boxed{(x+1)^2}", "x^2+2x+1")],
        [("\\boxed{\\frac{4}{7}}", "\\frac{3}{7}"), ("I do not know", "3")],
    ),
    "letters": (
        ["B", "(C)", "A.", *"BACBBCAABCABCABCAC"],
        "the answers are choices",
        [
            ("B", "B"),
            ("B) a dog", "B"),
            ("A dog is no fish.\nAnswer: **C**", "(C)"),
            ("not A, so the answer is (B). A dog", "B"),
            ("(b)", "B"),
            ("a bat is b", "B"),
            ("The correct option is C: A is no", "C"),
        ],
        [("A", "B"), ("The answer is C", "B"), ("a cat", "A"), ("The answer is a dog", "A"), ("", "A")],
    ),
    "labels": (
        ["entailment", "not entailment", "Neutral", "neutral"] * 6,
        "the answers are choices",
        [
            ("It is Not Entailment.", "not entailment"),
            ("entailment: it is not neutral", "entailment"),
            ("NEUTRAL", "Neutral"),
        ],
        [("not entailment", "entailment"), ("entailment", "not entailment"), ("perhaps", "neutral")],
    ),
    "words": (
        ["beg", "C++", "1984-06-08", "It's -5 \u00b0C", *(f"Bront\u00eb {n}" for n in range(20))],
        "the answers are free texts",
        [("Beg.", "beg"), ("I think the answer is: Bronte\u0308  3", "Bront\u00eb 3"), ("C++", "C++")],
        [("C", "C++"), ("5 \u00b0C", "It's -5 \u00b0C"), ("beg or bed", "beg"), ("1970", "1984-06-08")],
    ),
    "asserts": (
        [[f"assert add_{n}(1) == {n + 1}", f"assert add_{n}(2) == {n + 2}"] for n in range(21)],
        "the answers are tests of programs",
        [(ADD.format(n=3), ["assert add_3(1) == 4"])],
        [(ADD.format(n=3), ["assert add_3(1) == 5"]), ("", ["assert add_3(1) == 4"])],
    ),
    "one text of asserts": (
        [
            f"import math\nassert math.isclose(add_{n}(1), {n + 1})\nassert add_{n}(2) == {n + 2}"
            for n in range(21)
        ],
        "the answers are tests of programs",
        [(ADD.format(n=3), "assert add_3(1) == 4\nassert add_3(2) == 5")],
        [(ADD.format(n=3), "assert add_3(1) == 4\nassert add_3(2) == 6")],
    ),
    "what is printed": (
        [json.dumps([{"stdin": str(n), "stdout": str(2 * n)}]) for n in range(21)],
        "the answers are tests of programs",
        [("print(2 * int(input()))", '[{"stdin": "4", "stdout": "8"}]')],
        [("print(8)", '[{"stdin": "5", "stdout": "10"}]')],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_reward_fits_the_answers(
    kind: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, said, right, wrong = KINDS[kind]
    mine = written(
        tmp_path, policy, [{"question": f"{n}+0=", "answer": answer} for n, answer in enumerate(answers)]
    )
    printed = capsys.readouterr()
    assert f"reward: {said}, so " in printed.out
    passed = "are executable tests" if "tests" in said else "score 1 as a response"
    assert f"tested: {len(answers)} of {len(answers)} answers {passed}, " in printed.out
    assert ("warning" in printed.out, printed.err) == (False, "")
    assert scores(mine, *right) == [1.0] * len(right)
    assert scores(mine, *wrong) == [0.0] * len(wrong)
    tested = subprocess.run(
        [sys.executable, "-I", str(mine / "reward.py")], capture_output=True, text=True, check=False
    )
    assert (tested.returncode, tested.stderr) == (0, "")


def test_questions_are_held_out_for_validation(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 questions, each of which is asked twice."""
    rows = [
        {"prompt": f"{n}+1=", "answer": n + 1, "extra_info": {"index": n}, "note": "x"} for n in range(40)
    ] * 2
    mine = written(tmp_path, policy, rows)
    assert (
        "validation: 8 of the 80 rows are held out in validation.jsonl; train.jsonl has none of their "
        "questions" in capsys.readouterr().out
    )
    train, held_out = (
        [json.loads(line) for line in (mine / name).read_text().splitlines()]
        for name in ("train.jsonl", "validation.jsonl")
    )
    assert (len(train), len(held_out)) == (72, 8)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert {"prompt": "0+1=", "answer": 1, "extra_info": {"index": 0}, "data_source": "rows"} in [
        *train,
        *held_out,
    ]
    config = load_config(PPOConfig, str(mine / "run.yaml"))
    assert (config.data.columns.ground_truth, config.data.columns.data_source) == ("answer", "data_source")
    assert (config.trainer.validate_every_steps, config.trainer.validate_before) == (10, True)

    # The run is found from any folder, and moves with its files.
    for here, file in ((tmp_path, "mine/run.yaml"), (mine, "run.yaml"), (Path("/"), str(mine / "run.yaml"))):
        monkeypatch.chdir(here)
        output_dir = load_config(PPOConfig, file).trainer.output_dir
        assert Path(output_dir).absolute() == mine.resolve() / "run"
    monkeypatch.chdir(tmp_path)
    assert main(["check", "mine/run.yaml"]) == 0, capsys.readouterr().err


def test_a_validation_file_and_the_columns_of_the_tutorial_are_taken(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n}+1=", "data_source": "sums", "ground_truth": str(n + 1)} for n in range(40)]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(rows[0] | {"ground_truth": "one"}) + "\n")
    mine = written(tmp_path, policy, rows, "--val", str(held_out))
    said = capsys.readouterr().out
    assert f"validation: {held_out}" in said
    assert "40 of 41 answers" in said
    assert (
        f"warning: 1 of the answers fail, and `megarl check` refuses such rows: {held_out}: row 0: the "
        f"ground truth 'one': 'one' is" in said
    )
    assert sorted(file.name for file in mine.iterdir()) == ["megarl.schema.json", "reward.py", "run.yaml"]
    assert "columns" not in (mine / "run.yaml").read_text()
    config = load_config(PPOConfig, str(mine / "run.yaml"))
    assert (config.data.train_files, config.data.val_files) == (
        [str(tmp_path / "rows.jsonl")],
        [str(held_out)],
    )
    held_out.write_text('{"prompt": "1+1="}\n')
    wishes = ["--model", str(policy), "--data", str(tmp_path / "rows.jsonl"), "--val", str(held_out)]
    assert main(["init", str(tmp_path / "other"), *wishes]) == 2
    assert f"{held_out}: column 'ground_truth' is missing" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "other"), "--model", str(policy), "--val", str(held_out)]) == 2
    assert "--val requires --data" in capsys.readouterr().err


def test_chats_are_held_out_for_fine_tuning(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [
        [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]
        for n in range(30)
    ]
    mine = written(tmp_path, policy, [{"messages": chat} for chat in chats], "--kind", "sft")
    assert "validation: 3 of the 30 rows are held out" in capsys.readouterr().out
    assert main(["check", str(mine / "run.yaml")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (
            [f"Once upon a time, {n} dragons lived in a town. " * 9 for n in range(30)],
            "they are texts of 414 characters (the median)",
        ),
        ([[str(n), f"{n}.0"] for n in range(30)], "they are lists or mappings, such as ['0', '0.0']"),
        (
            [f"def add(x):\n    return x + {n}" for n in range(30)],
            "they are programs, and many programs solve the same task; give tests",
        ),
        (
            [f"assert add(1) = {n}" for n in range(30)],
            "they look like tests of programs, but most cannot be executed: ",
        ),
        ([None] * 30, "all of them are null"),
    ],
    ids=["long", "lists", "programs", "broken tests", "null"],
)
def test_answers_that_no_reward_fits_are_named(
    answers: list[Any], reason: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = written(
        tmp_path, policy, [{"question": f"{n}+0=", "answer": answer} for n, answer in enumerate(answers)]
    )
    said = capsys.readouterr().out
    assert f"warning: no reward fits the answers, because {reason}" in said
    assert "implement compute_score in reward.py" in said
    with pytest.raises(NotImplementedError, match="compute_score in reward.py"):
        scores(mine, ("", answers[0]))


def test_mathematics_without_its_library_is_refused(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"question": str(n), "answer": f"\\sqrt{{{n}}}"}) + "\n" for n in range(9))
    )
    assert (
        main(["init", str(tmp_path / "mine"), "--model", str(policy), "--data", str(data), "--device", "cpu"])
        == 2
    )
    refused = capsys.readouterr().err
    assert (
        "the answers, such as '\\\\sqrt{0}', are mathematical expressions, whose reward requires "
        "Math-Verify: pip install" in refused
    )
    assert not (tmp_path / "mine").exists()


def test_what_it_says_about_the_reward_is_documented(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(200))
    )
    assert main(["init", "my_run", "--model", str(policy), "--data", "rows.jsonl", "--device", "cpu"]) == 0
    said = capsys.readouterr().out.partition("next:")[0]
    assert f"```text\n{said}```" in (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(
        encoding="utf-8"
    )


def changed(policy: Path, model: Path, **values: Any) -> Path:
    """Return a folder like the policy's, without weights, with other values in config.json."""
    model.mkdir()
    for file in [file for file in policy.iterdir() if file.suffix != ".safetensors"]:
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text()) | values
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_the_tokenizer_of_the_model_is_tried_before_anything_is_written(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(30)]
    rows[7]["question"] = "7 \N{SNOWMAN} 1="
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind in ("ppo", "sft"):
        given = ["--model", str(policy), "--data", str(data), "--device", "cpu", "--kind", kind]
        assert main(["init", str(tmp_path / "mine"), *given]) == 2
        message = capsys.readouterr().err
        assert "rows.jsonl, row 7" in message
        assert "\N{SNOWMAN}" in message
        assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("words", "limit", "skipped"),
    [(10, 512, 0), (600, 640, 0), (5000, 2048 - 128 - 512, 1)],
    ids=["short", "longer than the default", "longer than the model can read"],
)
def test_the_limit_of_prompts_fits_the_rows_and_the_model(
    words: int,
    limit: int,
    skipped: int,
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(30)]
    rows[7]["question"] = "1" * words
    folder = written(tmp_path, changed(policy, tmp_path / "model", max_position_embeddings=2048), rows)
    said = capsys.readouterr().out
    config = load_config(PPOConfig, str(folder / "run.yaml"))
    assert (config.data.max_prompt_length, config.data.max_response_length) == (limit, 512)
    assert f"limit {limit:,}" in said
    assert ("1 longer row will be skipped" in said) is bool(skipped)


@pytest.mark.parametrize(
    ("hidden", "layers", "rates"),
    [(48, 2, (1e-3, 2e-3, 5e-4)), (512, 24, (2e-5, 1e-4, 5e-6)), (2048, 24, (1e-6, 1e-5, 5e-7))],
    ids=["tiny", "small", "large"],
)
def test_the_learning_rate_fits_the_size_of_the_model(
    hidden: int, layers: int, rates: tuple[float, float, float], policy: Path, tmp_path: Path
) -> None:
    model = changed(
        policy,
        tmp_path / "model",
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
    )
    adapters = {48: ("1.5", 10 * (48 / 2048) ** 0.5), 512: ("5", 5.0), 2048: ("10", 10.0)}
    for kind, rate in zip(("ppo", "sft", "dpo"), rates, strict=True):
        folder = tmp_path / kind
        assert main(["init", str(folder), "--model", str(model), "--device", "cpu", "--kind", kind]) == 0
        text = (folder / "run.yaml").read_text()
        assert yaml.safe_load(text)["actor"]["optim"]["lr"] == rate
        # The comment can be used as it is, with a rate that fits the width.
        times, usual = adapters[hidden]
        assert f"usually with lr {usual * rate:.1e}: {times} times".replace("e-0", "e-") in text
        with_adapters = text.replace("  # lora: lora #", "  lora: lora #")
        assert yaml.safe_load(with_adapters)["actor"]["lora"] == "lora"

    with_critic = tmp_path / "with_critic"
    assert main(["init", str(with_critic), "--model", str(model), "--algorithm", "ppo"]) == 0
    values = yaml.safe_load((with_critic / "run.yaml").read_text())
    assert values["critic"]["optim"]["lr"] == max(rates[0], 1e-5)
