"""Checkpoint saves: started after a step, written in the background, committed once everything is on disk.

    models copy their state -> files are written -> models complete their folders -> trainer.json,
    config.yaml, checkpoint.json, all to the disk -> rename -> `latest` -> `best.json` -> a copy to
    `checkpoint.upload` begins -> old ones are removed

A step waits only for the first stage. A checkpoint becomes the latest only after the metrics of its step are
in their files. A run that resumes from it therefore has every line up to that step, and removes the lines
that follow.

While the files are written, the save belongs to the models' ranks. A loss of one of them drops it
(`drop_save`), because all models return to an earlier state; it begins again after the step. From `sealed`
on it belongs to the driver alone, and a loss does not concern it.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import logging
import platform
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.checkpoints.object_storage import Uploads
from megarl.checkpoints.role_folder import HUGGING_FACE_FOLDER
from megarl.checkpoints.run_folder import BestCheckpoint, CheckpointFolder
from megarl.config.load import dump_config
from megarl.config.schema import RunConfig
from megarl.machine.errors import UNWRITTEN, CheckpointError, RunError
from megarl.machine.processors import threads_setting
from megarl.roles.saved_models import SavedModels
from megarl.tracking.run_files import CONFIG_FILE
from megarl.trainers.best_so_far import BestSoFar, patience_is_over
from megarl.trainers.driver_states import DriverStates
from megarl.trainers.monitor import Monitor
from megarl.trainers.recovery import NoRecovery, StepRecovery
from megarl.trainers.resume import STATE_FILE

_log = logging.getLogger(__name__)

State = dict[str, Any]


@dataclass
class _Save:
    """A save in progress.

    Attributes:
        sealing: Future of the driver's part, set once the models' parts are complete.
    """

    step: int
    folder: Path
    started_s: float
    best: BestCheckpoint | None
    blocked_s: float = 0.0
    sealing: Future[int] | None = None


class Checkpointer:
    """Saves checkpoints at the configured steps, after the last step, and when the run is told to stop.

    With `trainer.early_stop`, it also ends a run whose validations stop improving.

        for step in range(checkpoints.last_step + 1, total_steps + 1):
            if checkpoints.stops_before(step):
                break
            ...  # train, and `validated` if `validation_is_due`
            checkpoints.save(step, state)
            ...  # write the metrics of the step
            checkpoints.end_step(step)
        checkpoints.finish()
    """

    def __init__(
        self,
        config: RunConfig,
        folder: CheckpointFolder,
        models: SavedModels,
        monitor: Monitor,
        *,
        resumed: State | None = None,
        from_memory: bool = False,
        driver_states: DriverStates | None = None,
        uploads: Uploads | None = None,
        is_told_to_end: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
        recovery: StepRecovery | NoRecovery | None = None,
    ) -> None:
        """Create a checkpointer.

        Args:
            recovery: Repeats what a lost rank interrupts. None: such a loss ends the run.
            resumed: Contents of the `trainer.json` of the checkpoint that is resumed.
            from_memory: Whether it is that of a snapshot in memory. If checkpoints are written regularly, the
                next step is then saved, because one may have been lost with the previous driver.
            driver_states: Where the driver's part of snapshots is written; None if there are none.
            uploads: Copies each checkpoint elsewhere.
            clock: Monotonic seconds since any origin; it must not follow the wall clock, which may be
                changed.
        """
        self._config = config
        self._folder = folder
        self._models = models
        self._monitor = monitor
        self._uploads = uploads
        self._is_told_to_end = is_told_to_end
        self._say = say
        self._clock = clock
        self._recovery = recovery or NoRecovery()
        self._recovery.on_loss(self.drop_save)

        # Continue the counts of the resumed run: steps, time, and the validations so far.
        resumed = resumed or {"step": 0, "seconds": 0.0}
        self._first_step = resumed["step"] + 1
        self._started_s = clock() - resumed["seconds"]
        self._saved_s = clock()
        self.last_step: int = resumed["step"]  # last completed step
        self._best = BestSoFar.of(config.checkpoint.keep_best, resumed.get("best"))
        self._early_stop = BestSoFar.of(config.trainer.early_stop, resumed.get("early_stop"))
        # The best validation whose checkpoint is complete.
        self._best_saved = None if self._best is None else self._best.state_dict()

        self._under_way: _Save | None = None
        self._sources: tuple[Callable[[], State], Callable[[], Mapping[str, bytes]]] | None = None
        # Whether the last save failed or may have, so that it is due again if the run continues.
        checkpoint = config.checkpoint
        self._is_lost = from_memory and bool(checkpoint.every_steps or checkpoint.every_minutes)
        self._driver_states = driver_states
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.stopped_after: int | None = None  # the step after which the run was told to end

    @property
    def is_at_start(self) -> bool:
        """Whether no step was made before this process."""
        return self._first_step == 1

    @property
    def seconds(self) -> float:
        """Run time over all processes of the run, without work that was lost."""
        return self._clock() - self._started_s

    @property
    def stopped_early(self) -> str | None:
        """Why the run stops before its last step; None if it does not."""
        return (
            None
            if self._early_stop is None
            else patience_is_over(self._config.trainer.early_stop, self._early_stop)
        )

    @property
    def best(self) -> BestCheckpoint | None:
        """Best checkpoint that has been saved or is being saved."""
        return _as_checkpoint(self._best)

    def stops_before(self, step: int) -> bool:
        """Return whether the run ends before this step, because it is told to or no longer improves."""
        # The run may be told to stop before its first step; later requests are handled in `save`, within a
        # step.
        if self._is_told_to_end() and step == self._first_step:
            self.stopped_after = step - 1
        return self.stopped_after is not None or self.stopped_early is not None

    def validation_is_due(self, step: int) -> bool:
        trainer = self._config.trainer
        every = trainer.validate_every_steps
        return step == trainer.total_steps or (every > 0 and step % every == 0)

    def end_step(self, step: int) -> None:
        """Advance the save in progress. The metrics of the step are complete, so it may be committed."""
        self.last_step = step
        self._recovery.retry(self._continue_save)
        self._write_driver_state(step)

    def finish(self) -> None:
        """Wait for the save in progress and for uploads, after the last step."""
        self._recovery.retry(partial(self._continue_save, at_end=True))
        if self._uploads is not None:
            self._uploads.finish()

    def _continue_save(self, at_end: bool = False) -> None:
        """Advance the save in progress between two steps. One that was lost with a process begins again."""
        if self._is_lost and self._sources is not None:
            state, files = self._sources
            self._begin(self.last_step, state(), files())
        self.advance_save(wait=at_end or not self._config.checkpoint.asynchronous)

    def _write_driver_state(self, step: int) -> None:
        """Write what the next driver needs, besides the snapshot in memory, to continue after this step."""
        every = self._config.recovery.snapshot_every_steps
        if self._driver_states is None or step % every or self._sources is None:
            return
        state, files = self._sources
        # A new driver appends to the metrics files, which must have this step.
        self._monitor.flush(services=False)
        try:
            self._driver_states.write(step, partial(self._write_own, step, state(), files()))
        except OSError as error:
            _log.warning("%s: %s; a new driver cannot continue after step %d", error.filename, error, step)

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the validation after `step`. Call this within the step, before `save`."""
        if self._best is not None:
            self._best.see(step, metrics)
        if self._early_stop is not None:
            self._early_stop.see(step, metrics)

    def save(
        self, step: int, state: Callable[[], State], files: Callable[[], Mapping[str, bytes]] = dict
    ) -> None:
        """Save a checkpoint if one is due. Call this at the end of every step, within it.

        Args:
            state: Returns the trainer's state as JSON-compatible values.
            files: Returns additional files by name.

        Raises:
            CheckpointError: This save or the previous one failed. The files of the failed save are removed.
        """
        self._sources = (state, files)
        # A run that is told to stop saves at once, whether or not this step is due.
        if self._is_told_to_end():
            self.stopped_after = step
        elif not self._is_due(step):
            return
        with self._monitor.phase("save_checkpoint"):
            self.advance_save(wait=True)  # one save at a time
            self._begin(step, state(), files())

    def close(self, keeps_driver_states: bool = False) -> None:
        """Finish at the end of the run, however it ended, after its ranks have exited.

        A save that is being sealed becomes a checkpoint; partial saves are removed.

        Args:
            keeps_driver_states: Whether the run continues from the snapshots in memory.
        """
        self._thread.shutdown()
        if self._driver_states is not None and not keeps_driver_states:
            with suppress(OSError):  # they are useless without the snapshots, which end with the run
                self._driver_states.clear()
        if self._uploads is not None:
            self._uploads.close()
        with suppress(OSError):  # the next run tries again, and reports the error
            self._folder.remove_leftovers()

    def _is_due(self, step: int) -> bool:
        checkpoint = self._config.checkpoint
        is_last = step == self._config.trainer.total_steps or self.stopped_early is not None
        minutes = (self._clock() - self._saved_s) / 60

        return (
            self._is_lost
            or (checkpoint.at_end and is_last)
            or (checkpoint.every_steps > 0 and step % checkpoint.every_steps == 0)
            or 0 < checkpoint.every_minutes <= minutes
            or (self._best is not None and self._best.step == step)
        )

    def _begin(self, step: int, state: State, files: Mapping[str, bytes]) -> None:
        self._is_lost = False
        # If the checkpoint of the best validation was dropped, the one before is the best that exists.
        if self._best is not None and self._best.step != step:
            self._best.load_state_dict(self._best_saved)
        save = _Save(step, self._folder.path, self._clock(), self.best)
        self._saved_s = save.started_s

        # Models first: their ranks write in the background while the small files are written here.
        with self._or_nothing(save):
            save.folder = self._folder.begin(step)
            self._models.begin_save(save.folder)
            if self._config.checkpoint.save_hf:
                self._models.save_policy(save.folder / HUGGING_FACE_FOLDER)
            self._write_own(step, state, files, save.folder)
            if not self._config.checkpoint.asynchronous:
                self._models.finish_save(save.folder, step)

        # Training can continue from here on.
        save.blocked_s = self._clock() - save.started_s
        self._under_way = save

    def _write_own(self, step: int, state: State, files: Mapping[str, bytes], folder: Path) -> None:
        """Write the driver's files of a checkpoint to a folder."""
        of_run = {
            "step": step,
            "seconds": self.seconds,
            "threads": threads_setting(),
            "best": None if self._best is None else self._best.state_dict(),
            "early_stop": None if self._early_stop is None else self._early_stop.state_dict(),
        }
        dump_config(self._config, folder / CONFIG_FILE)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (folder / STATE_FILE).write_text(json.dumps(of_run | state, indent=2) + "\n", encoding="utf-8")

    def advance_save(self, wait: bool) -> None:
        """Advance the save in progress without blocking, or to completion if `wait` is true."""
        save = self._under_way
        if save is None:
            return

        with self._or_nothing(save):
            # The models complete their folders; then the driver's part runs in a thread.
            if save.sealing is None:
                if not (wait or self._models.is_written()):
                    return
                if self._config.checkpoint.asynchronous:
                    self._models.finish_save(save.folder, save.step)
                # The checkpoint must not become the latest before the metrics of its step are in their files.
                self._monitor.flush()
                save.sealing = self._thread.submit(self._commit, save)
            if not (wait or save.sealing.done()):
                return
            nbytes = save.sealing.result()

        self._under_way = None
        if self._best is not None and save.best is not None and save.best.step == self._best.step:
            self._best_saved = self._best.state_dict()
        background_s = self._clock() - save.started_s - save.blocked_s
        self._say(
            f"checkpoint of step {save.step}: {nbytes / 2**20:,.1f} MiB in {self._folder.path}, "
            f"training blocked for {save.blocked_s:.2f} s, then {background_s:.2f} s in the background"
        )

    def drop_save(self) -> None:
        """Drop a save that the models are still writing, because some of their ranks are lost.

        The others return to an earlier state, and stop writing. The save is due again.
        """
        save = self._under_way
        if save is None or save.sealing is not None:
            return
        self._abandon(save)
        _log.warning(
            "the checkpoint of step %d was being written when ranks were lost: it is dropped, and written "
            "again after the step",
            save.step,
        )

    def _abandon(self, save: _Save) -> None:
        """Remove what was written, and make the save due again. The previous checkpoint stays the latest."""
        self._under_way = None
        self._is_lost = True
        self._folder.abandon(save.step)

    def _commit(self, save: _Save) -> int:
        """Commit the checkpoint, in a background thread because syncing to disk can be slow."""
        # Remove old checkpoints last, so that a complete one exists at all times.
        nbytes = self._folder.seal(save.step, {"roles": self._models.names, "versions": versions()})
        checkpoint = self._folder.commit(save.step)
        self._folder.point_at_best(save.best)
        if self._uploads is not None:
            self._uploads.add(checkpoint)
        in_use = self._uploads.in_use if self._uploads is not None else ()
        self._folder.remove_old(self._config.checkpoint.keep, save.best, in_use)
        return nbytes

    @contextmanager
    def _or_nothing(self, save: _Save) -> Generator[None]:
        """Remove a failed save completely. The previous checkpoint stays the latest."""
        try:
            yield
        except (RunError, OSError) as error:
            # Remove what was written, and report the file or folder that caused the error.
            self._abandon(save)
            # A rank that hangs is also a TimeoutError, which is an OSError.
            is_file_error = isinstance(error, OSError) and not isinstance(error, RunError)
            gone = isinstance(error, (CheckpointError, OSError)) and not self._folder.path.is_dir()
            if is_file_error or gone:
                # If a copy failed, the second file is its destination.
                place = error.filename2 or error.filename if isinstance(error, OSError) else None
                why = (error.strerror if isinstance(error, OSError) else None) or error
                is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
                hint = f"{'make room' if is_full else 'make it writable'}, or give another checkpoint.dir"
                if gone:
                    hint = "restore the folder, which was removed during the run"
                raise CheckpointError(
                    f"{place or self._folder.path}: the checkpoint of step {save.step} cannot be written "
                    f"({why}); {hint}",
                    hint=UNWRITTEN,
                ) from error
            raise


def best_checkpoint(config: RunConfig, state: Mapping[str, Any]) -> BestCheckpoint | None:
    """Return the best checkpoint recorded in the state of a checkpoint, or None if the run keeps none."""
    return _as_checkpoint(BestSoFar.of(config.checkpoint.keep_best, state.get("best")))


def _as_checkpoint(best: BestSoFar | None) -> BestCheckpoint | None:
    return None if best is None or best.step is None else BestCheckpoint(best.step, best.metric, best.value)


def versions() -> Mapping[str, str]:
    """Return the versions of the libraries that write a checkpoint."""
    libraries = {
        name: importlib.metadata.version(name) for name in ("torch", "megatron-core", "transformers", "ray")
    }
    return {"megarl": __version__, **libraries, "python": platform.python_version()}
