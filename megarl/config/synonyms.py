"""Maps names that users of the field type to configuration keys.

The table is `synonyms.yaml` next to this file, which is read when a key is unknown.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from pathlib import Path

import yaml


@cache
def synonyms() -> dict[str, tuple[tuple[str, ...], str]]:
    """Return the keys that a name may stand for, the preferred one first, and a note."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    entries = {}
    for names, text in table.items():
        keys, _, note = text.partition("; ")
        entry = (() if keys == "none" else tuple(keys.split(", ")), note)
        entries |= dict.fromkeys(names.split(", "), entry)
    return entries


def synonym_hint(key: str, known: Container[str]) -> str | None:
    """Return a hint for an unknown key by its meaning; None if the table has neither it nor its last part.

    A key of the same section comes first: the critic's `learning_rate` is its `lr`, not the actor's.
    """
    name = key.lower().replace("-", "_")
    section = name.rpartition(".")[0]
    keys, note = synonyms().get(name) or synonyms().get(name.rpartition(".")[2]) or ((), "")
    beside = [f"{section}.{each.rpartition('.')[2]}" for each in keys]
    ours = next((each for each in (*beside, *keys) if each in known), None)
    if keys and ours is None:
        return None
    if ours is None:
        return note or None
    return f"use {ours}{f' ({note})' if note else ''}"
