"""Refuses mistyped keys before a command's own modules are imported, which takes seconds.

This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config.load import Loaded, read_config, schema_of
from megarl.config.schema import PPOConfig, RunConfig
from megarl.config.sources import Layer
from megarl.doctor.checks import load_for_plan, load_for_run
from megarl.machine.folder_kinds import is_run, no_run
from megarl.tracking.run_files import CONFIG_FILE


def train(config_path: str, overrides: Sequence[str], address: str | None = None) -> None:
    """Refuse unknown keys, with all other problems that are found without the inputs.

    Args:
        address: The cluster on which the run starts; None: this machine.

    Raises:
        ConfigError: Lists the problems.
        ValueError: A launcher has started this process.
    """
    if address is None:
        _refuse_launched_ranks("train")
    if not read_config(RunConfig, config_path, overrides).has_unknown_keys:
        return
    if address is None:
        load_for_run(RunConfig, config_path, overrides)
    else:
        load_for_plan(RunConfig, config_path, overrides, starts_elsewhere=True)


def evaluate(model: str, rows_path: str | None, config: str | None, overrides: Sequence[str]) -> None:
    """Refuse unknown keys of the configuration of an evaluation, or of rewards on rows.

    A configuration that is only known when the model has been opened, that of a run's checkpoints, is not
    read.

    Raises:
        ConfigError: Lists the problems.
        ValueError: A launcher has started this process.
    """
    if rows_path is not None:
        _refuse_unknown_keys(read_config(PPOConfig, model, overrides))
        return
    _refuse_launched_ranks("eval")

    folder = Path(model)
    source: str | Mapping[str, Any] = config or {}
    # A fine-tuning run has no rollout section, so an evaluation does not read its file.
    if config is None and (folder / CONFIG_FILE).is_file():
        run_file = str(folder / CONFIG_FILE)
        source = run_file if schema_of(run_file) is PPOConfig else {}
    elif config is None and folder.is_dir() and not (folder / "config.json").is_file():
        return
    given = Layer("options", {"model": {"path": model}, "data": {"train_files": []}})
    _refuse_unknown_keys(read_config(PPOConfig, source, overrides, given))


def generate(agent: str | None) -> None:
    """Refuse unknown keys of the configuration of an agent. Raises ConfigError."""
    if agent is not None:
        _refuse_unknown_keys(read_config(PPOConfig, agent))


def replay(run_dir: str, overrides: Sequence[str]) -> None:
    """Refuse unknown keys of a changed run.

    Raises:
        ConfigError: Lists them.
        ValueError: The folder is not that of a run.
    """
    if not is_run(Path(run_dir)):
        raise ValueError(no_run(Path(run_dir)))
    _refuse_unknown_keys(read_config(RunConfig, Path(run_dir) / CONFIG_FILE, overrides))


def _refuse_unknown_keys(loaded: Loaded[Any]) -> None:
    # Missing and wrong values may be those that the command's options replace.
    if loaded.has_unknown_keys:
        loaded.required()


def _refuse_launched_ranks(command: str) -> None:
    """Raise ValueError if torchrun or a similar launcher has started this process.

    Otherwise each of its ranks would be a driver.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" not in os.environ and int(size) == 1:
        return
    raise ValueError(
        f"this process was started by torchrun or a similar launcher as one of {size} (WORLD_SIZE), but "
        f"`megarl {command}` starts its own processes. On one machine, run `megarl {command}` directly; on "
        f"several, run torchrun --nproc-per-node 1 -m megarl launch CONFIG key=value ... on each "
        f"(docs/launch.md)"
    )
