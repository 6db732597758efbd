"""Test errors for files of a run's folder that cannot be written: one error that names the file, or reports
that the folder no longer exists."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli.run.session import write_summary
from megarl.controller.errors import PhaseTimeoutError
from megarl.machine.errors import RunError
from megarl.tracking.loggers import Tracker
from megarl.tracking.run_files import writing
from megarl.tracking.timeline import Timeline
from megarl.tracking.tracked_run import TrackedRun

WRITERS: dict[str, Callable[[Path], Callable[[], None]]] = {
    "timeline.json": lambda folder: Timeline(folder).write,
    "summary.json": lambda folder: lambda: write_summary(folder, {"steps": 1}),
    "generations.jsonl": lambda folder: (
        lambda: Tracker([], TrackedRun(output_dir=folder)).log_generations(1, [{"a": 1}])
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    (folder / name).mkdir(parents=True)
    with pytest.raises(RunError, match=rf"^{folder}/\S*{name}\S*: cannot be written: Is a directory$"):
        WRITERS[name](folder)()
    assert [path.name for path in folder.rglob("*.partial")] == []


# the writer creates this folder
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "generations.jsonl"])
def test_a_folder_that_has_gone_is_said_and_not_made_anew(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / "run").mkdir()
    write = WRITERS[name](folder)
    shutil.rmtree(folder)

    with pytest.raises(RunError, match=f"^{folder}: the run's folder was removed or replaced"):
        write()

    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_hangs_is_called_that(tmp_path: Path) -> None:
    """The error of a rank that hangs is a TimeoutError, which is an OSError."""
    with pytest.raises(PhaseTimeoutError, match="actor.write_weight_files took longer"), writing(tmp_path):
        raise PhaseTimeoutError("actor", "write_weight_files", 90.0, [])
