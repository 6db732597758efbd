"""Limits for files of other frameworks, so that no file fills the memory or is read without end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MOST_CHARACTERS = 1_000_000  # of a file, and of all values that a script's variables and commands stand for
MOST_VALUES = 100_000  # of a YAML text, whose aliases can repeat each other without end


def read_limited(file: Path) -> str:
    """Read a text file.

    Raises:
        ValueError: The file cannot be read, or is too long for a script or a configuration.
    """
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            text = opened.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from error
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{file}: has more than {MOST_CHARACTERS:,} characters; give the file of a run")
    return text


def is_too_large(tree: Any) -> bool:
    """Whether a tree has more values than a configuration has, or contains itself."""
    num_values = 0
    left = [tree]
    while left and num_values <= MOST_VALUES:
        value = left.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        num_values += 1 + len(inner)
        left.extend(inner)
    return num_values > MOST_VALUES
