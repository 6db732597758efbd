"""Continue from a snapshot in memory that an earlier driver of the run has left in the cluster.

It is used if it is newer than the last checkpoint. Like a checkpoint, it can be loaded in any layout.
"""

from __future__ import annotations

import logging
from pathlib import Path

from megarl.checkpoints.run_folder import step_of
from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import RESUME_AUTO, RunConfig
from megarl.controller.cluster import visit
from megarl.controller.snapshot_memory import run_name, steps_left
from megarl.machine.errors import CheckpointError, ConfigError, one_line
from megarl.machine.wording import counted
from megarl.roles.model_snapshots import sizes_of_trained, slot_of_step
from megarl.tracking.run_files import CONFIG_FILE
from megarl.trainers.best_so_far import ends_early
from megarl.trainers.driver_states import check_state, driver_states
from megarl.trainers.resume import Resume, find_resume, read_driver_state

_log = logging.getLogger(__name__)
_OF_MODELS = ("model.", "actor.", "critic.", "reward.model.")


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
