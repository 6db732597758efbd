"""Test that every example runs on a tiny model with exit status 0, and that its purpose is achieved."""

from __future__ import annotations

import ast
import csv
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from examples.custom_maths import best_of_group, compare, unclipped
from megarl.cli.main import main
from megarl.config.load import dump_config
from megarl.config.schema import (
    CheckpointConfig,
)
from megarl.tracking.samples import read_samples, sample_files
from tests import fork_server
from tests.integration.tiny_run import save_inputs, tiny_config, tiny_sft_config
from tests.unit.agents.calling_model import save_calling_model

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("forked_processes")

SAMPLES_PER_PROMPT = 8
MY_REWARD = "reward.functions=[{path: examples/custom_reward.py}]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("examples"))
    ppo = tiny_config(
        folder,
        folder / "ppo",
        data={"val_files": []},
        rollout={"n": SAMPLES_PER_PROMPT},
        trainer={"total_steps": 1, "validate_before": False},
    )
    sft = tiny_sft_config(
        folder,
        folder / "sft",
        data={"val_files": []},
        checkpoint=CheckpointConfig(save_hf=False),
        trainer={"total_steps": 40, "samples_per_step": 8},
    )
    dump_config(ppo, folder / "ppo.yaml")
    dump_config(sft, folder / "sft.yaml")

    return folder


def run(*arguments: str) -> str:
    """Run a program that starts a run."""
    ended = subprocess.run(
        [*fork_server.PYTHON, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Like `run`, in this process, for programs that start no processes."""

    def call(module: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        capsys.readouterr()
        status: object = None

        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as ended:
            status = ended.code

        said, errors = capsys.readouterr()
        assert not status, errors
        return said

    return call


def test_data_estimator_and_reward_of_ones_own_train(
    folder: Path, call: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = call("examples.custom_data", "examples/questions.csv", str(folder / "questions"))
    assert said.splitlines() == [
        f"{folder}/questions/train.parquet: 24 rows",
        f"{folder}/questions/validation.parquet: 8 rows",
    ]
    with (ROOT / "examples" / "questions.csv").open() as file:
        questions = {row["question"] for row in csv.DictReader(file)}
    made = [
        row
        for name in ("train", "validation")
        for row in pq.read_table(folder / "questions" / f"{name}.parquet").to_pylist()
    ]
    assert {row["prompt"][0]["content"] for row in made} == questions

    train = f"data.train_files=[{folder}/questions/train.parquet]"
    held_out = f"data.val_files=[{folder}/questions/validation.parquet]"
    estimator = "algorithm.advantage.function=examples/custom_maths.py:best_of_group"
    loss = "algorithm.policy_loss.function=examples/custom_maths.py:unclipped"
    run(
        "megarl",
        "train",
        str(folder / "ppo.yaml"),
        "algorithm=grpo",
        estimator,
        loss,
        "data.curriculum.sampler=examples/custom_sampler.py:UnsolvedPrompts",
        train,
        held_out,
        MY_REWARD,
    )
    (metrics,) = (json.loads(line) for line in (folder / "ppo" / "metrics.jsonl").read_text().splitlines())
    shares = [metrics[f"critic/advantages/{name}"] * SAMPLES_PER_PROMPT for name in ("min", "max")]
    assert shares == [round(share) for share in shares]  # GRPO's are divided by a standard deviation
    assert -SAMPLES_PER_PROMPT < shares[0] < 0 < shares[1] < SAMPLES_PER_PROMPT
    assert set(metrics) >= {"val/questions/score/mean"}
    held_out_rows = [
        json.loads(line) for line in (folder / "ppo" / "generations.jsonl").read_text().splitlines()
    ]

    # the additional number that the function returns
    numbers = [row["reward_numbers"]["has_number"] for row in held_out_rows]
    assert (
        metrics["val/reward/has_number/mean"]
        == metrics["val/questions/reward/has_number/mean"]
        == pytest.approx(sum(numbers) / 8)
    )
    (samples,) = sample_files(folder / "ppo").values()
    kept = [
        json.loads(text)["has_number"] for text in read_samples(samples).rows["reward_numbers"].to_pylist()
    ]
    assert metrics["reward/has_number/mean"] == pytest.approx(sum(kept) / len(kept))
    assert (metrics["reward/has_number/min"], metrics["reward/has_number/max"]) == (min(kept), max(kept))
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["curriculum/solved"] == 0.0  # that of the prompts before the only step

    capsys.readouterr()
    assert (
        main(["score", str(folder / "ppo.yaml"), str(folder / "ppo" / "generations.jsonl"), MY_REWARD]) == 0
    )
    assert "8 rows scored" in capsys.readouterr().out
    assert (
        main(
            [
                "score",
                str(folder / "ppo.yaml"),
                f"{folder}/questions/train.parquet",
                MY_REWARD,
                "--ground-truth",
            ]
        )
        == 0
    )
    assert "24 rows scored: mean 1, min 1, max 1" in capsys.readouterr().out


def test_a_reward_function_for_every_kind_of_answer() -> None:
    from examples.custom_reward import compute_score

    scores = [compute_score("sums", text, "-7", {})["score"] for text in ("3-10=-7", "7", "no idea", "")]
    assert scores == [1.0, 0.1, 0.0, 0.0]


def test_the_functions_are_those_of_the_manual(call: Callable[..., str]) -> None:
    assert compare([0.0, 0.5, 1.0, 1.0])["best_of_group"] == [-0.5, -0.5, 0.5, 0.5]
    assert "best_of_group" in call("examples.custom_maths")
    source, page = (
        (ROOT / file).read_text() for file in ("examples/custom_maths.py", "docs/algorithms/custom.md")
    )
    for function in (best_of_group, unclipped):
        assert source[source.index(f"def {function.__name__}") :].partition("\n\n\n")[0] in page


def test_a_loop_of_ones_own_learns_and_goes_on(folder: Path) -> None:
    """The loop has thirty lines and uses public names of one module."""
    source = (ROOT / "examples" / "own_loop.py").read_text()
    (loop,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno < 30
    names = [node.attr for node in ast.walk(loop) if isinstance(node, ast.Attribute)]
    assert not [name for name in names if name.startswith("_")]
    imports = re.findall(r"(?m)^ *(?:from|import) megarl.*", source)
    assert [line.partition("  #")[0].strip() for line in imports] == ["from megarl import api"]

    def scores(steps: int) -> list[float]:
        reward = f"reward.functions=[{{path: {folder}/reward.py}}]"
        arguments = (str(folder / "policy"), str(folder / "train.parquet"), str(folder / "own_loop"))
        said = run(
            "examples.own_loop",
            *arguments,
            "device=cpu",
            reward,
            "actor.optim.lr=1e-2",
            f"trainer.total_steps={steps}",
        )

        return json.loads(said.partition("score by step: ")[2])

    before = scores(10)
    after = scores(16)
    assert (len(before), len(after)) == (10, 6)
    assert sum(before[:3]) / 3 < 0.2
    assert sum(after[3:]) / 3 > 0.4
    lines = [json.loads(line) for line in (folder / "own_loop" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert [round(line["critic/score/mean"], 2) for line in lines] == before + after
    assert {"actor/kl_loss", "actor/grad_norm", "timing_s/update_actor", "perf/throughput"} <= lines[0].keys()
    assert (folder / "own_loop" / "huggingface" / "model.safetensors").is_file()


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_loop_of_ones_own_in_turn_with_generation_and_beside_it(
    folder: Path, tmp_path: Path, max_staleness: int
) -> None:
    """Every prompt appears once and in order, also after resuming; no token is too old, and with one step
    ahead, the second step's samples are from the first weights."""

    def steps(total: int) -> dict[str, list]:
        said = run(
            "tests.integration.own_loop_ahead",
            str(folder / "ppo.yaml"),
            f"trainer.output_dir={tmp_path}/run",
            f"trainer.total_steps={total}",
            "algorithm=grpo",
            f"rollout.max_staleness={max_staleness}",
            "rollout.on_update=drain",
            "algorithm.rollout_correction.level=token",
            "checkpoint.save_hf=false",
            "checkpoint.at_end=true",
        )
        return json.loads(said.partition("steps: ")[2])

    first, second = steps(3), steps(5)
    made = [*first["steps"], *second["steps"]]
    assert [step["version"] for step in made] == [1, 2, 3, 4, 5]
    assert [step["ages"] for step in made] == [[0], *[[max_staleness]] * 4]

    served = [uid for step in made for uid in step["uids"]] + first["taken"]
    assert len(set(served)) == len(served)


def test_what_init_writes_trains(folder: Path, tmp_path: Path) -> None:
    """The output is a few lines, with the algorithm's name, KL if logged, and the time left."""
    mine = tmp_path / "mine"
    run("megarl", "init", str(mine), "--model", str(folder / "policy"), "--device", "cpu")
    smaller = [
        "trainer.total_steps=2",
        "trainer.prompts_per_step=4",
        "rollout.n=2",
        "data.max_response_length=8",
    ]
    without = [
        "trainer.validate_before=false",
        "trainer.validate_every_steps=0",
        "data.val_files=[]",
        "checkpoint.at_end=false",
    ]
    said = run(
        "megarl",
        "train",
        str(mine / "run.yaml"),
        *smaller,
        *without,
        f"trainer.output_dir={tmp_path / 'run'}",
    )
    lines = said.splitlines()
    (first,) = [number for number, line in enumerate(lines) if re.match(r"step 1(/\d+)?  ", line)]
    assert first <= 40
    assert "kl_loss" in lines[first]
    assert lines[first].endswith(" left")
    assert "KL: in the loss, k3 x 0.001" in map(str.strip, lines)
    assert any("GRPO run" in line for line in lines[first:])
    assert "OMP_NUM_THREADS=" in (tmp_path / "run" / "environment.txt").read_text()


@pytest.mark.parametrize("kind", ["dpo", "reward_model", "agent"])
def test_other_kinds_that_init_writes_train(folder: Path, tmp_path: Path, kind: str) -> None:
    """A step of pairs, and a step of episodes by a model whose chat template shows tools."""
    mine = tmp_path / "mine"
    model = folder / "policy"
    smaller = ["trainer.pairs_per_step=4"]
    if kind == "agent":
        save_calling_model(model := tmp_path / "calling")
        smaller = ["trainer.prompts_per_step=4", "rollout.n=2", "trainer.validate_before=false"]
    run("megarl", "init", str(mine), "--model", str(model), "--device", "cpu", "--kind", kind)

    run(
        "megarl",
        "train",
        str(mine / "run.yaml"),
        *smaller,
        "trainer.total_steps=1",
        "trainer.validate_every_steps=0",
        "data.val_files=[]",
        "checkpoint.at_end=false",
    )
    (line,) = map(json.loads, (mine / "run" / "metrics.jsonl").read_text().splitlines())
    name = "agent/turns/mean" if kind == "agent" else f"{kind}/loss"
    assert line["step"] == 1
    assert line[name] > 0


def test_a_killed_run_goes_on_and_its_policy_answers(folder: Path, call: Callable[..., str]) -> None:
    said = run("examples.resume", "sft", str(folder / "sft.yaml"))
    killed = re.search(r"killed; the newest checkpoint is step_(\d+)", said)
    assert killed is not None
    assert 2 <= int(killed.group(1)) < 40
    assert re.search(r"resumed from \S+ after step \d+", said)
    steps = [json.loads(line)["step"] for line in (folder / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))

    said = call(
        "examples.export_and_serve", str(folder / "sft" / "checkpoints"), str(folder / "exported"), "12="
    )
    assert re.search(r"^12= -> \S+", said, re.MULTILINE)


def test_the_list_names_every_example() -> None:
    listed = set(re.findall(r"\]\(([\w/.]+)\)", (ROOT / "examples" / "README.md").read_text()))
    assert listed >= {path.name for path in (ROOT / "examples").glob("*.py") if path.name != "__init__.py"}
    assert all((ROOT / "examples" / path).exists() for path in listed)
