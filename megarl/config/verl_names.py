"""Maps keys of verl's PPO trainer to configuration keys.

Migration hints of `megarl check` and the page about verl use the table. It is `verl_names.yaml` next to this
file, which is read when a key is unknown.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml


class Counterpart(NamedTuple):
    """The counterpart of a key of another framework.

    Attributes:
        ours: The dotted configuration key; None if there is no counterpart.
        note: Other differences, or why there is no counterpart; may be empty.
    """

    ours: str | None
    note: str

    @classmethod
    def of(cls, text: str) -> Counterpart:
        """Read an entry `<megarl key>; <other differences>`, or `none; <reason>`."""
        ours, _, note = text.partition("; ")
        return cls(None if ours == "none" else ours, note)


@cache
def verl_keys() -> dict[str, Counterpart]:
    """Return the table by verl's dotted names.

    A branch (`actor_rollout_ref.model.mtp`) covers all keys below it that have no entry.
    """
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    del table["shared"]
    return {name: _entry(name, text) for name, text in flat_table(table)}


def flat_table(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted names of a table of nested keys, and their entries."""
    for names, entry in table.items():
        for name in names.split(", "):
            if isinstance(entry, Mapping):
                yield from flat_table(entry, f"{prefix}{name}.")
            else:
                yield prefix.removesuffix(".") if name == "*" else prefix + name, entry


def _entry(name: str, text: str) -> Counterpart:
    entry = Counterpart.of(text)
    if entry.ours is not None and entry.ours.startswith("."):
        return entry._replace(ours=("critic" if name.startswith("critic.") else "actor") + entry.ours)
    return entry


class MigrationProblem(NamedTuple):
    """The message about a key of another framework.

    Attributes:
        ours: The key to use instead; None if there is none.
    """

    message: str
    ours: str | None = None


def find_verl_key(key: str) -> tuple[str, Counterpart] | None:
    """Return the entry of a key or of the nearest branch above it, with its name.

    It is None if verl has no such key. Hydra's + and ~ are ignored.
    """
    name = key.lstrip("+~")
    # Climb towards the root until a branch has an entry.
    while name:
        if name in verl_keys():
            return name, verl_keys()[name]
        name = name.rpartition(".")[0]

    return None


def verl_problems(key: str, value: Any, known: Container[str]) -> list[MigrationProblem]:
    """Return the messages about an unknown key, one for each verl key in it; empty if there is none.

    Args:
        value: Its value. A branch is followed to its leaves.
        known: The keys of the schema. A kind of run may lack keys that the table contains.
    """
    found = [(name, find_verl_key(name)) for name in _branches(key, value)]

    # A key with the same name in both frameworks is not verl's if this kind of run lacks it.
    found = [
        (name, entry if entry is None or entry[1].ours != entry[0] or entry[0] in known else None)
        for name, entry in found
    ]
    # Without any verl key, the caller reports an unknown key itself.
    if not any(entry for _, entry in found):
        return []
    return list(
        dict.fromkeys(
            _problem(name, *entry, known) if entry else unknown_in_verl(name) for name, entry in found
        )
    )


def _branches(key: str, value: Any) -> Iterator[str]:
    # Follow a branch only while the table has entries below it; deeper levels are one key.
    if (
        isinstance(value, Mapping)
        and value
        and any(name.startswith(f"{key.lstrip('+~')}.") for name in verl_keys())
    ):
        for name, below in value.items():
            yield from _branches(f"{key}.{name}", below)
    else:
        yield key


def leaf_names(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted names of the values in a branch, or the key itself."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from leaf_names(f"{key}.{name}", below)
    else:
        yield key


def _problem(written: str, name: str, entry: Counterpart, known: Container[str]) -> MigrationProblem:
    if entry.ours == name and name in known:  # one of Hydra's signs before a key that is the same in both
        note = f" ({entry.note})" if entry.note else ""
        return MigrationProblem(
            f"{written}: write {entry.ours}=..., without a sign before it{note}", entry.ours
        )
    return hint_of(name, entry, "verl key", known)


def hint_of(name: str, entry: Counterpart, what: str, known: Container[str]) -> MigrationProblem:
    """Return the message about a key of another framework.

    Args:
        what: What the key is, such as `verl key`.
    """
    if entry.ours is None:
        return MigrationProblem(f"{name}: is a {what} without a counterpart in megarl: {entry.note}")
    if entry.ours not in known:
        return MigrationProblem(
            f"{name}: is the {what} for {entry.ours}, which this kind of run does not have"
        )
    note = f" ({entry.note})" if entry.note else ""
    return MigrationProblem(f"{name}: is a {what}; use {entry.ours}{note}", entry.ours)


def unknown_in_verl(name: str) -> MigrationProblem:
    return MigrationProblem(f"{name}: unknown key, also in verl")
