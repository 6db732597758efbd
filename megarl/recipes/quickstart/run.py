"""`megarl quickstart`: makes a tiny model and its data, warms the model up on demonstrations, then trains it
by PPO.

Arguments are overrides of configs/quickstart.yaml; `trainer.seed` also seeds the model, the data and the
warm-up. Each stage is a command of its own, printed before it runs, so that it can be run alone.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from megarl.recipes.quickstart.stages import run_stages

OUTPUT_DIR = Path("outputs/quickstart")
SEED = "trainer.seed="
RUN_DIR = "trainer.output_dir="


class WarmedUp(NamedTuple):
    """A recipe: a module makes model and data in output_dir, the configuration `sft` warms the model up,
    `train` trains it by rewards."""

    prepare: str
    sft: str
    train: str
    output_dir: Path


SUMS = WarmedUp(
    "megarl.recipes.quickstart.prepare", "configs/quickstart_sft.yaml", "configs/quickstart.yaml", OUTPUT_DIR
)


def run(overrides: Sequence[str]) -> int:
    """The quickstart's. Raises ValueError where the package of its sums is not installed."""
    if find_spec("reasoning_gym") is None:
        raise ValueError(
            "the quickstart's sums and their verifier are of reasoning-gym, which is not installed: pip "
            "install reasoning-gym"
        )
    return run_recipe(SUMS, overrides)


def run_recipe(recipe: WarmedUp, overrides: Sequence[str]) -> int:
    """overrides: of the training by rewards. The status of the first stage that fails, and 0 where none
    does."""
    seed = next((override.removeprefix(SEED) for override in overrides if override.startswith(SEED)), "0")
    seeds = [f"{SEED}{seed}", f"data.seed={seed}"]
    megarl = [sys.executable, "-m", "megarl"]
    folder = recipe.output_dir
    # An earlier run with the same folder would be resumed.
    shutil.rmtree(folder, ignore_errors=True)
    stages = (
        [sys.executable, "-m", recipe.prepare, "--output-dir", str(folder), "--seed", seed],
        [*megarl, "sft", recipe.sft, *seeds],
        [*megarl, "train", recipe.train, *seeds, *overrides],
        [*megarl, "plot", str(folder)],
        [*megarl, "report", str(folder)],
    )
    if status := run_stages(stages):
        return status
    # An override may have moved the run's folder.
    run_dir = next(
        (Path(override.removeprefix(RUN_DIR)) for override in overrides if override.startswith(RUN_DIR)),
        folder,
    )
    validation = json.loads((run_dir / "summary.json").read_text())["validation"]
    words = {"before": "before training by rewards", "after": "after"}
    scores = [f"{validation[when]:.1%} {words[when]}" for when in words if validation[when] is not None]
    if scores:  # overrides can switch validation off
        print(f"held-out accuracy: {', '.join(scores)}")

    return 0
