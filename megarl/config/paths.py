"""Paths and URLs that several parts of megarl share."""

from __future__ import annotations

import re
from pathlib import Path

from megarl.config.schema import RunConfig

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


def is_url(path: str) -> bool:
    """Return whether a value is a URL, as of object storage, and not a path."""
    return _URL.match(path) is not None


def checkpoint_path(config: RunConfig) -> Path:
    """Return the folder of the run's checkpoints."""
    given = config.checkpoint.dir
    return Path(config.trainer.output_dir) / "checkpoints" if given is None else Path(given)
