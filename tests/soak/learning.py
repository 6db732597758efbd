"""Train a tiny model on the quickstart's sums: first on demonstrations, then by RL."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.recipes.quickstart.prepare import prepare
from tests.docs.pages import ROOT

LEAST_GAIN = 0.2


class Accuracy(NamedTuple):
    """Shares of the held-out sums that the policy gets right."""

    before: float
    after: float


def run_seeds(
    description: str | None,
    save_model: Callable[[Path, int], None],
    demonstration_options: Sequence[str],
    options: Sequence[str],
) -> int:
    """Read the command line, train with each seed, and return the exit status: 1 if one gains too little.

    Args:
        description: What the program does.
        save_model: Saves a model with random weights in a folder, next to the quickstart's tokenizer, from a
            seed.
        demonstration_options: The options of supervised fine-tuning.
        options: The options of PPO.
    """
    arguments = read_arguments(description)
    gains = []

    with tempfile.TemporaryDirectory() as temporary:
        for seed in arguments.seeds:
            folder = (arguments.folder or Path(temporary)) / str(seed)
            prepare(folder, seed)
            save_model(folder / "model", seed)
            demonstrate(folder, seed, demonstration_options)
            found = reinforce(folder, seed, arguments.steps, options)
            gains.append(found.after - found.before)

    return int(min(gains) < LEAST_GAIN)


def read_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")

    return parser.parse_args()


def demonstrate(folder: Path, seed: int, options: Sequence[str] = ()) -> None:
    """Train the folder's model on demonstrations. The folder `sft` receives the result."""
    data = folder / "data"
    megarl(
        "sft",
        "configs/quickstart_sft.yaml",
        f"model.path={folder / 'model'}",
        f"data.train_files=[{data / 'sft_train.parquet'}]",
        f"data.val_files=[{data / 'sft_validation.parquet'}]",
        *options,
        f"trainer.output_dir={folder / 'sft'}",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
    )


def reinforce(folder: Path, seed: int, steps: int, options: Sequence[str] = ()) -> Accuracy:
    """Train the model that `demonstrate` left, and print the accuracy before and after."""
    output = train_policy(folder, seed, steps, options)
    summary = json.loads((output / "summary.json").read_text())
    found = Accuracy(summary["validation"]["before"], summary["validation"]["after"])
    print(
        f"seed {seed}: {found.before:.1%} before, {found.after:.1%} after {steps} steps in "
        f"{summary['seconds'] / 60:.1f} minutes",
        flush=True,
    )

    return found


def train_policy(folder: Path, seed: int, steps: int, options: Sequence[str] = ()) -> Path:
    """Train the model that `demonstrate` left, by PPO unless the options say otherwise.

    Returns the run's folder, `rl`.
    """
    data = folder / "data"
    output = folder / "rl"
    megarl(
        "train",
        "configs/quickstart.yaml",
        f"model.path={folder / 'sft' / 'huggingface'}",
        f"data.train_files=[{data / 'train.parquet'}]",
        f"data.val_files=[{data / 'validation.parquet'}]",
        *options,
        f"trainer.total_steps={steps}",
        f"trainer.output_dir={output}",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
    )

    return output


def megarl(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "megarl", *arguments], cwd=ROOT, check=True, stdout=sys.stderr)
