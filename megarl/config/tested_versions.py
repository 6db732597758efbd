"""The versions that megarl was run with.

"lock" has the versions that all tests run on. The other environments are those of `make test-wheel`, which
runs from the quickstart to a converted checkpoint with both engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

RECORD = Path(__file__).with_name("tested_versions.json")


class Tested(NamedTuple):
    """The oldest and the newest tested version."""

    oldest: str
    newest: str

    def contains(self, version: str) -> bool:
        """Whether the version is in the tested range. Local parts are ignored: 2.13.0+cpu is 2.13.0."""
        return Version(self.oldest).release <= Version(version).release <= Version(self.newest).release


def as_text(environments: Mapping[str, Mapping[str, str]]) -> str:
    """Return the content of RECORD.

    Args:
        environments: For each environment, the version of each distribution, and the minor version of
            "python".
    """
    return json.dumps(environments, indent=2) + "\n"


@cache
def tested_versions() -> Mapping[str, Tested]:
    """Return the oldest and the newest tested version of each distribution, and of "python"."""
    environments = json.loads(RECORD.read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}

    for versions in environments.values():
        for name, version in versions.items():
            found.setdefault(name, []).append(version)

    return {
        name: Tested(min(versions, key=Version), max(versions, key=Version))
        for name, versions in found.items()
    }
