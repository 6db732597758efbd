"""The command of a submitted job.

It runs megarl if the cluster's Python has the required packages, or reports what is missing. It imports only
the standard library before this check. Starting Ray on the head in another environment is a common mistake,
whose only symptom would be the first failing import.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from megarl.config.versions import REQUIRED

CANNOT_RUN = 2
# Modules whose name differs from their distribution. The check looks for modules, because images often
# contain Megatron-Core as a checkout.
_MODULES = {
    "megatron-core": "megatron.core",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "markdown-it-py": "markdown_it",
}


def missing_packages() -> list[str]:
    """Return the required distributions whose modules this Python cannot find."""
    names = [each.partition("[")[0] for each in REQUIRED]
    return [name for name in names if not _is_importable(_MODULES.get(name, name.replace("-", "_")))]


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def run(arguments: list[str]) -> int:
    """Replace this process with `megarl ARGUMENTS`, or return 2 if packages are missing."""
    # Check this before the command, whose import error would not name the Python that lacks megarl.
    if missing := missing_packages():
        python = f"{sys.executable} (Python {sys.version.split()[0]})"
        print(
            f"megarl train: the cluster runs jobs with {python}, which lacks {', '.join(missing)}. Install "
            f"megarl there, or run `ray start` on the head in an environment with megarl",
            file=sys.stderr,
        )
        return CANNOT_RUN
    return os.execv(sys.executable, [sys.executable, "-m", "megarl", *arguments])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
