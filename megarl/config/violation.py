"""One thing that is wrong with a configuration, and the keys that can mend it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Violation(NamedTuple):
    """`keys`: the dotted keys of which one has to change."""

    keys: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{', '.join(self.keys)}: {self.message}"


Violations = Iterator[Violation]
