"""The learning curves of benchmarks/learning: their data, rewards, records and bands, and the claims on their page."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import pytest
import yaml

from benchmarks.learning import __main__ as command
from benchmarks.learning import records
from benchmarks.learning.bands import band
from benchmarks.learning.guess import Game
from benchmarks.learning.records import FOLDER, Run, config_hash, read_runs, write_run
from benchmarks.learning.reward import compare_numbers, compute_score, last_number
from benchmarks.learning.tasks import COMPARISONS, GSM8K, GUESS, ROOT, TASKS, make_rows
from benchmarks.learning.usage import measured, sessions
from docs.generate import learning_curves as page
from megarl.agents.protocol import Task, Turn
from megarl.config.schema import TrainerConfig

RECORDED = [task for task in TASKS if list((FOLDER / task).glob("seed*.jsonl"))]
# t of the formula on the page, copied from a table of the distribution.
T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def run(scores: Sequence[float], seed: int = 0, config: str = "a") -> Run:
    steps = {5 * number: {records.SCORE: score} for number, score in enumerate(scores)}
    return Run({"seed": seed, "config_sha256": config}, steps, [])


# ---- data and rewards


@pytest.mark.parametrize("task", TASKS)
def test_no_held_out_question_is_in_training(task: str) -> None:
    train, held_out = make_rows(task)
    assert (train, held_out) == make_rows(task)
    prompts = [{row["prompt"] for row in rows} for rows in (train, held_out)]
    assert prompts[0].isdisjoint(prompts[1])
    assert len(train) >= 60
    assert 35 <= len(held_out) <= 60


@pytest.mark.parametrize("task", [task for task, about in TASKS.items() if about.settings is not None])
def test_right_answers_have_full_marks_in_a_sentence(task: str) -> None:
    for row in make_rows(task)[1]:
        rest = (row["ground_truth"], row["extra_info"])
        assert compute_score(task, f"Of 1 and 2, it is {row['ground_truth']}.", *rest)["score"] == 1
        assert compute_score(task, f"{row['ground_truth']}, or 4321", *rest)["score"] == 0
        assert compute_score(task, "", *rest)["score"] == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 - 5 = -2", "-2"),
        ("7 is 12-5", "5"),
        ("no number", ""),
        ("12.", "12"),
        ("x=-7", "-7"),
        ("4 or 17", "17"),
    ],
)
def test_the_last_number_is_the_answer(text: str, number: str) -> None:
    assert last_number(text) == number


def test_the_game_says_where_the_number_is() -> None:
    async def play(*texts: str) -> list[tuple[str, float, bool]]:
        game = Game()
        await game.start(
            Task(messages=[], reward_model={"ground_truth": "14"}, extra_info={}, seed=0, memory={})
        )
        said = []
        for number, text in enumerate(texts):
            reply = await game.respond(Turn(number=number, text=text, calls=[], is_last=False))
            said.append((reply.messages[0]["content"] if reply.messages else "", reply.reward, reply.is_done))
        return said

    assert asyncio.run(play("well", "I guess 12.", "18", "14")) == [
        ("Reply with one number.", 0.0, False),
        ("higher", 0.0, False),
        ("lower", 0.0, False),
        ("", 1.0, True),
    ]


def test_three_guesses_suffice_for_every_number_of_a_range() -> None:
    _, held_out = make_rows(GUESS)
    by_prompt: dict[str, list[int]] = {}
    for row in held_out:
        by_prompt.setdefault(row["prompt"], []).append(int(row["ground_truth"]))
    for prompt, secrets in by_prompt.items():
        assert len(secrets) == 2**3 - 1
        assert f"from {min(secrets)} to {max(secrets)}." in prompt


@pytest.mark.parametrize(
    ("text", "score"), [("It costs $1,080.", 1), ("1,080 of 9", 0), ("#### 1080", 1), ("", 0)]
)
def test_an_answer_of_gsm8k_may_separate_thousands(text: str, score: float) -> None:
    assert compare_numbers(GSM8K, text, "1080", {})["score"] == score


def test_published_answers_of_gsm8k_are_right() -> None:
    published = [
        json.loads(line) for line in (ROOT / "benchmarks/learning/gsm8k/test.jsonl").read_text().splitlines()
    ]
    for problem, row in zip(published, make_rows(GSM8K)[1], strict=True):
        assert compare_numbers(GSM8K, problem["answer"], row["ground_truth"], {})["score"] == 1
    assert "MIT License" in (ROOT / "benchmarks/learning/gsm8k/LICENSE").read_text()


# ---- bands and conclusions


def test_a_band_is_that_of_student() -> None:
    """For 1, 2 and 3 the mean is 2 and the deviation 1, so half of the width is 4.303 / sqrt(3)."""
    assert band([1, 2, 3]) == pytest.approx((2, 2.4843), abs=1e-4)
    assert band([0.5, 0.7]).half_width == pytest.approx(12.706 * 0.1, abs=1e-9)
    assert not band([0.4]).excludes_zero
    with pytest.raises(ValueError, match="1 to 15 seeds, not 0"):
        band([])


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ([0.5], "no conclusion"),
        ([0.4, 0.5, 0.45], "rises**, and the interval of its gain is above 0"),
        ([-0.4, -0.5, -0.45], "falls**, and the interval of its gain is below 0"),
        ([0.5, -0.1, 0.2], "nothing is concluded"),
        ([0.1, 0.5], "nothing is concluded"),
    ],
)
def test_a_claim_needs_its_band(gains: list[float], said: str) -> None:
    assert said in page.claim([run([0.2, 0.2 + gain], seed) for seed, gain in enumerate(gains)])


def test_variants_are_compared_with_the_same_seeds_of_the_base() -> None:
    base = {seed: run([0.3, 0.6 + 0.01 * seed], seed) for seed in range(3)}
    higher = [run([0.3, 0.8 + 0.01 * seed], seed) for seed in range(3)]
    assert page.compare(higher, base, False)[2:] == ["+0.200 (+0.200 to +0.200)", "higher"]
    noisy = [run([0.3, score], seed) for seed, score in enumerate([0.9, 0.3, 0.7])]
    assert page.compare(noisy, base, False)[3] == "none: the interval has 0"
    assert page.compare(noisy[:1], base, False)[3] == "none: one seed"
    assert page.compare([], base, False) == ["0", "not yet recorded", "", ""]
    assert page.compare([run([0.3, 0.9], 7)], base, False)[2] == "not yet recorded"


# ---- records


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The files of a run of sums with three steps, as megarl writes them."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = {
        "model": {"path": f"{ROOT}/model"},
        "data": {"train_files": [f"{ROOT}/train.jsonl"], "seed": 3},
        "trainer": {"seed": 3, "output_dir": f"{ROOT}/x", "total_steps": 2},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    metrics = [
        {"step": 0, records.SCORE: 0.25},
        {"step": 1, "critic/score/mean": 0.123456789, "unknown": 1},
        {"step": 2, records.SCORE: 0.75},
    ]
    _, held_out = make_rows("sums")
    answers = [
        {
            "step": step,
            "uid": "1",
            "response": text,
            "ground_truth": held_out[1]["ground_truth"],
            "score": score,
        }
        for step, text, score in ((0, "To add", 0.0), (1, "no", 0.0), (2, "é 7", 1.0))
    ]
    for name, rows in (("metrics", metrics), ("generations", answers)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_is_recorded_and_read(run_dir: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "sums" / "seed3.jsonl", run_dir, {"task": "sums", "seed": 3})
    (read,) = read_runs("sums", tmp_path)
    assert read.about["seed"] == 3
    assert read.about["processor"]
    assert read.curve == {0: 0.25, 2: 0.75}
    assert read.gain == 0.5
    assert read.steps[1] == {"record": "step", "step": 1, "critic/score/mean": 0.123457}
    prompt = make_rows("sums")[1][1]["prompt"]
    assert [(each["step"], each["prompt"], each["response"]) for each in read.samples] == [
        (0, prompt, "To add"),
        (2, prompt, "é 7"),
    ]


def test_seeds_and_folders_do_not_change_the_hash_and_other_keys_do(run_dir: Path) -> None:
    first = config_hash(run_dir)
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["trainer"] |= {"seed": 4, "output_dir": "elsewhere"}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    assert config_hash(run_dir) == first
    # Nor does a key with its default, as when a later version has a new one.
    config["trainer"]["prompts_per_step"] = TrainerConfig().prompts_per_step
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    assert config_hash(run_dir) == first
    config["trainer"]["total_steps"] = 9
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    assert config_hash(run_dir) != first


def test_runs_with_other_configurations_have_no_band(run_dir: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "sums" / "seed0.jsonl", run_dir, {"task": "sums", "seed": 0})
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["trainer"]["total_steps"] = 9
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    write_run(tmp_path / "sums" / "seed1.jsonl", run_dir, {"task": "sums", "seed": 1})
    with pytest.raises(ValueError, match="the runs have 2 configurations"):
        read_runs("sums", tmp_path)


def test_seconds_of_processes_that_left_the_tree_are_counted(tmp_path: Path) -> None:
    """A child of a process that has ended works for a fifth of a processor second, and waits to be measured."""
    file = tmp_path / "usage.json"
    file.write_text(json.dumps([{"commit": "a", "wall_s": 1.0, "processor_s": 2.0}]))
    worker = (
        "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\nimport sys\nsys.stdin.read()"
    )
    starter = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {worker!r}])"

    with measured(file, {"commit": "b"}):
        process = subprocess.Popen(
            [sys.executable, "-c", starter], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.wait()
    process.communicate()

    first, second = sessions(file)
    assert first == {"commit": "a", "wall_s": 1.0, "processor_s": 2.0}
    assert second["commit"] == "b"
    assert second["processor_s"] >= 0.2


# ---- the command


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records and runs in a folder of the test."""
    monkeypatch.setattr(records, "FOLDER", tmp_path / "records")
    monkeypatch.setattr(command, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("score", "passes", "is_trained"),
    [(0.3, 0.7, True), (0.05, 0.4, False), (0.7, 0.9, False), (0.3, 0.4, False)],
)
def test_a_task_without_signal_is_not_trained(
    folders: Path, score: float, passes: float, is_trained: bool
) -> None:
    metrics = {"score/mean": {"value": score}, "pass@8": {"value": passes}}
    file = records.before_file("gcd")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"results": {"gcd": {"metrics": metrics}}}))
    refusal = records.nothing_to_learn("gcd")
    assert (refusal is None) == is_trained
    assert is_trained or f"its score is {score:.3f} and pass@8 {passes:.3f}" in str(refusal)


def test_recorded_seeds_are_skipped_and_interrupted_runs_are_kept(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = records.path_of("sums", 0)
    recorded.parent.mkdir(parents=True)
    recorded.touch()
    assert command.train("sums", "sums", 0, [], resume=False) == 0
    assert "recorded already" in capsys.readouterr().out

    (folders / "runs" / "sums" / "seed1" / "run").mkdir(parents=True)
    assert command.train("sums", "sums", 1, [], resume=False) == 1
    assert "continue it with --resume" in capsys.readouterr().err


# ---- the page


@pytest.mark.parametrize("task", RECORDED)
def test_the_page_claims_what_the_raw_files_show(task: str) -> None:
    """The gains and their interval are computed again from the lines of the files."""
    gains = []
    for file in sorted((FOLDER / task).glob("seed*.jsonl")):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        scores = [line["val/score/mean"] for line in lines if "val/score/mean" in line]
        gains.append(scores[-1] - scores[0])
    text = (ROOT / "docs" / "learning_curves.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {task}\n", 1)[1].split("\n## ", 1)[0]

    rises = False
    if len(gains) > 1:
        half = T[len(gains)] * stdev(gains) / len(gains) ** 0.5
        rises = fmean(gains) - half > 0
        assert f"{fmean(gains):+.3f} ({fmean(gains) - half:+.3f} to {fmean(gains) + half:+.3f})" in section
    assert ("the interval of its gain is above 0" in section) == rises


def test_the_records_are_small_and_of_known_tasks() -> None:
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 5_000_000
    known = {*TASKS, *(variant for compared in COMPARISONS.values() for variant in compared.variants)}
    assert {file.parent.name for file in files} <= known
