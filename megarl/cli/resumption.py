"""How a command goes on from a checkpoint, and how it says so: the state into the models, the run's files cut, what is different."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megarl.cli.session import Session
from megarl.cli.termination import TERMINATED
from megarl.config.errors import CheckpointError
from megarl.config.schema import PPOConfig, SFTConfig
from megarl.roles.saved_models import SavedModels
from megarl.tracking.run_files import SUMMARY_FILE
from megarl.tracking.truncate_logs import cut_after
from megarl.trainers.checkpoint import Checkpointer
from megarl.trainers.monitor import Monitor
from megarl.trainers.resume import Resume, checkpoint_folder, older_ones


def is_complete(config: PPOConfig | SFTConfig, resume: Resume | None) -> bool:
    """Nothing is left to do, and it says so."""
    if resume is None or not resume.is_own or resume.step < config.trainer.total_steps:
        return False
    summary = Path(config.trainer.output_dir) / SUMMARY_FILE
    if summary.exists():
        print(f"the run is complete: {summary} is of step {resume.step}. Raise trainer.total_steps to train on")
    return summary.exists()


def load_checkpoint(session: Session, config: PPOConfig | SFTConfig, models: SavedModels, resume: Resume | None) -> None:
    """The models continue from the checkpoint, and the run's files end where it was written. Raises CheckpointError."""
    if resume is None:
        return
    _print_differences(session.console, resume)
    start_s = time.monotonic()
    try:
        models.load(resume.checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {older_ones(resume.checkpoint)}") from error
    if resume.is_own:
        checkpoint_folder(config).point_at(resume.checkpoint)  # what is after it is given up
        cut_after(session.output_dir, resume.step)
        (session.output_dir / SUMMARY_FILE).unlink(missing_ok=True)
    seconds = time.monotonic() - start_s
    session.console.print(f"resumed from {resume.checkpoint} after step {resume.step}, loaded in {seconds:.1f} s", soft_wrap=True)


def open_checkpoints(
    session: Session, config: PPOConfig | SFTConfig, models: SavedModels, monitor: Monitor, resume: Resume | None
) -> Checkpointer:
    return Checkpointer(
        config,
        checkpoint_folder(config),
        models,
        monitor,
        first_step=1 if resume is None else resume.step + 1,
        seconds_before=0.0 if resume is None else resume.state["seconds"],
        is_told_to_end=lambda: session.termination.requested,
        say=lambda text: session.console.print(text, soft_wrap=True, highlight=False),
    )


def say_stopped(session: Session, checkpoints: Checkpointer) -> int:
    """The exit status of a run that was told to end."""
    step = checkpoints.stopped_after
    saved = f"after step {step}, which is saved" if step else "before its first step"
    session.console.print(f"ended by SIGTERM {saved}; the same command goes on from there", soft_wrap=True, highlight=False)
    return TERMINATED


def _print_differences(console: Console, resume: Resume) -> None:
    if not resume.differences:
        return
    table = Table(title=f"Different from when {resume.checkpoint.name} was written", title_justify="left")
    for column in ("key", "then", "now"):
        table.add_column(column, overflow="fold")
    for change in resume.differences:
        table.add_row(change.key, str(change.before), str(change.now))
    console.print(table)
