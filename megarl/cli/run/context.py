"""What a run knows about itself, brought to the command line when it fails. Imports no torch: every command
reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Kept up to date during the run. output_dir: None until the folder is the run's own. log_folder:
    Ray's, the same on each of `nodes`; empty before Ray runs. position: None before there are steps."""

    config: RunConfig
    output_dir: Path | None = None
    log_folder: str = ""
    nodes: Sequence[str] = ()
    position: Position | None = None
    verbose: bool = False  # prints every table when it starts

    @property
    def is_under_way(self) -> bool:
        """It is in a step: what fails is worth a page, whoever can fix it."""
        return self.position is not None and self.position.step is not None


class RunFailedError(Exception):
    """`error` is what failed."""

    def __init__(self, error: Exception, context: RunContext) -> None:
        super().__init__("the run failed")
        self.error = error
        self.context = context


@contextmanager
def run_context_of(config: RunConfig, verbose: bool = False) -> Iterator[RunContext]:
    """Raises RunFailedError from whatever fails inside, and KeyboardInterrupt with what to type next; see
    Interruption."""
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
