"""Maps the arguments of slime to configuration keys, for the migration hints of `megarl check`.

The table is `slime_names.yaml` next to this file, which is read when a key is unknown.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from pathlib import Path

import yaml

from megarl.config.verl_names import Counterpart, MigrationProblem


@cache
def slime_names() -> dict[str, Counterpart]:
    """Return the arguments of slime."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: Counterpart.of(text) for names, text in table.items() for name in names.split(", ")}


def slime_problem(key: str, known: Container[str]) -> MigrationProblem | None:
    """Return the migration hint for an unknown key, or None.

    Args:
        key: The unknown key.
        known: The keys of the schema.
    """
    entry = slime_names().get(key)
    if entry is None:
        return None
    if entry.ours is None:
        return MigrationProblem(f"{key}: is a slime argument without a counterpart in megarl: {entry.note}")
    if entry.ours not in known:
        return MigrationProblem(
            f"{key}: is the slime argument for {entry.ours}, which this kind of run does not have"
        )
    note = f" ({entry.note})" if entry.note else ""
    return MigrationProblem(f"{key}: is a slime argument; use {entry.ours}{note}", entry.ours)
