"""Configurations without one of their fields, compared with what transformers puts in its place."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megarl.config.shipped import CONFIGS_DIR
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES, family_of, read_architecture

Fields = dict[str, Any]

# Fields that no architecture depends on.
_BOOKKEEPING = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "model_type",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def examples() -> dict[str, Fields]:
    """Return the example of every family."""
    return {name: family.example() for name, family in FAMILIES.items()}


def published() -> dict[str, Fields]:
    """Return the fields of the published models, as files of transformers' own classes."""
    fields = {
        file.parent.name: json.loads(file.read_text())
        for file in sorted(Path(CONFIGS_DIR, "models").glob("*/config.json"))
    }
    return {name: _of_transformers_class(found) for name, found in fields.items()}


def _of_transformers_class(fields: Fields) -> Fields:
    family = family_of(fields["model_type"])
    assert family is not None
    own = {name: value for name, value in fields.items() if name != "auto_map"}
    return own | {"architectures": [family.class_prefix + family.lm_class]}


def paths(fields: Fields) -> Iterator[tuple[str, ...]]:
    """Yield the path of each field, also of those of nested objects."""
    for name, value in fields.items():
        if name not in _BOOKKEEPING:
            yield (name,)
            if isinstance(value, dict):
                yield from ((name, *path) for path in paths(value))


def without(fields: Fields, removed: Sequence[tuple[str, ...]]) -> Fields:
    """Return a copy without the fields at some paths."""
    changed = copy.deepcopy(fields)
    for path in removed:
        inner = _parent(changed, path)
        if inner is not None:
            inner.pop(path[-1], None)
    return changed


def with_null(fields: Fields, path: tuple[str, ...]) -> Fields:
    """Return a copy in which the field at a path is null."""
    changed = copy.deepcopy(fields)
    inner = _parent(changed, path)
    assert inner is not None
    inner[path[-1]] = None
    return changed


def _parent(fields: Fields, path: tuple[str, ...]) -> Fields | None:
    inner: Fields | None = fields
    for name in path[:-1]:
        inner = None if inner is None else inner.get(name)
    return inner


def difference(folder: Path, fields: Fields) -> str | None:
    """Return how megarl reads a file differently from the one that transformers writes after reading it.

    Returns:
        None if both are the same, or if megarl or transformers refuses the file.
    """
    ours = _read(folder, fields)
    filled = None if isinstance(ours, str) else _filled(fields)
    if filled is None:
        return None

    theirs = _read(folder, filled)
    if isinstance(theirs, str):
        return f"refused after transformers has written it: {theirs}"
    # Two architectures that differ only in what is kept are equal.
    ours_and_kept = (ours, ours.num_mtp_layers) if isinstance(ours, Architecture) else None
    return None if ours_and_kept == (theirs, theirs.num_mtp_layers) else f"{ours}\nis not\n{theirs}"


def _read(folder: Path, fields: Fields) -> Architecture | str:
    """Return the architecture, or why it is refused."""
    (folder / "config.json").write_text(json.dumps(fields))
    try:
        return read_architecture(str(folder))
    except ConfigError as error:
        return str(error)


def _filled(fields: Fields) -> Fields | None:
    """Return the fields as transformers writes them after reading them; None if it refuses them."""
    family = family_of(fields.get("model_type"))
    assert family is not None
    try:
        config = CONFIG_MAPPING[family.model_type](**copy.deepcopy(fields))
        written: Fields = config.to_diff_dict()
    except Exception:  # noqa: BLE001  (a class may raise anything)
        return None
    return written
