"""What ships with megarl, and is called the same in every folder: `configs/quickstart.yaml`, presets, published models' `config.json`."""

from __future__ import annotations

import os
from pathlib import Path

CONFIGS_DIR = Path(__file__).resolve().parents[1] / "configs"
_NAME = "configs"


def find_config(path: Path, named: str) -> Path:
    """`path`; but where there is no such file, and what was written is the name of one that ships, as `configs/quickstart.yaml`, that."""
    parts = Path(named).parts
    if parts[:1] != (_NAME,) or os.path.exists(path):
        return path
    shipped = CONFIGS_DIR.joinpath(*parts[1:])
    return shipped if os.path.isfile(shipped) else path


def is_shipped(path: Path) -> bool:
    return path.resolve().is_relative_to(CONFIGS_DIR)


def shown(path: Path) -> str:
    """For messages: one that ships by the name that finds it from any folder."""
    return str(_NAME / path.relative_to(CONFIGS_DIR)) if path.is_relative_to(CONFIGS_DIR) else str(path)
