"""Finds the `config.json` of a model that is not on this machine.

It is searched in the `models` folder next to a configuration, then in `configs/models`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megarl.config.dotted import with_value
from megarl.config.roles import judge_roles, model_roles
from megarl.config.schema import RunConfig
from megarl.config.shipped import CONFIGS_DIR, shown

_MODELS = "models"


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
