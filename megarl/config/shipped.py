"""Resolves names of files that are included in megarl, which are valid in any folder.

Examples are `configs/quickstart.yaml` and `megarl/recipes/math/reward.py`. Included are also the
`config.json` of published models, for plans of runs whose models are not on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megarl.config.dotted import with_value
from megarl.config.roles import judge_roles, model_roles
from megarl.config.schema import RunConfig

_NAME = "configs"
_MODELS = "models"  # in it, and next to a configuration
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
    # A clone is recognized by megarl's source next to its folder of configurations.
    source = Path(_PACKAGE.name, "config", Path(__file__).name)
    return any(
        folder == CONFIGS_DIR or (folder.name == _NAME and (folder.parent / source).is_file())
        for folder in path.resolve().parents
    )


def shown(path: Path) -> str:
    """Return the path for messages: for a shipped configuration, the name that is valid in any folder."""
    return str(_NAME / path.relative_to(CONFIGS_DIR)) if path.is_relative_to(CONFIGS_DIR) else str(path)


def with_published_models[Run: RunConfig](config: Run, config_path: str) -> tuple[Run, list[str]]:
    """Replace the path of each model that is not on this machine with a folder that has its `config.json`.

    A path without such a folder is unchanged.

    Returns:
        The configuration, and one line about each replaced path, which begins with its key.
    """
    folders = [Path(config_path).parent / _MODELS, CONFIGS_DIR / _MODELS]
    said: dict[str, str] = {}

    models = [(role.path_key, role.path) for role in model_roles(config)]
    models += [(f"{judge.key}.path", judge.path) for judge in judge_roles(config).values()]
    for key, path in models:
        # Roles may share a path, and a path that exists is used as it is.
        if key in said or os.path.exists(path):
            continue
        published = _published(Path(path), folders)
        if published is not None:
            config = with_value(config, key, str(published))
            said[key] = f"{key}: there is no folder {path!r}; using {shown(published)}/config.json"

    return config, list(said.values())


def _published(path: Path, folders: Sequence[Path]) -> Path | None:
    """Find the folder of a published model by the end of its path.

    `models/Qwen3-32B` is `Qwen3-32B` in one of `folders`, and `outputs/quickstart/model` is
    `quickstart/model`.
    """
    endings = [Path(*path.parts[start:]) for start in range(1 if path.is_absolute() else 0, len(path.parts))]
    # Within a folder the longest ending is tried first, as the most specific match.
    found = (folder / ending for folder in folders for ending in endings)
    return next((folder for folder in found if os.path.isfile(folder / "config.json")), None)
