"""Maps the arguments of TRL's trainers to configuration keys.

Migration hints of `megarl check` and the page about TRL use the table. It is `trl_names.yaml` next to this
file, which is read when a key is unknown. TRL's arguments are flat names, which no configuration key is.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from pathlib import Path

import yaml

from megarl.config.verl_names import Counterpart, MigrationProblem


@cache
def trl_names() -> dict[str, dict[str, Counterpart]]:
    """Return the arguments of each class of TRL."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    del table["shared"]
    return {
        of_class: {
            name: Counterpart.of(text) for names, text in entries.items() for name in names.split(", ")
        }
        for of_class, entries in table.items()
    }


@cache
def trl_arguments() -> frozenset[str]:
    """Return the arguments of all classes."""
    return frozenset(name for arguments in trl_names().values() for name in arguments)


def trl_problem(key: str, known: Container[str]) -> MigrationProblem | None:
    """Return the migration hint for an unknown key; None if TRL has no such argument.

    Several classes may have the argument; the hint is that for this kind of run.
    """
    entries = [arguments[key] for arguments in trl_names().values() if key in arguments]
    if not entries:
        return None

    for entry in entries:
        if entry.ours is not None and entry.ours in known:
            note = f" ({entry.note})" if entry.note else ""
            return MigrationProblem(f"{key}: is a TRL argument; use {entry.ours}{note}", entry.ours)

    for entry in entries:
        if entry.ours is None:
            return MigrationProblem(f"{key}: is a TRL argument without a counterpart in megarl: {entry.note}")

    return MigrationProblem(
        f"{key}: is the TRL argument for {entries[0].ours}, which this kind of run does not have"
    )
