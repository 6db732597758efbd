"""Learning curves of every source of rewards, with two seeds: `python -m tests.soak.curves --plot FILE`.

    endpoint      an agent that rewards itself, through the endpoint (examples/harness)
    judge         a model that adds up itself and then answers 1 if a sum is right and 0 otherwise,
                  served by SGLang
    distillation  a teacher that learned sums from the verifier
    reward_model  a reward model that learned from pairs of a right and a wrong sum

The policy of a judge or a reward model never sees the verifier, which only measures held-out sums. The script
prints a row per run, and exits with status 1 if one gains less than 15 points. A run that is complete in
--folder is not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megarl.recipes.quickstart.prepare import SLIPS, prepare
from tests.docs.pages import ROOT
from tests.soak.distillation import distill, save_teacher
from tests.soak.learning import demonstrate, megarl, train_policy

LEAST_GAIN = 0.15
VERDICTS_PER_SUM = 4
JUDGE_STEPS = 1000
_MEASURED = "val/basic_arithmetic/reward/correct/mean"
_SCORE = "val/score/mean"

Curve = Sequence[tuple[int, float]]  # steps of RL, and the score of held-out prompts after them


def endpoint(folder: Path, seed: int) -> Curve:
    run = folder / "rl"
    options = (
        f"trainer.seed={seed}",
        "trainer.total_steps=12",
        "trainer.validate_every_steps=3",
        f"trainer.output_dir={run}",
    )
    subprocess.run(
        [sys.executable, "-m", "examples.harness.run", *options], cwd=ROOT, check=True, stdout=sys.stderr
    )
    return read(run, _SCORE)


def distillation(folder: Path, seed: int) -> Curve:
    distill(folder, seed, 140, ("trainer.validate_every_steps=20",))
    return read(folder / "student" / "rl", _SCORE)


def reward_model(folder: Path, seed: int) -> Curve:
    prepare(folder, seed)
    demonstrate(folder, seed)
    data = folder / "data"
    megarl(
        "train",
        "configs/quickstart_reward_model.yaml",
        f"model.path={folder / 'sft' / 'huggingface'}",
        f"data.train_files=[{data / 'pairs_train.parquet'}]",
        f"data.val_files=[{data / 'pairs_validation.parquet'}]",
        # After fewer steps, it takes answers that are off by one for right ones, and the policy learns those.
        "trainer.total_steps=2000",
        f"trainer.output_dir={folder / 'reward_model'}",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
    )
    return _without_verifier(folder, seed, [f"reward.model.path={folder / 'reward_model' / 'huggingface'}"])


def judge(folder: Path, seed: int) -> Curve:
    prepare(folder, seed)
    demonstrate(folder, seed)
    path = _train_judge(folder, seed)
    (folder / "judge.jinja").write_text("{{ messages[-1].content }}-{{ solution }}")
    judges = [
        {
            "name": "sums",
            "path": str(path),
            "prompt": str(folder / "judge.jinja"),
            "parse": {"regex": r"\+([01])"},
            "max_tokens": 6,
        }
    ]
    # The judge may read an answer that is not a number, and reply without a verdict.
    return _without_verifier(
        folder, seed, [f"reward.judges={json.dumps(judges)}", "reward.max_error_rate=0.01"]
    )


def _train_judge(folder: Path, seed: int) -> Path:
    """Return a model that was shown sums with right and wrong answers, and replies with its own sum and a
    verdict, such as 109+0 to 48+61-110.

    A model that learns only the verdict keeps guessing: one bit for a sum is too little to learn to add.
    """
    trained = folder / "judge"
    prepare(trained, seed)
    save_teacher(trained / "model", seed)
    chance = random.Random(seed)
    for name in ("sft_train", "sft_validation"):
        source = folder / "data" / ("train.parquet" if name == "sft_train" else "pairs_validation.parquet")
        rows = pyarrow.parquet.read_table(source).to_pylist()
        verdicts = [row for each in rows for row in _verdicts(*_sum_of(each), chance)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(verdicts), trained / "data" / f"{name}.parquet")
    demonstrate(trained, seed, (f"trainer.total_steps={JUDGE_STEPS}", "data.max_length=20"))

    return trained / "sft" / "huggingface"


def _sum_of(row: Mapping[str, Any]) -> tuple[str, int]:
    """Return the expression and the answer of a row of prompts or of pairs."""
    if "chosen" in row:
        return row["prompt"], int(row["chosen"])
    return row["prompt"][0]["content"], int(row["reward_model"]["ground_truth"])


def _verdicts(expression: str, answer: int, chance: random.Random) -> list[dict[str, Any]]:
    """Return conversations in which a judge reads a sum with an answer, half of them wrong."""
    shown = []
    for number in range(VERDICTS_PER_SUM):
        right = number % 2 == 0
        slip = chance.choice([*SLIPS, *SLIPS, -100, 100, *range(-20, 0), *range(1, 21)])
        said = answer if right else answer + slip
        content = f"{expression}-{said}"
        shown.append(
            {
                "messages": [
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": f"{answer}+{int(right)}"},
                ]
            }
        )
    return shown


def _without_verifier(folder: Path, seed: int, rewards: Sequence[str]) -> Curve:
    function = {"path": str(Path(__file__).with_name("measured_reward.py")), "name": "measure"}
    options = [f"reward.functions={json.dumps([function])}", "trainer.validate_every_steps=10", *rewards]

    return read(train_policy(folder, seed, 70, options), _MEASURED)


def read(run: Path, metric: str) -> Curve:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[metric]) for line in lines if metric in line]


SOURCES: Mapping[str, Callable[[Path, int], Curve]] = {
    "endpoint": endpoint,
    "judge": judge,
    "distillation": distillation,
    "reward_model": reward_model,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw to a .svg or .png file")
    arguments = parser.parse_args()

    curves: dict[tuple[str, int], Curve] = {}
    print("| rewards | seed | held-out score before | after | steps |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for source in arguments.sources:
            for seed in arguments.seeds:
                folder = (arguments.folder or Path(temporary)).absolute() / source / str(seed)
                curve = curves[source, seed] = _curve(source, seed, folder)
                print(
                    f"| {source} | {seed} | {curve[0][1]:.1%} | {curve[-1][1]:.1%} | {curve[-1][0]} |",
                    flush=True,
                )
    if arguments.plot is not None:
        _plot(curves, arguments.plot)

    return int(min(curve[-1][1] - curve[0][1] for curve in curves.values()) < LEAST_GAIN)


def _curve(source: str, seed: int, folder: Path) -> Curve:
    complete = folder / "curve.json"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        complete.write_text(json.dumps(SOURCES[source](folder, seed)))
    return [(step, score) for step, score in json.loads(complete.read_text())]


def _plot(curves: Mapping[tuple[str, int], Curve], path: Path) -> None:
    from matplotlib import pyplot, rcParams

    rcParams["svg.hashsalt"] = "curves"  # the same file in every run
    sources = list(dict.fromkeys(source for source, _ in curves))
    figure, panels = pyplot.subplots(
        1, len(sources), figsize=(2.6 * len(sources), 2.6), sharey=True, squeeze=False
    )
    for axes, source in zip(panels[0], sources, strict=True):
        for (each, seed), curve in curves.items():
            if each == source:
                axes.plot(*zip(*curve, strict=True), marker=".", label=f"seed {seed}")
        axes.set_title(source.replace("_", " "), fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("held-out score")
    panels[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    sys.exit(main())
