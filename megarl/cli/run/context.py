"""The state of a run that the failure report shows.

This module does not import torch, because every command imports it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli.run.end import how_to_resume
from megarl.cli.run.termination import Interruption
from megarl.config.paths import checkpoint_path
from megarl.config.schema import RunConfig

if TYPE_CHECKING:
    from megarl.trainers.monitor import Position


@dataclass
class RunContext:
    """The state of a run, updated while it runs.

    Attributes:
        output_dir: The run's folder; None until the run has claimed it.
        log_folder: Ray's log folder, the same on each of `nodes`; empty before Ray runs.
        nodes: The addresses of the nodes.
        position: The current step and phase; None before the first step.
        verbose: Print all tables when the run starts.
    """

    config: RunConfig
    output_dir: Path | None = None
    log_folder: str = ""
    nodes: Sequence[str] = ()
    position: Position | None = None
    verbose: bool = False

    @property
    def is_under_way(self) -> bool:
        """Whether the run is in a step, so that a failure deserves a full report even for a user error."""
        return self.position is not None and self.position.step is not None


class RunFailedError(Exception):
    """A run has failed with `error`."""

    def __init__(self, error: Exception, context: RunContext) -> None:
        super().__init__("the run failed")
        self.error = error
        self.context = context


@contextmanager
def run_context_of(config: RunConfig, verbose: bool = False) -> Generator[RunContext]:
    """Raise RunFailedError for any failure in the block.

    On Ctrl-C, raise KeyboardInterrupt with how to resume (see Interruption).
    """
    context = RunContext(config, verbose=verbose)
    try:
        with Interruption(print):
            yield context
    except KeyboardInterrupt:
        # Before the run has a folder there is nothing to resume.
        if context.output_dir is None:
            raise
        raise KeyboardInterrupt(how_to_resume(checkpoint_path(config))) from None
    except Exception as error:
        raise RunFailedError(error, context) from error
