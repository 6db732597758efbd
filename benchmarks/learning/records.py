"""The raw records of the learning curves: one file of JSON lines per run, in benchmarks/learning_curves.

    {"record": "run", "name": "sums", "seed": 0, "commits": [...], "processor": ..., "config_sha256": ..., ...}
    {"record": "step", "step": 0, "val/score/mean": 0.386}
    {"record": "step", "step": 1, "critic/score/mean": 0.25, ...}
    {"record": "sample", "step": 0, "prompt": ..., "response": ..., "score": ...}

A file is written when its run is complete, so every file is a whole run. `before.json` of a task has what the
model scored before any run, with several samples per prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.learning.tasks import ROOT, make_rows
from megarl.config.load import load_config, plain_values
from megarl.config.schema import PPOConfig
from megarl.machine.files import write_whole

FOLDER = ROOT / "benchmarks" / "learning_curves"
SCORE = "val/score/mean"
_BOUNDS = (0.1, 0.6)  # of the score before: outside of them, most groups have no signal
_LEAST_PASS_GAIN = 0.15  # of pass@8 over the score
NUM_SAMPLES = 6  # answers that a record keeps of the first validation and of the last

_METRICS = (
    SCORE,
    "val/turns/mean",
    "critic/score/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/entropy",
    "actor/pg_clipfrac",
    "actor/approx_kl",
    "actor/grad_norm",
    "groups/without_signal",
    "training/rollout_probs_diff_mean",
    "rollout/age/mean",
    "agent/turns/mean",
    "dynamic_sampling/num_generations",
    "timing_s/step",
    "timing_s/gen",
    "timing_s/update_actor",
    "timing_s/testing",
)
_PACKAGES = ("torch", "transformers", "ray", "sglang", "megatron-core", "reasoning-gym")


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        about: The first line of its file.
        steps: Metrics by step.
        samples: Held-out answers of the first validation and of the last.
    """

    about: Mapping[str, Any]
    steps: Mapping[int, Mapping[str, float]]
    samples: Sequence[Mapping[str, Any]]

    @property
    def curve(self) -> dict[int, float]:
        """The held-out score by step, of the steps that have a validation."""
        return {step: metrics[SCORE] for step, metrics in self.steps.items() if SCORE in metrics}

    @property
    def gain(self) -> float:
        scores = list(self.curve.values())
        return scores[-1] - scores[0]


def path_of(name: str, seed: int) -> Path:
    return FOLDER / name / f"seed{seed}.jsonl"


def before_file(task: str) -> Path:
    return FOLDER / task / "before.json"


def nothing_to_learn(task: str) -> str | None:
    """Return why a task that was evaluated is not trained, or None."""
    metrics = json.loads(before_file(task).read_text(encoding="utf-8"))["results"][task]["metrics"]
    score = metrics["score/mean"]["value"]
    passes = metrics["pass@8"]["value"]
    low, high = _BOUNDS
    if low <= score <= high and passes >= score + _LEAST_PASS_GAIN:
        return None
    return (
        f"{task} is not trained: before training its score is {score:.3f} and pass@8 {passes:.3f}; GRPO needs a score "
        f"from {low} to {high}, and a pass@8 at least {_LEAST_PASS_GAIN} above it"
    )


def read_runs(name: str, folder: Path = FOLDER) -> list[Run]:
    """Read the recorded runs of a task or variant, in the order of their seeds.

    Raises:
        ValueError: They had different configurations, so they have no common band.
    """
    files = sorted((folder / name).glob("seed*.jsonl"), key=lambda file: int(file.stem.removeprefix("seed")))
    runs = [_read(file) for file in files]

    hashes = {run.about["config_sha256"] for run in runs}
    if len(hashes) > 1:
        raise ValueError(
            f"{folder / name}: the runs have {len(hashes)} configurations, by config_sha256; remove the records of "
            f"an earlier configuration, and run `python -m benchmarks.learning` for their seeds again"
        )
    return runs


def _read(file: Path) -> Run:
    about, *lines = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    return Run(
        about,
        {line["step"]: line for line in lines if line["record"] == "step"},
        [line for line in lines if line["record"] == "sample"],
    )


def write_run(file: Path, run_dir: Path, about: Mapping[str, Any]) -> None:
    """Write the record of a complete run from the files of the run."""
    metrics = _read_lines(run_dir / "metrics.jsonl")
    samples = _read_lines(run_dir / "generations.jsonl")
    lines = [{"record": "run", **about, **surroundings(), "config_sha256": config_hash(run_dir)}]

    for row in metrics:
        kept = {name: _rounded(row[name]) for name in _METRICS if name in row}
        lines.append({"record": "step", "step": row["step"], **kept})

    _, held_out = make_rows(about["task"])
    validated = sorted({row["step"] for row in samples})
    for step in dict.fromkeys((validated[0], validated[-1])):
        of_step = [row for row in samples if row["step"] == step]
        for row in of_step[:NUM_SAMPLES]:
            prompt = held_out[int(row["uid"])]
            assert prompt["ground_truth"] == row["ground_truth"]
            kept = {name: row[name] for name in ("response", "ground_truth", "score")}
            lines.append({"record": "sample", "step": step, "prompt": prompt["prompt"], **kept})

    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _rounded(value: float) -> float:
    """Return six significant digits, which keep the files small."""
    return float(f"{value:.6g}")


def config_hash(run_dir: Path) -> str:
    """Hash what the configuration sets, without the seeds and the paths of the checkout.

    Keys with their default value do not count, so that a new key does not separate new runs from earlier ones.
    """
    config = plain_values(load_config(PPOConfig, run_dir / "config.yaml"))
    for section in ("trainer", "data"):
        config[section].pop("seed")
    config["trainer"].pop("output_dir")

    text = json.dumps(_changed(config, plain_values(PPOConfig())), sort_keys=True).replace(f"{ROOT}/", "")
    return hashlib.sha256(text.encode()).hexdigest()


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not the default, as nested mappings."""
    return {
        key: _changed(value, default) if isinstance(value, dict) and isinstance(default, dict) else value
        for key, value in values.items()
        if value != (default := defaults.get(key))
    }


def surroundings() -> dict[str, Any]:
    """Return the processor and the versions with which a run was made."""
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": model[0] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: version(name) for name in _PACKAGES},
    }


def commit() -> str:
    """Return the commit of the checkout, with a plus sign if tracked files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/learning_curves")
    return git("rev-parse", "HEAD") + ("+" if changed else "")
