"""The errors of configuration: what a user wrote cannot be run, and the message says what to change."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """Every problem found in one place, one line each. `source` is the file (or files) that the user would edit."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  - {problem}" for problem in problems)]))
