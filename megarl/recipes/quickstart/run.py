"""`megarl quickstart`: trains a tiny model.

It creates the model and its data, fine-tunes the model on demonstrations, and then trains it with PPO.

Arguments are overrides of configs/quickstart.yaml; `trainer.seed` also seeds the model, the data and the
fine-tuning. Each stage is a separate command, which is printed before it runs and can also be run alone.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from megarl.config.load import read_config, resolved
from megarl.config.schema import RunConfig
from megarl.config.shipped import with_published_models
from megarl.config.validate import validate
from megarl.machine.errors import ConfigError

OUTPUT_DIR = Path("outputs/quickstart")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
        *([[*megarl, "train", recipe.sft, *seeds]] if recipe.sft is not None else []),
        [*megarl, "train", recipe.train, *seeds, *overrides],
        [*megarl, "report", str(run_dir), "--png"],
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


def run_stages(stages: Iterable[Sequence[str]]) -> int:
    """Print and run each command.

    Returns the exit code of the first that fails, as a shell reports it, or 0.
    """
    for stage in stages:
        print("$ " + shlex.join(["python", *stage[1:]]), flush=True)
        if status := _run(stage):
            return status
    return 0


def _run(stage: Sequence[str]) -> int:
    """Run one command in the foreground.

    Signals to this process are forwarded to it, so that a training run can save and shut down in order.
    """
    # With its own process group, the command does not receive a terminal's Ctrl-C twice.
    process = subprocess.Popen(stage, process_group=0)
    before = {number: signal.getsignal(number) for number in _FORWARDED}
    # Signals that are ignored here stay ignored, as under nohup.
    for number in (each for each, handler in before.items() if handler is not signal.SIG_IGN):
        signal.signal(number, lambda number, frame: process.send_signal(number))

    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    return status if status >= 0 else 128 - status
