"""The driver's part of the snapshots in memory, and how the next driver of the run continues from them.

A snapshot that an earlier driver has left in the cluster is used if it is newer than the last checkpoint.
Like a checkpoint, it can be loaded in any layout.

A snapshot has the state of the models; this is the rest of a checkpoint: `trainer.json`, `config.yaml`, and
samples that are not trained yet, with the checksums of these files. It is in the run's folder:

driver/step_00000006/  step_00000007/    of the last two snapshots
driver/.step_00000008.partial/           being written
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megarl.checkpoints.run_folder import STEP_NAME, file_checksum, files_of, step_name, step_of
from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import RESUME_AUTO, RunConfig
from megarl.controller.cluster import visit
from megarl.controller.snapshot_memory import run_name, steps_left
from megarl.machine.errors import CheckpointError, ConfigError, counted, one_line
from megarl.machine.files import parse_json
from megarl.plan.placement.model_state import NUM_KEPT
from megarl.roles.model_snapshots import sizes_of_trained, slot_of_step
from megarl.tracking.run_files import CONFIG_FILE
from megarl.trainers.best_so_far import ends_early
from megarl.trainers.resume import Resume, find_resume, read_driver_state

_log = logging.getLogger(__name__)
FOLDER = "driver"
_OF_MODELS = ("model.", "actor.", "critic.", "reward.model.")
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


# ---- the next driver


def find_newest(config: RunConfig) -> Resume | None:
    """Return the newest state of the run, on disk or in memory; None if the run starts from the beginning.

    A snapshot in memory of which the driver's part cannot be read is not used, with a warning.
    Raises the errors of find_resume.
    """
    saved = find_resume(config)
    return _newer_in_memory(config, 0 if saved is None else saved.step) or saved


def _newer_in_memory(config: RunConfig, saved_step: int) -> Resume | None:
    states = [path for path in driver_states(config).steps() if step_of(path) > saved_step]
    if not (states and config.recovery.enabled and config.checkpoint.resume == RESUME_AUTO):
        return None

    with visit():
        steps = steps_left(run_name(config.trainer.output_dir))
    why = "both copies of the snapshots in memory are lost"
    for state in states if steps else ():
        try:
            sizes = _sizes(config, state)
            if slot_of_step(steps, sizes, step_of(state)) is None:
                continue
            found = read_driver_state(state, config, sizes)
        except CheckpointError as error:
            _log.warning("the snapshot of step %d in memory is not used: %s", step_of(state), error)
            why = "no snapshot in memory can be used"
            continue
        if _can_continue(config, state, found):
            return found
        why = ""  # a warning says so already, or the run is complete
    if why:
        _log.warning(
            "%s: %s, and repeats %s",
            why,
            f"the run continues from the checkpoint of step {saved_step}" if saved_step else "it starts over",
            counted(step_of(states[0]) - saved_step, "completed step"),
        )
    return None


def _sizes(config: RunConfig, state: Path) -> dict[str, int]:
    """Return the number of ranks of each model that wrote the snapshot of a state.

    Raises:
        CheckpointError: The state is damaged, or its configuration is one of another version.
    """
    check_state(state)
    try:
        return sizes_of_trained(load_config(type(config), state / CONFIG_FILE))
    except ConfigError as error:
        raise CheckpointError(f"{state / CONFIG_FILE}: cannot be read ({one_line(error)})") from error


def _can_continue(config: RunConfig, path: Path, found: Resume) -> bool:
    # What follows the last step needs the checkpoint of that step.
    if found.step >= config.trainer.total_steps or ends_early(config.trainer.early_stop, found.state):
        return False

    layouts = tuple(f"{role.parallel_key}." for role in model_roles(config))
    changed = [
        change.key
        for change in found.differences
        if change.key.startswith(_OF_MODELS) and not change.key.startswith(layouts)
    ]

    if changed:
        _log.warning(
            "the snapshot of step %d in memory is not used, because %s changed since %s",
            found.step,
            ", ".join(changed),
            path,
        )
    return not changed
