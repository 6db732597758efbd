"""Maps keys of NeMo RL to configuration keys, for the migration hints of `megarl check`.

The table is `nemo_rl_names.yaml` next to this file, which is read when a key is unknown.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from pathlib import Path

import yaml

from megarl.config.verl_names import Counterpart, MigrationProblem, flat_table, hint_of


@cache
def nemo_rl_names() -> dict[str, Counterpart]:
    """Return the keys of NeMo RL, by their dotted names."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: Counterpart.of(text) for name, text in flat_table(table)}


def nemo_rl_problem(key: str, known: Container[str]) -> MigrationProblem | None:
    """Return the migration hint for an unknown key; None if NeMo RL has no such key."""
    name = key.lstrip("+~")
    entry = nemo_rl_names().get(name)
    return None if entry is None else hint_of(name, entry, "NeMo RL key", known)
