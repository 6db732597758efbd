"""The driver's part of the snapshots in memory, from which the next driver of the run continues.

A snapshot has the state of the models; this is the rest of a checkpoint: `trainer.json`, `config.yaml`, and
samples that are not trained yet. It is in the run's folder:

driver/step_00000006/  step_00000007/    of the last two snapshots
driver/.step_00000008.partial/           being written
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megarl.checkpoints.run_folder import STEP_NAME, step_name, step_of
from megarl.config.schema import RunConfig
from megarl.placement.snapshots import NUM_KEPT

FOLDER = "driver"


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

        # A step that was repeated after a loss has a state already.
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)

        for old in self.steps()[NUM_KEPT:]:
            shutil.rmtree(old)

    def clear(self, after: int = -1) -> None:
        """Remove the states after a step, and partial ones; without a step, all."""
        for folder in self.path.iterdir() if self.path.is_dir() else ():
            if not STEP_NAME.fullmatch(folder.name) or step_of(folder) > after:
                shutil.rmtree(folder)
        with suppress(OSError):  # not empty, or absent
            self.path.rmdir()


def driver_states(config: RunConfig) -> DriverStates:
    return DriverStates(Path(config.trainer.output_dir) / FOLDER)
