"""The state of a run that the failure report shows, how it has ended, and the signals that end it.

SIGTERM, which schedulers send, and Ctrl-C end it after its step and a checkpoint. A second signal ends it
immediately, as does Ctrl-C before the first step.

This module does not import torch, because every command imports it.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from megarl.checkpoints.run_folder import CheckpointFolder
from megarl.config.schema import RunConfig
from megarl.machine.errors import CheckpointError, ConfigError
from megarl.machine.files import parse_yaml, read_json_object
from megarl.machine.folder_lock import locked_folder
from megarl.tracking.run_files import CONFIG_FILE, FAILURE_FILE, SUMMARY_FILE

if TYPE_CHECKING:
    from megarl.trainers.monitor import Position

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# Exit codes, as a shell reports them.
TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
# Names of the causes.
SIGTERM = "SIGTERM"
CTRL_C = "Ctrl-C"
_CAUSE = re.compile(r"^what +(\S.*)$", re.MULTILINE)  # the cause in the failure report


@dataclass
class RunContext:
    """The state of a run, updated while it runs.

    Attributes:
        output_dir: The run's folder; None until the run has claimed it.
        log_folder: Ray's log folder, the same on each of `nodes`; empty before Ray runs.
        position: The current step and phase; None before the first step.
        termination: Requests to end after the step; None before the run can take one.
        verbose: Print all tables when the run starts.
    """

    config: RunConfig
    output_dir: Path | None = None
    log_folder: str = ""
    nodes: Sequence[str] = ()
    position: Position | None = None
    termination: Termination | None = None
    verbose: bool = False

    @property
    def is_under_way(self) -> bool:
        """Whether the run is in a step, so that a failure deserves a full report even for a user error."""
        return self.position is not None and self.position.step is not None

    def end_after_step(self) -> bool:
        """Ask the run to end after its step, on Ctrl-C.

        Returns False before its first step, when there is nothing to save, or if it was asked before.
        """
        position = self.position
        has_begun = position is not None and (self.is_under_way or "step" in position.spent_s)
        if self.termination is None or self.termination.requested or not has_begun:
            return False
        self.termination.request(CTRL_C)
        return True


class RunFailedError(Exception):
    """A run has failed with `error`."""

    def __init__(self, error: Exception, context: RunContext) -> None:
        super().__init__("the run failed")
        self.error = error
        self.context = context


def run_elsewhere(source: str, config: RunConfig) -> str | None:
    """Explain where an existing run is that the user may have meant, if this starts a new one.

    A relative output folder is looked for in the parent folders of the configuration's file, one of which was
    the current folder when the run was started.
    """
    given = Path(config.trainer.output_dir)
    file = Path(source)
    if given.is_absolute() or (given / CONFIG_FILE).exists() or not file.is_file():
        return None
    found = next((each for each in file.resolve().parents if (each / given / CONFIG_FILE).is_file()), None)
    if found is None:
        return None
    return (
        f"trainer.output_dir={str(given)!r} is relative to the current folder, {Path.cwd()}, which has no "
        f"such run, but {found} has one: to resume it, run the command there, or add "
        f"trainer.output_dir={found / given}"
    )


@contextmanager
def locked_folders(config: RunConfig) -> Generator[None]:
    """Keep other processes out of the folders of a run within the block.

    Everything else that a run does with its folders relies on it: it removes what a killed run has left,
    truncates logs, and takes over snapshots in memory.

    Raises:
        FolderInUseError: Another process uses one of them. Nothing has been changed.
        ConfigError: One of them cannot be written.
    """
    folders = {
        "trainer.output_dir": Path(config.trainer.output_dir),
        "checkpoint.dir": config.checkpoint_path,
    }
    with ExitStack() as locks:
        for key, folder in folders.items():
            try:
                locks.enter_context(locked_folder(folder, key))
            except OSError as error:
                why = f"{folder}: cannot be written ({error.strerror or error}); give a writable folder"
                raise ConfigError(key, [why]) from error
        yield


@contextmanager
def run_context_of(config: RunConfig, verbose: bool = False) -> Generator[RunContext]:
    """Raise RunFailedError for any failure in the block.

    A Ctrl-C that does not wait for the step raises KeyboardInterrupt with how to resume (see interruption).
    """
    context = RunContext(config, verbose=verbose)
    try:
        with interruption(print, context.end_after_step):
            yield context
    except KeyboardInterrupt:
        # Before the run has a folder there is nothing to resume.
        if context.output_dir is None:
            raise
        raise KeyboardInterrupt(how_to_resume(config.checkpoint_path)) from None
    except Exception as error:
        raise RunFailedError(error, context) from error


# ---- how a run has ended, and how to continue


def how_to_resume(checkpoints: Path) -> str:
    """Describe the newest checkpoint in this folder and how to continue from it."""
    try:
        latest = CheckpointFolder(checkpoints).latest()
    except CheckpointError as error:
        return f"its checkpoints are damaged: {error}"

    if latest is None:
        return f"no checkpoint is saved in {checkpoints}; the same command starts from the beginning"
    return f"the newest checkpoint is {latest}; the same command resumes from it"


def how_to_resume_in(run_dir: Path) -> str:
    """Describe the newest checkpoint of the run in this folder and how to continue from it.

    The checkpoints are in `checkpoints` in its folder, or in the folder that its configuration gives.
    """
    path = run_dir / CONFIG_FILE
    damage = f"{path} is damaged, so the folder of its checkpoints is unknown"
    try:
        values = parse_yaml(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        return f"{damage}: {error}"

    section = values.get("checkpoint", {}) if isinstance(values, dict) else None
    given = section.get("dir") if isinstance(section, dict) else section
    if not isinstance(section, dict) or not isinstance(given, str | None):
        return damage
    return how_to_resume(run_dir / "checkpoints" if given is None else Path(given))


def result_of(run_dir: Path) -> str:
    """Describe the result of a complete run in a few words; empty if it is unknown."""
    path = run_dir / SUMMARY_FILE
    if not path.is_file():
        return ""
    try:
        summary = read_json_object(path)
    except ValueError as error:
        return f"{path} is damaged: it {error}"

    validation: Any = summary.get("validation", {})
    if not isinstance(validation, dict) or not all(
        isinstance(score, int | float | None) for score in validation.values()
    ):
        return f"{path} is damaged: validation is {str(validation)[:60]!r}, but must be a mapping of numbers"

    parts = [f"stopped early: {summary['stopped_early']}"] if "stopped_early" in summary else []
    scores = {when: score for when, score in validation.items() if score is not None}
    if scores:
        parts.append("validation " + ", ".join(f"{score:.4g} {when}" for when, score in scores.items()))

    return "; ".join(parts)


def cause_of(run_dir: Path) -> str:
    """Return the cause in the failure report of a run; empty if there is no report."""
    path = run_dir / FAILURE_FILE
    found = _CAUSE.search(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    return found[1] if found else ""


# ---- signals


@contextmanager
def ends_by_signal(end_children: Callable[[], object]) -> Generator[None]:
    """Make SIGTERM, SIGHUP and Ctrl-C end the child processes before this process, within the block.

    SIGTERM and SIGHUP raise SystemExit with the status that a shell reports, Ctrl-C raises KeyboardInterrupt.
    Further signals do not interrupt the cleanup. `Termination` and `interruption` replace these handlers
    while a run is active.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        # Further signals must not interrupt the cleanup, also those that `interruption` handles now.
        for each in _ENDING:
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, lambda number, frame: None)
        end_children()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()  # only the main thread may set handlers
    with _handled_by(on_signal, _ENDING if is_main else ()):
        yield


@contextmanager
def _handled_by(
    on_signal: Callable[[int, FrameType | None], None], numbers: Sequence[signal.Signals]
) -> Generator[None]:
    """Handle signals within the block. Ignored ones (nohup, background jobs of a shell) stay ignored."""
    before = {number: signal.getsignal(number) for number in numbers}
    handled = {number: each for number, each in before.items() if each is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)


class Termination:
    """Records a request to end after the step: SIGTERM within its block, or what calls `request`.

    Enter it after Ray was started, which installs its own handler. The previous handler is restored at the
    end.

    Attributes:
        cause: The first request; empty if there is none.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: Any = None
        self.cause = ""

    def __enter__(self) -> Termination:
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    @property
    def requested(self) -> bool:
        return bool(self.cause)

    @property
    def status(self) -> int:
        """The exit code of a run that was asked to end."""
        return INTERRUPTED if self.cause == CTRL_C else TERMINATED

    def request(self, cause: str) -> None:
        """Ask the run to end after its step and a checkpoint."""
        self.cause = cause
        self._say(
            f"{cause}: the run ends after this step and its checkpoint; a second {cause} ends it immediately"
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._say("SIGTERM again: exiting now, without saving")
            raise SystemExit(TERMINATED)
        self.request(SIGTERM)


@contextmanager
def interruption(
    say: Callable[[str], None], request_end: Callable[[], bool] = lambda: False
) -> Generator[None]:
    """Shut down a run in order on Ctrl-C or on loss of the terminal (SIGHUP), within the block.

    The first Ctrl-C asks the run to end after its step, if it can; the next one raises KeyboardInterrupt. A
    further one during the shutdown does not interrupt it. One more ends this process immediately; its child
    processes then end by themselves, as when it is killed.

    Args:
        say: Prints a line.
        request_end: Asks the run to end after its step; returns False if it cannot, or was asked before.
    """
    times = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal times
        if times == 0 and number == signal.SIGINT and request_end():
            return
        times += 1
        if times == 1 and number == signal.SIGHUP:
            raise SystemExit(128 + number)
        if times == 1:
            raise KeyboardInterrupt
        if times > 2:
            os._exit(INTERRUPTED)
        say("Ctrl-C again: the run is shutting down; one more Ctrl-C exits without waiting for its processes")

    with _handled_by(on_signal, (signal.SIGINT, signal.SIGHUP)):
        yield
