"""Run the code example (`python -m examples.code.run`): a tiny model learns to write functions by their tests.

It takes about ten minutes on two cores. Arguments are overrides of examples/code/grpo.yaml; `trainer.seed`
also seeds the model, the data and the fine-tuning. Each stage is a separate command, which is printed before
it runs.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SEED = "trainer.seed="
RUN_DIR = "trainer.output_dir="


def stages(overrides: Sequence[str]) -> list[list[str]]:
    seed = next((override.removeprefix(SEED) for override in overrides if override.startswith(SEED)), "0")
    seeds = [f"{SEED}{seed}", f"data.seed={seed}"]
    return [
        ["-m", "examples.code.prepare", "--seed", seed],
        ["-m", "megarl", "train", "examples/code/sft.yaml", *seeds],
        ["-m", "megarl", "train", "examples/code/grpo.yaml", *seeds, *overrides],
    ]


def main() -> int:
    """Run all stages. Return the exit status of the first stage that fails, or 0."""
    overrides = sys.argv[1:]
    for stage in stages(overrides):
        print("$ " + shlex.join(["python", *stage]), flush=True)
        status = subprocess.run([sys.executable, *stage], check=False).returncode
        if status:
            return status

    run_dir = next(
        (override.removeprefix(RUN_DIR) for override in overrides if override.startswith(RUN_DIR)),
        "outputs/code/run",
    )
    validation = json.loads(Path(run_dir, "summary.json").read_text())["validation"]
    print(
        f"held-out functions that pass all tests: {validation['before']:.1%} before, "
        f"{validation['after']:.1%} after"
    )

    return 0


if __name__ == "__main__":
    raise SystemExit(main())
