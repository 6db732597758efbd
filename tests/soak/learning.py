"""Train a tiny model on the quickstart's sums: first on demonstrations, then by PPO with SGLang."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.recipes.quickstart.prepare import prepare
from tests.docs.pages import ROOT

LEAST_GAIN = 0.2


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
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    arguments = parser.parse_args()
    gains = []

    with tempfile.TemporaryDirectory() as temporary:
        for seed in arguments.seeds:
            folder = (arguments.folder or Path(temporary)) / str(seed)
            prepare(folder, seed)
            save_model(folder / "model", seed)
            gains.append(learn(folder, seed, arguments.steps, demonstration_options, options))

    return int(min(gains) < LEAST_GAIN)


def learn(
    folder: Path, seed: int, steps: int, demonstration_options: Sequence[str], options: Sequence[str]
) -> float:
    """Train from random weights, first on demonstrations, then by PPO. Returns the gain of PPO."""
    data = folder / "data"
    seeds = (f"trainer.seed={seed}", f"data.seed={seed}")
    megarl(
        "sft",
        "configs/quickstart_sft.yaml",
        f"model.path={folder / 'model'}",
        f"data.train_files=[{data / 'sft_train.parquet'}]",
        f"data.val_files=[{data / 'sft_validation.parquet'}]",
        *demonstration_options,
        f"trainer.output_dir={folder / 'sft'}",
        *seeds,
    )
    megarl(
        "train",
        "configs/quickstart.yaml",
        f"model.path={folder / 'sft' / 'huggingface'}",
        f"data.train_files=[{data / 'train.parquet'}]",
        f"data.val_files=[{data / 'validation.parquet'}]",
        *options,
        f"trainer.total_steps={steps}",
        f"trainer.output_dir={folder / 'ppo'}",
        *seeds,
    )
    summary = json.loads((folder / "ppo" / "summary.json").read_text())
    before = summary["validation"]["before"]
    after = summary["validation"]["after"]
    print(
        f"seed {seed}: {before:.1%} before, {after:.1%} after {steps} steps in "
        f"{summary['seconds'] / 60:.1f} minutes",
        flush=True,
    )

    return float(after - before)


def megarl(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "megarl", *arguments], cwd=ROOT, check=True, stdout=sys.stderr)
