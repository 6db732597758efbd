"""Train the tiny vision-language model of examples/shapes by GRPO: `python -m tests.soak.shapes`.

The model starts from random weights. Weights are compared bitwise after every sync, and log-probs of trainer
and engine in every step. The script prints the share of correct held-out answers before and after, and exits
with status 1 if it gains less than 20 points.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from examples.shapes.prepare import prepare
from tests.soak.learning import LEAST_GAIN, megarl


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return int(learn(Path(folder), arguments.seed) < LEAST_GAIN)


def learn(folder: Path, seed: int) -> float:
    """Train from random weights. Returns the gain."""
    prepare(folder, seed)
    megarl(
        "train",
        "examples/shapes/grpo.yaml",
        f"model.path={folder / 'model'}",
        f"data.train_files=[{folder / 'data' / 'train.parquet'}]",
        f"data.val_files=[{folder / 'data' / 'validation.parquet'}]",
        f"trainer.output_dir={folder / 'run'}",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
    )
    validation = json.loads((folder / "run" / "summary.json").read_text())["validation"]
    print(f"shapes: {validation['before']:.1%} before, {validation['after']:.1%} after", flush=True)
    return float(validation["after"] - validation["before"])


if __name__ == "__main__":
    sys.exit(main())
