"""Maps the arguments of slime to configuration keys, for the migration hints of `megarl check`.

The table is `slime_names.yaml` next to this file, which is read when a key is unknown.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from pathlib import Path

import yaml

from megarl.config.verl_names import Counterpart, MigrationProblem, hint_of

SERVER_PREFIX = "sglang_"  # before the names of SGLang's own options
_SERVER_ARGS = "rollout.sglang.server_args"


@cache
def slime_names() -> dict[str, Counterpart]:
    """Return the arguments of slime."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: Counterpart.of(text) for names, text in table.items() for name in names.split(", ")}


def slime_problem(name: str, known: Container[str]) -> MigrationProblem | None:
    """Return the migration hint for an unknown key, or None.

    Args:
        name: The unknown key, with underscores.
    """
    entry = slime_names().get(name)
    if entry is None and name.startswith(SERVER_PREFIX) and _SERVER_ARGS in known:
        option = f"{_SERVER_ARGS}.{name.removeprefix(SERVER_PREFIX)}"
        return MigrationProblem(f"{name}: is a slime argument; use {option}")
    return None if entry is None else hint_of(name, entry, "slime argument", known)
