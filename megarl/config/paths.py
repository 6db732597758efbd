"""Output paths that several parts of megarl share."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema import RunConfig


def checkpoint_path(config: RunConfig) -> Path:
    """Return the folder of the run's checkpoints."""
    given = config.checkpoint.dir
    return Path(config.trainer.output_dir) / "checkpoints" if given is None else Path(given)
