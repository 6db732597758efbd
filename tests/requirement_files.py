"""Read requirements/: the lists of direct requirements, and the lock with everyone's version and hashes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[1] / "requirements"
_ENTRY = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>\S+)(?P<hashes>( \\\n +--hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE
)


def locked(lock: Path = FOLDER / "lock.txt") -> dict[str, str]:
    """Return the version of each distribution in a lock. Each entry has hashes, or this fails."""
    text = lock.read_text()
    found = {canonicalize_name(entry["name"]): entry["version"] for entry in _ENTRY.finditer(text)}
    assert len(found) == text.count("=="), "each entry must be an exact version with hashes"
    return found


def lock_environment(names: Iterable[str]) -> dict[str, str]:
    """Return the environment "lock" of megarl/config/tested_versions.json: what all tests run on."""
    lock = locked()
    python = (FOLDER.parent / ".python-version").read_text().strip()
    return {"python": python} | {name: lock[name] for name in sorted(names)}


def listed(*files: str) -> set[str]:
    """Return the distributions that are named in these files."""
    lines = [
        line.split("#")[0].strip() for file in files for line in (FOLDER / file).read_text().splitlines()
    ]
    return {canonicalize_name(Requirement(line).name) for line in lines if line}
