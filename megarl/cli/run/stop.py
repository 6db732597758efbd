"""`megarl stop RUN_DIR`: asks a running run to save a checkpoint and end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from megarl.cli.run.end import how_to_resume_in
from megarl.machine.folder_lock import Owner, owner_of


def run(run_dir: str) -> None:
    """Send SIGTERM to the process of a run.

    Raises:
        ValueError: No run uses the folder, or its process cannot be reached from here.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; give a run's trainer.output_dir")
    owner = owner_of(folder)
    if owner is None:
        raise ValueError(f"{folder}: no run uses this folder now; `megarl status {folder}` shows its end")

    runs = owner.still_runs(Owner.here(), is_locked=False)
    if runs is False:
        raise ValueError(
            f"{folder}: its {owner.describe()}, has ended without a trace; {how_to_resume_in(folder)}"
        )
    if runs is None:
        raise ValueError(
            f"{folder}: its {owner.describe()}, is on another machine or in another container; run "
            f"`megarl stop {folder}` there, or `kill -TERM {owner.pid}`"
        )
    try:
        os.kill(owner.pid, signal.SIGTERM)
    except ProcessLookupError:
        raise ValueError(f"{folder}: its {owner.describe()}, has just ended") from None
    except PermissionError:
        raise ValueError(
            f"{folder}: its {owner.describe()}, belongs to another user; ask that user to stop it"
        ) from None

    print(
        f"{folder}: asked its {owner.describe()}, to end after its step and a checkpoint. Do not repeat this "
        f"to hurry it: a second time, it ends immediately. Follow it with: megarl status {folder} --watch"
    )
