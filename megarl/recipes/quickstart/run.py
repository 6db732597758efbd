"""`megarl quickstart`: trains a tiny model.

It creates the model and its data, fine-tunes the model on demonstrations, and then trains it with PPO.

Arguments are overrides of configs/quickstart.yaml; `trainer.seed` also seeds the model, the data and the
fine-tuning. Each stage is a separate command, which is printed before it runs and can also be run alone.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from megarl.config.load import read_config, resolved
from megarl.config.published import with_published_models
from megarl.config.schema import RunConfig
from megarl.config.validate import validate
from megarl.machine.errors import ConfigError
from megarl.recipes.quickstart.stages import run_stages

OUTPUT_DIR = Path("outputs/quickstart")


class Recipe(NamedTuple):
    """The stages of a recipe.

    Attributes:
        prepare: The module that creates model and data in `output_dir`.
        sft: The configuration of the supervised fine-tuning, None if there is none.
        train: The configuration of the reinforcement learning.
    """

    prepare: str
    sft: str | None
    train: str
    output_dir: Path


SUMS = Recipe(
    "megarl.recipes.quickstart.prepare", "configs/quickstart_sft.yaml", "configs/quickstart.yaml", OUTPUT_DIR
)


def run(overrides: Sequence[str]) -> int:
    """Run the quickstart. Raises ValueError if reasoning-gym is not installed."""
    if find_spec("reasoning_gym") is None:
        raise ValueError(
            "the quickstart requires reasoning-gym for its sums and their verifier: pip install reasoning-gym"
        )
    return run_recipe(SUMS, overrides)


def run_recipe(recipe: Recipe, overrides: Sequence[str]) -> int:
    """Run the stages of a recipe. Return the exit code of the first stage that fails, or 0.

    Raises:
        ConfigError: An override is wrong. An earlier run is kept.
    """
    trainer = _checked_config(recipe.train, overrides).trainer
    seed = str(trainer.seed)
    seeds = [f"trainer.seed={seed}", f"data.seed={seed}"]
    megarl = [sys.executable, "-m", "megarl"]
    folder = recipe.output_dir
    run_dir = Path(trainer.output_dir)
    # Remove an earlier run, which would be resumed otherwise.
    shutil.rmtree(folder, ignore_errors=True)
    stages = (
        [sys.executable, "-m", recipe.prepare, "--output-dir", str(folder), "--seed", seed],
        *([[*megarl, "sft", recipe.sft, *seeds]] if recipe.sft is not None else []),
        [*megarl, "train", recipe.train, *seeds, *overrides],
        [*megarl, "plot", str(run_dir)],
        [*megarl, "report", str(run_dir)],
    )
    if status := run_stages(stages):
        return status
    validation = json.loads((run_dir / "summary.json").read_text())["validation"]
    words = {"before": "before reinforcement learning", "after": "after"}
    scores = [f"{validation[when]:.1%} {words[when]}" for when in words if validation[when] is not None]
    if scores:  # overrides can disable validation
        print(f"held-out accuracy: {', '.join(scores)}")

    return 0


def _checked_config(path: str, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration. Wrong overrides are refused now: their stage starts minutes later."""
    loaded = read_config(RunConfig, path, overrides)
    # The earlier stages create the run's inputs, so the published `config.json` of the model is checked.
    config, _ = with_published_models(resolved(loaded.config), loaded.source)
    violations = [
        str(each) for each in validate(config) if each.absence is None and not loaded.refuses(each.keys)
    ]
    if problems := [*loaded.problems, *violations]:
        raise ConfigError(path, problems)

    return config
