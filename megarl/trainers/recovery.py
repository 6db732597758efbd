"""Repeats what a lost trainer process interrupted, so that the run continues as if nothing had happened.

The work of a step is a function that can be called again. After a loss, all models return to the newest
snapshot, and the steps since then are repeated with the same samples.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megarl.checkpoints.run_folder import step_of
from megarl.config.schema import RecoveryConfig, RunConfig
from megarl.machine.errors import RunError
from megarl.roles.model_recovery import ModelRecovery
from megarl.roles.model_snapshots import SnapshotLostError
from megarl.trainers.resume import checkpoint_folder

_log = logging.getLogger(__name__)

Metrics = Mapping[str, float]


class RecoveryLimitError(RunError):
    """Trainer processes were lost too often within a few steps. The message lists the losses."""

    hint = (
        "if the same step fails again and again, look for the cause in the message and in the logs",
        "a node that is named in each line is probably bad: take it out of the cluster",
        "if the losses are unrelated, allow more: {recovery.max_restarts, recovery.window_steps}",
    )


class LostRanks(NamedTuple):
    """The loss of trainer processes during a step."""

    step: int
    cause: str
    nodes: tuple[str, ...]

    def describe(self) -> str:
        return f"step {self.step}, node {', '.join(self.nodes) or 'not known'}: {self.cause}"


class RewindableMonitor(Protocol):
    """The part of the monitor that recovery uses."""

    def record(self, metrics: Metrics) -> None: ...

    def rewind(self, depth: int) -> None: ...

    @property
    def depth(self) -> int: ...


@dataclass
class _Step:
    number: int
    train: Callable[[], Metrics]


class StepRecovery:
    """Runs steps, and repeats those that a lost process interrupted.

    Args:
        config: The limits.
        models: Restarts and restores the models.
        monitor: The monitor of the run.
        last_step: The last step that was made before.
        saved_step: Returns the step of the newest checkpoint, None if there is none.
    """

    def __init__(
        self,
        config: RecoveryConfig,
        models: ModelRecovery,
        monitor: RewindableMonitor,
        last_step: int,
        saved_step: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._config = config
        self._models = models
        self._monitor = monitor
        self._step = last_step
        self._saved_step = saved_step
        self._open: deque[_Step] = deque()  # steps after the newest complete snapshot
        self._losses: list[LostRanks] = []
        self._lost_s = 0.0
        self._num_recoveries = 0  # since the metrics were recorded last

    @property
    def num_recoveries(self) -> int:
        """The number of recoveries in this process of the run."""
        return len(self._losses)

    def begin(self) -> None:
        """Take the first snapshot, of the state before the first step."""
        self._models.begin_snapshot(self._step)

    def run(self, step: int, train: Callable[[], Metrics]) -> Metrics:
        """Train a step and return its metrics, with those of the recoveries during it.

        Args:
            train: Trains the step. Calling it again repeats the step with the same samples.

        Raises:
            RecoveryLimitError: Processes were lost too often.
            SnapshotLostError: No snapshot is left.
            Exception: Any other error of `train`.
        """
        self._step = step
        current = _Step(step, train)
        metrics = self.retry(train)
        self._open.append(current)
        if step % self._config.snapshot_every_steps == 0:
            self.retry(lambda: self._models.begin_snapshot(step))
        self._forget_covered()

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
            try:
                return action()
            except RunError as error:
                lost: RunError = error
            self._recover(lost)
            self._monitor.rewind(depth)

    def _recover(self, error: RunError) -> None:
        """Restore the models, and repeat completed steps that the snapshot does not contain."""
        start_s = time.monotonic()
        while True:
            if not self._models.concerns(error):
                raise error
            self._count(error)
            try:
                restarted = self._models.recover(error)  # pyrefly: ignore[bad-argument-type]  # checked above
                repeated = [each for each in self._open if each.number > restarted.step]
                for each in repeated:
                    each.train()
                break
            except SnapshotLostError as lost:
                raise SnapshotLostError(f"{lost}; {self._cost()}") from error
            except RunError as again:
                error = again

        seconds = time.monotonic() - start_s
        self._lost_s += seconds
        self._num_recoveries += 1
        _log.warning(
            "step %d: restarted %s from the snapshot of step %d in %.1f s%s",
            self._step,
            ", ".join(restarted.roles),
            restarted.step,
            seconds,
            f"; repeated step {', '.join(str(each.number) for each in repeated)}" if repeated else "",
        )

    def _cost(self) -> str:
        """Describe what it costs to resume from the newest checkpoint."""
        saved = self._saved_step()
        if saved is None:
            return f"there is no checkpoint either, so the run starts over, and loses {self._step} steps"
        return (
            f"the same command resumes from the checkpoint of step {saved}, and repeats the steps up to "
            f"{self._step}"
        )

    def _count(self, error: RunError) -> None:
        cause = str(error).partition("\n")[0]
        nodes = (node,) if (node := getattr(error, "node", "")) else ()
        self._losses.append(loss := LostRanks(self._step, cause, nodes))
        recent = [each for each in self._losses if each.step > self._step - self._config.window_steps]
        if len(recent) > self._config.max_restarts:
            raise RecoveryLimitError(
                f"trainer processes were lost {len(recent)} times within {self._config.window_steps} steps, "
                f"more than recovery.max_restarts={self._config.max_restarts} allows:\n"
                + "\n".join(f"  {each.describe()}" for each in recent)
            ) from error
        _log.warning("lost: %s", loss.describe())

    def _forget_covered(self) -> None:
        """Drop the samples of steps that a complete snapshot contains."""
        newest = self._models.newest_snapshot()
        while newest is not None and self._open and self._open[0].number <= newest:
            self._open.popleft()


class NoRecovery:
    """Runs steps of a run without recovery: a lost process ends it."""

    num_recoveries = 0

    def begin(self) -> None: ...

    def run(self, step: int, train: Callable[[], Metrics]) -> Metrics:
        return train()

    def retry[T](self, action: Callable[[], T]) -> T:
        return action()


def step_recovery(
    config: RunConfig, make_models: Callable[[], ModelRecovery], monitor: RewindableMonitor, last_step: int
) -> StepRecovery | NoRecovery:
    """Build the recovery of a run, if it is enabled.

    Args:
        make_models: Builds the recovery of the models.
        last_step: The last step that was made before.
    """
    if not config.recovery.enabled:
        return NoRecovery()

    def saved_step() -> int | None:
        latest = checkpoint_folder(config).latest()
        return None if latest is None else step_of(latest)

    return StepRecovery(config.recovery, make_models(), monitor, last_step, saved_step)
