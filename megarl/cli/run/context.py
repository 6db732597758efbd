"""The state of a run that the failure report shows.

This module does not import torch, because every command imports it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli.run.end import how_to_resume
from megarl.cli.run.termination import CTRL_C, Termination, interruption
from megarl.config.paths import checkpoint_path
from megarl.config.schema import RunConfig
from megarl.machine.errors import ConfigError
from megarl.machine.folder_lock import locked_folder
from megarl.tracking.run_files import CONFIG_FILE

if TYPE_CHECKING:
    from megarl.trainers.monitor import Position


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
        "checkpoint.dir": checkpoint_path(config),
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
        raise KeyboardInterrupt(how_to_resume(checkpoint_path(config))) from None
    except Exception as error:
        raise RunFailedError(error, context) from error
