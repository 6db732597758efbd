"""Repeats what a lost trainer process interrupted, so that the run continues as if nothing had happened.

The work of a step is a function that can be called again. After a loss, all models return to the newest
snapshot, and the steps since then are repeated with the same samples.

    a rank is lost -> owners of work in the background of the ranks drop it (`on_loss`) -> new processes
    -> snapshot or checkpoint in all models -> steps since then -> the interrupted step

Work in the background that needs no rank, such as uploads and tracking, continues meanwhile.
"""

from __future__ import annotations

import logging
import pickle
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from megarl.checkpoints.run_folder import step_of
from megarl.config.schema import RecoveryConfig, RunConfig
from megarl.controller.errors import PhaseTimeoutError
from megarl.controller.messages import CONSTRUCTION, qualified_name
from megarl.machine.errors import CheckpointError, NonFiniteUpdateError, RunError, counted
from megarl.machine.files import write_whole
from megarl.roles.model_recovery import ModelRecovery, Restarted, SavedStep, Source
from megarl.roles.model_snapshots import SnapshotLostError
from megarl.tracking.run_files import STACKS_FOLDER, writing
from megarl.trainers.monitor import Monitor
from megarl.trainers.resume import checkpoint_folder, older_ones, read_state

_log = logging.getLogger(__name__)

Metrics = Mapping[str, float]
_NOT_FINITE = qualified_name(NonFiniteUpdateError)
_WINDOW_STEPS = 10  # over which `recovery.max_restarts` counts


class RecoveryLimitError(RunError):
    """Trainer processes were lost too often within a few steps. The message lists the losses."""

    hint = (
        "if the same step fails again and again, look for the cause in the message and in the logs",
        "a node that is named in each line is probably bad: take it out of the cluster",
        "if the losses are unrelated, allow more: {recovery.max_restarts}",
    )


class RecoveryTotals(NamedTuple):
    """Losses of a run so far.

    Attributes:
        num_recoveries: How often lost processes were restarted.
        lost_s: Time of interrupted attempts, and to restart, restore and repeat earlier steps.
        excluded_nodes: Nodes that are no longer used, by address.
    """

    num_recoveries: int = 0
    lost_s: float = 0.0
    excluded_nodes: tuple[str, ...] = ()

    def goodput(self, seconds: float) -> float:
        """Return the share of a run's time that was not lost."""
        return 1.0 - min(1.0, self.lost_s / seconds) if seconds > 0 else 1.0


class RecordedStep[T]:
    """A step that can be trained again.

    Args:
        number: Its number.
        train: Trains it. Each call with the same inputs starts from the same state of the driver.
        inputs: Its samples, and what else it starts from.
    """

    def __init__(self, number: int, train: Callable[[T], Metrics], inputs: T) -> None:
        self.number = number
        self._train = train
        self._inputs: T | None = inputs
        self._file: IO[bytes] | None = None

    def train(self) -> Metrics:
        return self._train(self._read())

    def move_to_file(self, folder: Path) -> None:
        """Move the inputs from memory to an unnamed file, which is removed with this object."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (open as long as this object)
            pickle.dump(self._inputs, self._file, protocol=pickle.HIGHEST_PROTOCOL)
            self._inputs = None

    def _read(self) -> Any:
        if self._file is None:
            return self._inputs
        self._file.seek(0)
        return pickle.load(self._file)  # written by this process


class StepRecovery:
    """Runs steps, and repeats those that a lost process interrupted.

    Args:
        config: The limits.
        models: Restarts and restores the models.
        monitor: The monitor of the run.
        last_step: The last step that was made before.
        folder: The folder for the samples of steps between the newest checkpoint and the newest snapshot.
        newest_checkpoint: Returns the folder of the newest checkpoint, None if there is none.
    """

    def __init__(
        self,
        config: RecoveryConfig,
        models: ModelRecovery,
        monitor: Monitor,
        last_step: int,
        folder: Path,
        newest_checkpoint: Callable[[], Path | None],
    ) -> None:
        self._config = config
        self._models = models
        self._monitor = monitor
        self._first_step = last_step  # the samples of steps up to this one are not recorded
        self._step = last_step
        self._newest_checkpoint = newest_checkpoint
        # Completed steps in order. Those that a snapshot contains are in files of the folder, because only a
        # checkpoint precedes them.
        self._steps: deque[RecordedStep[Any]] = deque()
        self._last_dropped = 0  # of these steps
        self._folder = folder
        self._drops: list[Callable[[], None]] = []

        self._losses: list[tuple[int, str]] = []  # the step of each, and what was lost
        self._lost_s = 0.0
        self._not_finite_step: int | None = None  # the last step that was repeated for this reason
        self._num_recoveries = 0  # since the metrics were recorded last
        self._totals = RecoveryTotals()

    @property
    def totals(self) -> RecoveryTotals:
        """The recoveries of the whole run, including those before it was resumed."""
        return self._totals._replace(excluded_nodes=tuple(self._models.excluded_nodes))

    def state_dict(self) -> dict[str, Any]:
        return {"num_recoveries": self._totals.num_recoveries, "lost_s": self._totals.lost_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._totals = RecoveryTotals(**state)

    def on_loss(self, drop: Callable[[], None]) -> None:
        """Register the owner of work that ranks of the models do in the background.

        Args:
            drop: Forgets this work; called after each loss, before any rank is restarted. The ranks that are
                left forget it when they load a snapshot or checkpoint.
        """
        self._drops.append(drop)

    def begin(self) -> None:
        """Take the first snapshot, of the state before the first step."""
        self.retry(lambda: self._models.begin_snapshot(self._step))

    def run[T](self, step: int, train: Callable[[T], Metrics], inputs: T) -> Metrics:
        """Train a step and return its metrics, with those of the recoveries during it.

        Args:
            step: Its number.
            train: Trains the step. Calling it again with the same inputs repeats the step.
            inputs: The samples of the step, and what else it starts from. They must not change.

        Raises:
            RecoveryLimitError: Processes were lost too often.
            SnapshotLostError: Neither a snapshot nor a checkpoint is left.
            Exception: Any other error of `train`.
        """
        self._step = step
        current = RecordedStep(step, train, inputs)
        metrics = self.retry(current.train)
        self._steps.append(current)
        self.retry(lambda: self._begin_snapshot(step))
        self._settle()

        of_recovery = {
            "recovery/num_recoveries": float(self._num_recoveries),
            "recovery/lost_s": self._lost_s,
        }
        self._num_recoveries = 0
        self._lost_s = 0.0
        return {**metrics, **of_recovery}

    def retry[T](self, action: Callable[[], T]) -> T:
        """Return the result of an action between two snapshots. After a loss it is called again."""
        depth = self._monitor.depth
        while True:
            start_s = time.monotonic()
            try:
                return action()
            except RunError as error:
                lost: RunError = error
            self._recover(lost, start_s)
            self._monitor.rewind(depth)

    def _settle(self) -> None:
        """Drop steps that the newest checkpoint contains, and move those that a snapshot contains to files.

        Without a checkpoint, the steps before the snapshot are dropped.
        """
        snapshot = self._models.secured_snapshot()
        checkpoint = self._newest_checkpoint()
        if snapshot is None:
            return
        covered = snapshot if checkpoint is None else min(snapshot, step_of(checkpoint))
        while self._steps and self._steps[0].number <= covered:
            self._last_dropped = self._steps.popleft().number
        for step in self._steps:
            if step.number <= snapshot:
                step.move_to_file(self._folder)

    def _begin_snapshot(self, step: int) -> None:
        if step % self._config.snapshot_every_steps == 0:
            self._models.begin_snapshot(step)

    def _recover(self, error: RunError, start_s: float) -> None:
        """Restore the models, and repeat completed steps that the snapshot does not contain.

        Args:
            error: What was lost.
            start_s: When the interrupted attempt began.
        """
        noticed_s = time.monotonic()
        earlier: RunError | None = None
        while True:
            if not self._models.concerns(error) or self._is_again_not_finite(error):
                raise error
            # A start that is too slow is tried once more, because a stopped rank looks the same.
            if _is_slow_start(error) and earlier is not None and _is_slow_start(earlier):
                raise error
            self._count(error, self._write_stacks(error) if isinstance(error, PhaseTimeoutError) else None)
            earlier = error
            for drop in self._drops:
                drop()
            try:
                # pyrefly: ignore[bad-argument-type]  # checked above
                restarted = self._models.recover(error, self._saved)
                repeated = self._repeat(restarted)
                break
            except SnapshotLostError as lost:
                raise SnapshotLostError(
                    f"{lost}; there is no checkpoint either, so the run starts over, and loses "
                    f"{counted(self._step, 'step')}"
                ) from error
            except RunError as again:
                error = again

        now_s = time.monotonic()
        self._lost_s += now_s - start_s
        self._num_recoveries += 1
        totals = self._totals
        self._totals = RecoveryTotals(totals.num_recoveries + 1, totals.lost_s + now_s - start_s)
        _log.warning(
            "step %d: restarted %s from %s in %.1f s%s",
            self._step,
            ", ".join(restarted.roles),
            restarted.describe(),
            now_s - noticed_s,
            f"; repeated step {', '.join(map(str, repeated))}" if repeated else "",
        )

    def _write_stacks(self, error: PhaseTimeoutError) -> str:
        """Write what each rank was doing when a call hung, because the run continues without its message.

        Returns the name of the file in the run's folder.
        """
        name = f"step_{self._step:08d}_{len(self._losses) + 1}.txt"
        with writing(self._folder):
            (self._folder / STACKS_FOLDER).mkdir(exist_ok=True)
            stacks = (
                f"{report.describe()}\n{report.activity.stack}"
                for report in error.reports
                if report.activity is not None
            )
            write_whole(self._folder / STACKS_FOLDER / name, "\n".join([str(error), "", *stacks]))
        return f"{STACKS_FOLDER}/{name}"

    def _is_again_not_finite(self, error: RunError) -> bool:
        """Return whether this step was repeated because it was not finite, and is not finite again."""
        if getattr(error, "error_type", "") != _NOT_FINITE:
            return False
        is_again = self._not_finite_step == self._step
        self._not_finite_step = self._step
        return is_again

    def _repeat(self, restarted: Restarted) -> list[int]:
        """Train the completed steps after the restored one again, and return their numbers."""
        steps = [step for step in self._steps if step.number > restarted.step]
        if restarted.source is not Source.snapshot:
            _log.warning(
                "no snapshot in memory is complete: loaded %s, and repeat %s",
                restarted.describe(),
                counted(len(steps), "completed step"),
            )
            self._models.begin_snapshot(restarted.step)

        for step in steps:
            step.train()
            # After a loss in a save, `run` has begun the snapshot of the current step before.
            self._begin_snapshot(step.number)

        return [step.number for step in steps]

    def _saved(self) -> SavedStep | None:
        """Return the newest checkpoint, or the start of the run, if the steps after it can be repeated.

        Raises:
            CheckpointError: The checkpoint is damaged.
        """
        folder = self._newest_checkpoint()
        step = 0 if folder is None else step_of(folder)
        # All steps after it must be recorded.
        if not self._first_step <= step <= self._step or self._last_dropped > step:
            return None
        if folder is None:
            return SavedStep(step, folder)
        try:
            state = read_state(folder, step)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {older_ones(folder)}") from error
        return SavedStep(step, folder, state.get("weight_version"))

    def _count(self, error: RunError, stacks: str | None) -> None:
        cause = str(error).partition("\n")[0]
        if isinstance(error, PhaseTimeoutError):
            cause = f"{error.problem}; {stacks} shows what each rank was doing"
        loss = f"step {self._step}, node {getattr(error, 'node', '') or 'not known'}: {cause}"
        self._losses.append((self._step, loss))
        recent = [text for step, text in self._losses if step > self._step - _WINDOW_STEPS]
        if len(recent) > self._config.max_restarts:
            raise RecoveryLimitError(
                f"trainer processes were lost {len(recent)} times within "
                f"{counted(_WINDOW_STEPS, 'step')}, more than "
                f"recovery.max_restarts={self._config.max_restarts} allows:\n"
                + "\n".join(f"  {text}" for text in recent)
            ) from error
        _log.warning("lost: %s", loss)


def _is_slow_start(error: RunError) -> bool:
    return isinstance(error, PhaseTimeoutError) and error.method == CONSTRUCTION


class NoRecovery:
    """Runs steps of a run without recovery: a lost process ends it."""

    totals = RecoveryTotals()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def on_loss(self, drop: Callable[[], None]) -> None: ...

    def begin(self) -> None: ...

    def run[T](self, step: int, train: Callable[[T], Metrics], inputs: T) -> Metrics:
        return train(inputs)

    def retry[T](self, action: Callable[[], T]) -> T:
        return action()


def step_recovery(
    config: RunConfig, make_models: Callable[[], ModelRecovery], monitor: Monitor, last_step: int
) -> StepRecovery | NoRecovery:
    """Build the recovery of a run, if it is enabled.

    Args:
        make_models: Builds the recovery of the models.
        last_step: The last step that was made before.
    """
    if not config.recovery.enabled:
        return NoRecovery()
    return StepRecovery(
        config.recovery,
        make_models(),
        monitor,
        last_step,
        Path(config.trainer.output_dir),
        checkpoint_folder(config).latest,
    )
