"""`megarl quickstart`: makes a tiny model and its data, warms the model up on demonstrations, then trains it by PPO.

Arguments are overrides of configs/quickstart.yaml; `trainer.seed` also seeds the model, the data and the warm-up. Each stage
is a command of its own, printed before it runs, so that it can be run alone.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

OUTPUT_DIR = Path("outputs/quickstart")
SEED, RUN_DIR = "trainer.seed=", "trainer.output_dir="


def run(overrides: Sequence[str]) -> int:
    """The status of the first stage that fails, and 0 where none does. Raises ValueError where the package of its sums is not installed."""
    if find_spec("reasoning_gym") is None:
        raise ValueError("the quickstart's sums and their verifier are of reasoning-gym, which is not installed: pip install reasoning-gym")
    seed = next((override.removeprefix(SEED) for override in overrides if override.startswith(SEED)), "0")
    seeds = [f"{SEED}{seed}", f"data.seed={seed}"]
    megarl = [sys.executable, "-m", "megarl"]
    shutil.rmtree(OUTPUT_DIR, ignore_errors=True)
    stages = (
        [sys.executable, "-m", "megarl.recipes.quickstart.prepare", "--output-dir", str(OUTPUT_DIR), "--seed", seed],
        [*megarl, "sft", "configs/quickstart_sft.yaml", *seeds],
        [*megarl, "train", "configs/quickstart.yaml", *seeds, *overrides],
        [*megarl, "plot", str(OUTPUT_DIR)],
        [*megarl, "report", str(OUTPUT_DIR)],
    )
    for stage in stages:
        print("$ " + shlex.join(["python", *stage[1:]]), flush=True)
        status = subprocess.run(stage, check=False).returncode
        if status:
            return status
    run_dir = next((Path(override.removeprefix(RUN_DIR)) for override in overrides if override.startswith(RUN_DIR)), OUTPUT_DIR)
    validation = json.loads((run_dir / "summary.json").read_text())["validation"]
    words = {"before": "before PPO", "after": "after"}
    scores = [f"{validation[when]:.1%} {words[when]}" for when in words if validation[when] is not None]
    if scores:  # overrides can switch validation off
        print(f"held-out accuracy: {', '.join(scores)}")
    return 0
