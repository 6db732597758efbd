"""The command of a submitted job: run megarl if the cluster's Python has the packages that it needs, or say what is missing.

Imports nothing but the standard library until that is known. A head whose Ray was started from another environment is a common mistake,
and its only sign would be the first failing import.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, distribution

from megarl.config.versions import REQUIRED

CANNOT_RUN = 2


def missing_packages() -> list[str]:
    """Return the required distributions that this Python does not have."""
    return [name for name in (each.partition("[")[0] for each in REQUIRED) if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def run(arguments: list[str]) -> int:
    """Replace this process by `megarl ARGUMENTS`, or return 2 if packages are missing."""
    if missing := missing_packages():
        python = f"{sys.executable} (Python {sys.version.split()[0]})"
        print(
            f"megarl submit: the cluster runs jobs with {python}, which lacks {', '.join(missing)}. Install megarl there, or run "
            "`ray start` on the head in the environment that has it",
            file=sys.stderr,
        )
        return CANNOT_RUN
    return os.execv(sys.executable, [sys.executable, "-m", "megarl", *arguments])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
