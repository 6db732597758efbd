"""Request file for the number of replicas of a running job, `scale.json`.

`megarl scale` writes it atomically; the run takes it between two steps.
"""

from __future__ import annotations

import json
from pathlib import Path

from megarl.machine.files import write_whole

SCALE_FILE = "scale.json"
_KEY = "num_replicas"
MOST_REPLICAS = 10_000


def ask_for(run_dir: Path, num_replicas: int) -> None:
    """Write the request, replacing an earlier one. Raises OSError."""
    write_whole(run_dir / SCALE_FILE, json.dumps({_KEY: num_replicas}) + "\n")


def take_request(run_dir: Path) -> int | None:
    """Return the pending request and delete it, or return None if there is none.

    Raises:
        ValueError: The file is not a valid request.
    """
    path = run_dir / SCALE_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None

    # Delete the file before parsing it, so that a damaged request is reported once and not at every step.
    path.unlink()
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error}); `megarl scale` writes it") from error

    number = values.get(_KEY) if isinstance(values, dict) else None
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST_REPLICAS:
        raise ValueError(
            f"{path}: {_KEY} is {number!r}, but must be in [1, {MOST_REPLICAS}]; `megarl scale` writes it"
        )

    return number
