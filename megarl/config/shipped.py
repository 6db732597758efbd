"""Resolves names of files that are included in megarl, which are valid in any folder.

Examples are `configs/quickstart.yaml` and `megarl/recipes/math/reward.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

_NAME = "configs"
_PACKAGE = Path(__file__).resolve().parents[1]
_FOR_CERTAIN = "quickstart.yaml"  # Without this file, a folder of that name is left from an older version.


def configs_dir(package: Path) -> Path:
    """Return the `configs` folder inside the package (installed from a wheel) or next to it (in a clone)."""
    packaged = package / _NAME
    return packaged if (packaged / _FOR_CERTAIN).is_file() else package.parent / _NAME


CONFIGS_DIR = configs_dir(_PACKAGE)


def find_config(path: Path, named: str) -> Path:
    """Return `path`, or the shipped configuration called `named` if `path` does not exist.

    A name is, for example, `configs/quickstart.yaml`.
    """
    return _shipped(CONFIGS_DIR, _NAME, path, named) or path


def find_code(path: Path, named: str) -> Path | None:
    """Return `path`, or the file of the package called `named` if `path` does not exist.

    A name is, for example, `megarl/recipes/math/reward.py`.
    """
    return _shipped(_PACKAGE, _PACKAGE.name, path, named)


def _shipped(folder: Path, name: str, path: Path, named: str) -> Path | None:
    parts = Path(named).parts
    if parts[:1] != (name,) or os.path.exists(path):
        return None

    shipped = folder.joinpath(*parts[1:])
    return shipped if os.path.isfile(shipped) else None


def is_shipped(path: Path) -> bool:
    """Whether a file is a bundled configuration of this megarl or of any clone.

    A clone may be used with a megarl that is installed elsewhere.
    """
    for folder in path.resolve().parents:
        # A clone is recognized by megarl's source next to its folder of configurations.
        if folder == CONFIGS_DIR or (
            folder.name == _NAME
            and (folder.parent / _PACKAGE.name / "config" / Path(__file__).name).is_file()
        ):
            return True
    return False


def shown(path: Path) -> str:
    """Return the path for messages: for a shipped configuration, the name that is valid in any folder."""
    return str(_NAME / path.relative_to(CONFIGS_DIR)) if path.is_relative_to(CONFIGS_DIR) else str(path)
