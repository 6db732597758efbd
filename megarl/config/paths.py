"""Paths and URLs that several parts of megarl share."""

from __future__ import annotations

import re
from pathlib import Path

from megarl.config.schema import RunConfig

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


def is_url(path: str) -> bool:
    """Return whether a value is a URL, as of object storage, and not a path."""
    return _URL.match(path) is not None


def split_code(reference: str) -> tuple[str, str]:
    """Return the file that a key of code names, and `:NAME` if the reference is FILE.py:NAME."""
    file, colon, name = reference.rpartition(":")
    return (file, f":{name}") if colon and file.endswith(".py") else (reference, "")


def names_code(reference: str) -> bool:
    """Return whether a reference has the form FILE.py:NAME."""
    _, name = split_code(reference)
    return name.removeprefix(":").isidentifier()


def checkpoint_path(config: RunConfig) -> Path:
    """Return the folder of the run's checkpoints."""
    given = config.checkpoint.dir
    return Path(config.trainer.output_dir) / "checkpoints" if given is None else Path(given)
