"""The driver's part of the snapshots in memory, from which the next driver of the run continues.

A snapshot has the state of the models; this is the rest of a checkpoint: `trainer.json`, `config.yaml`, and
samples that are not trained yet, with the checksums of these files. It is in the run's folder:

driver/step_00000006/  step_00000007/    of the last two snapshots
driver/.step_00000008.partial/           being written
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megarl.checkpoints.run_folder import STEP_NAME, file_checksum, files_of, step_name, step_of
from megarl.config.schema import RunConfig
from megarl.machine.errors import CheckpointError
from megarl.machine.files import parse_json
from megarl.plan.placement.model_state import NUM_KEPT

FOLDER = "driver"
STATE_FILE = "trainer.json"  # also in checkpoints
_CHECKSUMS_FILE = "checksums.json"  # written last


class DriverStates:
    """The folder of these states. A state gets its final name only when it is complete.

    Nothing is synced to disk: a driver that dies alone leaves the files to the next one, and memory does not
    survive what would lose them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[Path]:
        """Return the complete states, newest first."""
        found = self.path.iterdir() if self.path.is_dir() else ()
        return sorted((each for each in found if STEP_NAME.fullmatch(each.name)), key=step_of, reverse=True)

    def write(self, step: int, write_files: Callable[[Path], None]) -> None:
        """Write the state after a step, and remove those before the last snapshot but one. Raises OSError."""
        partial = self.path / f".{step_name(step)}.partial"
        final = self.path / step_name(step)

        if partial.exists():  # a previous write failed
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        write_files(partial)
        # A copy of an earlier state has their file already.
        files = [path for path in files_of(partial) if path.name != _CHECKSUMS_FILE]
        checksums = {path.name: file_checksum(path) for path in files}
        (partial / _CHECKSUMS_FILE).write_text(json.dumps(checksums), encoding="utf-8")

        # A step that was repeated after a loss has a state already.
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)

        for old in self.steps()[NUM_KEPT:]:
            shutil.rmtree(old)

    def clear(self, after: int = -1) -> None:
        """Remove the states after a step, and partial ones; without a step, all."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if path.is_dir() and STEP_NAME.fullmatch(path.name) and step_of(path) <= after:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        with suppress(OSError):  # not empty, or absent
            self.path.rmdir()


def check_state(folder: Path) -> None:
    """Check that the files of a state are those that were written.

    A machine that lost power may have the folder of a state, but not the contents of its files.

    Raises:
        CheckpointError: They are not. Names the first one.
    """
    path = folder / _CHECKSUMS_FILE
    try:
        checksums = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(checksums, dict):
            raise CheckpointError(f"{path}: is not a mapping of files")
        for name, checksum in checksums.items():
            path = folder / name
            if file_checksum(path) != checksum:
                raise CheckpointError(f"{path}: its content is not what was written (checksum)")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def driver_states(config: RunConfig) -> DriverStates:
    return DriverStates(Path(config.trainer.output_dir) / FOLDER)
