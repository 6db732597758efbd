"""What the keys of verl's PPO trainer are called here, for `megarl check`, and for the page that users of
verl read.

The table is `verl_names.yaml` beside this file, which is read when a key is unknown.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml


class VerlKey(NamedTuple):
    """`ours`: the dotted key here, None where there is none. `note`: what else differs, or why there is none;
    may be empty."""

    ours: str | None
    note: str


@cache
def verl_keys() -> dict[str, VerlKey]:
    """By verl's dotted names. A branch (`actor_rollout_ref.model.mtp`) stands for all that is below it, but
    for what has its own entry."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    del table["shared"]
    return {name: _entry(name, text) for name, text in _flat(table)}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for names, entry in table.items():
        for name in names.split(", "):
            if isinstance(entry, Mapping):
                yield from _flat(entry, f"{prefix}{name}.")
            else:
                yield prefix.removesuffix(".") if name == "*" else prefix + name, entry


def _entry(name: str, text: str) -> VerlKey:
    ours, _, note = text.partition("; ")
    if ours.startswith("."):
        ours = ("critic" if name.startswith("critic.") else "actor") + ours
    return VerlKey(None if ours == "none" else ours, note)


class VerlProblem(NamedTuple):
    """`ours`: the key to use instead, None where there is none."""

    message: str
    ours: str | None = None


def find_verl_key(key: str) -> tuple[str, VerlKey] | None:
    """The entry of `key` or of the nearest branch above it, with its name; None where verl has none. Hydra's
    + and ~ are ignored."""
    name = key.lstrip("+~")
    # Climb towards the root until a branch has an entry.
    while name:
        if name in verl_keys():
            return name, verl_keys()[name]
        name = name.rpartition(".")[0]

    return None


def verl_problems(key: str, value: Any, known: Container[str]) -> list[VerlProblem]:
    """What to say of a key that the schema does not have: one for each of verl's names in it, empty where it
    has none.

    A branch is followed to its leaves. `known`: the keys of the schema, for another kind of run may not have
    what the table names.
    """
    found = [(name, find_verl_key(name)) for name in _names(key, value)]

    # A name that is the same in both is nothing of verl's where this kind of run does not have it.
    found = [
        (name, entry if entry is None or entry[1].ours != entry[0] or entry[0] in known else None)
        for name, entry in found
    ]
    # Without a single name of verl's, the caller has its own message for an unknown key.
    if not any(entry for _, entry in found):
        return []
    return list(
        dict.fromkeys(_problem(name, *entry, known) if entry else _unknown(name) for name, entry in found)
    )


def _names(key: str, value: Any) -> Iterator[str]:
    # Follow a branch only as far as verl's names reach; below that it is one key.
    if (
        isinstance(value, Mapping)
        and value
        and any(name.startswith(f"{key.lstrip('+~')}.") for name in verl_keys())
    ):
        for name, below in value.items():
            yield from _names(f"{key}.{name}", below)
    else:
        yield key


def _problem(written: str, name: str, entry: VerlKey, known: Container[str]) -> VerlProblem:
    if entry.ours is None:
        return VerlProblem(f"{name}: is verl's name, and has no counterpart here: {entry.note}")
    if entry.ours not in known:
        return VerlProblem(f"{name}: is verl's name for {entry.ours}, which a run of this kind does not have")
    note = f" ({entry.note})" if entry.note else ""
    if entry.ours == name:  # a sign of Hydra's before a name that is the same in both
        return VerlProblem(f"{written}: write {entry.ours}=..., without a sign before it{note}", entry.ours)

    return VerlProblem(f"{name}: is verl's name; here it is {entry.ours}{note}", entry.ours)


def _unknown(name: str) -> VerlProblem:
    return VerlProblem(f"{name}: unknown key, and none of verl's")
