"""Resumes a command from a checkpoint, and ends it.

It loads the state, truncates the run's files, and reports differences, and at the end what the run has done.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megarl.checkpoints.object_storage import ObjectStorage, Uploads
from megarl.checkpoints.run_folder import step_of
from megarl.cli.run.context import RunFailedError, locked_folders, run_elsewhere
from megarl.cli.run.session import Session, of_another_run, read_summary, write_summary
from megarl.cli.tables.console import print_line
from megarl.config.load import dump_config, plain_values
from megarl.config.roles import model_roles
from megarl.config.schema import RunConfig
from megarl.controller.restarts import NodeLostError
from megarl.doctor.checks import load_for_run
from megarl.machine.errors import CheckpointError, ConfigError, counted
from megarl.roles.model_snapshots import ModelSnapshots, model_snapshots
from megarl.roles.saved_models import SavedModels
from megarl.tracking.loggers import cut_after
from megarl.tracking.run_files import CONFIG_FILE, SUMMARY_FILE, writing
from megarl.trainers.best_so_far import ends_early
from megarl.trainers.checkpoint import Checkpointer, best_checkpoint
from megarl.trainers.driver_states import driver_states
from megarl.trainers.monitor import Monitor
from megarl.trainers.recovery import NoRecovery, StepRecovery
from megarl.trainers.resume import Resume, checkpoint_folder, older_ones

_log = logging.getLogger(__name__)


def is_complete(config: RunConfig, resume: Resume | None) -> bool:
    """Whether the run is already complete. If so, print how to train further.

    Raises:
        ValueError: The run ended without a checkpoint, and more steps are requested.
    """
    output_dir = Path(config.trainer.output_dir)
    steps = config.trainer.total_steps
    summary = read_summary(output_dir)

    if summary is None:
        # A run that was killed between its last step and its end still has to write the trained model.
        return False

    # The run has ended before, and may have been given more steps since.
    if resume is not None and resume.is_own:
        why = ends_early(config.trainer.early_stop, resume.state)
        if resume.step < steps and why is None:
            return False
        print(
            f"the run in {output_dir} is complete: {resume.checkpoint} is the checkpoint of step "
            f"{resume.step}. {_to_train_on(config, why)}"
        )
        return True

    if of_another_run(output_dir, config):
        return False  # claim_output_dir refuses the folder
    weights = (
        f"start from its weights: model.path={output_dir / 'huggingface'}"
        if config.checkpoint.save_hf
        else "start again"
    )
    further = (
        f"It has no checkpoint (checkpoint.at_end was false); to train further, {weights}, with "
        f"another trainer.output_dir"
    )

    if summary["steps"] < steps and "stopped_early" not in summary:
        raise ValueError(
            f"the run in {output_dir} ended after step {summary['steps']}, but {steps} steps are requested. "
            f"{further}"
        )

    print(f"the run in {output_dir} is complete: it ended after step {summary['steps']}. {further}")
    return True


def _to_train_on(config: RunConfig, why_it_ended_early: str | None) -> str:
    if why_it_ended_early is None:
        return f"To train further, raise trainer.total_steps (now {config.trainer.total_steps})"
    return (
        f"It ended early: {why_it_ended_early}. To train further, raise trainer.early_stop.patience "
        f"(now {config.trainer.early_stop.patience}), or set trainer.early_stop.metric=null"
    )


def restore_models(
    session: Session, config: RunConfig, models: SavedModels, resume: Resume | None
) -> ModelSnapshots:
    """Load the models from the checkpoint or snapshot, and truncate the run's files to its step.

    Returns the snapshots of the run, which are released with the session.

    Raises:
        CheckpointError: The checkpoint is damaged.
        SnapshotLostError: The snapshot was lost in the meantime.
    """
    snapshots = model_snapshots(config, models, None if resume is None else resume.snapshot)
    session.at_end.push(
        lambda kind, error, trace: snapshots.close(keeps_files=continues_on_fewer_nodes(config, error))
    )
    if resume is None:
        return snapshots
    for change in resume.differences:
        print_line(
            session.console,
            f"changed since {resume.checkpoint.name}: {change.key}={change.now} (was {change.before})",
        )
    start_s = time.monotonic()

    if resume.snapshot is not None:
        # Another driver finds the files by the layout in this configuration.
        snapshots.load_taken(partial(_write_layout, config, resume.checkpoint))
    else:
        try:
            models.load(resume.checkpoint)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {older_ones(resume.checkpoint)}") from error

    if resume.is_own:
        # Later checkpoints, metrics and samples belong to steps that will be repeated.
        folder = checkpoint_folder(config)
        if resume.snapshot is None:
            folder.point_at(resume.checkpoint)  # later checkpoints are dropped
        folder.point_at_best(best_checkpoint(config, resume.state))
        cut_after(session.output_dir, resume.step)
        (session.output_dir / SUMMARY_FILE).unlink(missing_ok=True)

    seconds = time.monotonic() - start_s
    source = resume.checkpoint if resume.snapshot is None else "the snapshot in memory"
    print_line(session.console, f"resumed from {source} after step {resume.step}, loaded in {seconds:.1f} s")
    return snapshots


def _write_layout(config: RunConfig, state: Path) -> None:
    """Write the configuration to the driver's part of a snapshot that one of another layout has replaced."""
    if not state.is_dir():
        return  # newer ones have replaced it, too

    def change(folder: Path) -> None:
        shutil.copytree(state, folder, dirs_exist_ok=True)
        dump_config(config, folder / CONFIG_FILE)

    try:
        driver_states(config).write(step_of(state), change)
    except OSError as error:
        _log.warning(
            "%s: %s; a new driver cannot continue after step %d", error.filename, error, step_of(state)
        )


def open_checkpoints(
    session: Session,
    config: RunConfig,
    models: SavedModels,
    monitor: Monitor,
    resume: Resume | None,
    recovery: StepRecovery | NoRecovery,
) -> Checkpointer:
    say = partial(print_line, session.console)
    uploads = None
    if config.checkpoint.upload is not None:
        storage = ObjectStorage(config.checkpoint.upload)
        uploads = Uploads(storage, say)
        # The previous attempt may have ended before it copied its last checkpoint.
        newest = checkpoint_folder(config).latest() if resume is not None and resume.is_own else None
        if newest is not None and storage.latest() != newest.name:
            uploads.add(newest)

    # States of steps that are made again, or whose snapshots are released, must not be used.
    states = driver_states(config)
    snapshot = None if resume is None else resume.snapshot
    states.clear(after=-1 if snapshot is None else snapshot.step)

    checkpoints = Checkpointer(
        config,
        checkpoint_folder(config),
        models,
        monitor,
        resumed=None if resume is None else resume.state,
        from_memory=snapshot is not None,
        driver_states=states if isinstance(recovery, StepRecovery) else None,
        is_told_to_end=lambda: session.termination.requested,
        uploads=uploads,
        say=say,
        recovery=recovery,
    )
    session.at_last.push(
        lambda kind, error, trace: checkpoints.close(
            keeps_driver_states=continues_on_fewer_nodes(config, error)
        )
    )
    return checkpoints


def print_end(
    session: Session, checkpoints: Checkpointer, recovery: StepRecovery | NoRecovery
) -> dict[str, Any]:
    """Print whether the run stopped early, which checkpoint is the best, and its recoveries.

    Returns these for the summary.
    """
    told: dict[str, Any] = {}
    if isinstance(recovery, StepRecovery):
        totals = recovery.totals
        goodput = totals.goodput(checkpoints.seconds)
        told["recovery"] = {
            "num_recoveries": totals.num_recoveries,
            "lost_s": round(totals.lost_s, 1),
            "goodput": round(goodput, 4),
            "excluded_nodes": list(totals.excluded_nodes),
        }
        if totals.num_recoveries:
            print_line(
                session.console,
                f"{counted(totals.num_recoveries, 'recovery')}, {totals.lost_s:.1f} s lost, goodput "
                f"{goodput:.1%}",
            )

    if why := checkpoints.stopped_early:
        told["stopped_early"] = why
        print_line(session.console, f"stopped early, after step {checkpoints.last_step}: {why}")

    if best := checkpoints.best:
        told["best"] = best._asdict()
        print_line(
            session.console, f"best {best.metric}: {best.value:.6g}, in the checkpoint of step {best.step}"
        )

    return told


def finish(
    session: Session,
    config: RunConfig,
    save_hf: Callable[[Path, str], None],
    checkpoints: Checkpointer,
    recovery: StepRecovery | NoRecovery,
    told: Mapping[str, Any],
) -> int:
    """Export the trained model, write the summary, and return the exit code.

    Args:
        save_hf: Saves the trained model as a Hugging Face folder, given the folder and `model.path`.
        told: What the summary has besides the steps and seconds, the recoveries and the best checkpoint.
    """
    # A run that was told to stop is resumed later, so it is not exported.
    if (step := checkpoints.stopped_after) is not None:
        saved = f"after step {step}, which is saved" if step else "before its first step"
        cause = session.termination.cause
        print_line(session.console, f"stopped by {cause} {saved}; run the same command to resume from there")
        return session.termination.status

    if config.checkpoint.save_hf:
        folder = session.output_dir / "huggingface"
        with writing(session.output_dir):
            recovery.retry(lambda: save_hf(folder, config.model.path))
        print_line(session.console, f"the trained model is in {folder}")

    # The summary is written last, because it marks the run as complete.
    numbers = {"steps": checkpoints.last_step, "seconds": round(checkpoints.seconds, 1)}
    of_end = print_end(session, checkpoints, recovery)
    write_summary(session.output_dir, {**numbers, **told, **of_end})
    return 0


# ---- after the loss of a node: the run starts again in this process, on the nodes that are left, from the
# newest snapshot in memory, or from its last checkpoint. Both can be loaded in any layout.


def on_fewer_nodes(config: RunConfig) -> list[str] | None:
    """Return the overrides with which a run fits on one node less, or on as many fewer as are needed.

    Every role with a layout of its own keeps its number of replicas per node. None if there is no such
    number of nodes.
    """
    num_nodes = config.placement.num_nodes
    sizes = {
        f"{role.parallel_key}.data_parallel_size": role.parallel.data_parallel_size
        for role in model_roles(config)
    }

    for fewer in range(num_nodes - 1, 0, -1):
        if all(size * fewer % num_nodes == 0 for size in sizes.values()):
            of_roles = {key: size * fewer // num_nodes for key, size in sizes.items()}
            return [f"placement.num_nodes={fewer}", *_overrides(config, of_roles)]

    return None


def _overrides(config: RunConfig, sizes: Mapping[str, int]) -> list[str]:
    """Return overrides that set these keys. The teachers of data sources are given as a whole list."""
    changed = [f"{key}={size}" for key, size in sizes.items() if not key.startswith("teachers[")]
    if len(changed) == len(sizes):
        return changed
    teachers = plain_values(config)["teachers"]
    for index, teacher in enumerate(teachers):
        key = f"teachers[{index}].parallel.data_parallel_size"
        teacher["parallel"]["data_parallel_size"] = sizes[key]
    return [*changed, f"teachers={json.dumps(teachers)}"]


def continues_on_fewer_nodes(config: RunConfig, error: BaseException | None) -> bool:
    """Return whether a run that ends with `error` starts again with fewer replicas."""
    is_allowed = config.recovery.enabled and config.recovery.allow_fewer_replicas
    return is_allowed and isinstance(error, NodeLostError) and on_fewer_nodes(config) is not None


def run_with_fewer_replicas[Run: RunConfig](
    schema: type[Run], source: str, overrides: Sequence[str], train: Callable[[Run], int]
) -> int:
    """Load a configuration and train, after the loss of a node with fewer replicas if that is allowed.

    Raises:
        ValueError: The configuration is invalid, or another process uses a folder of the run. Raised before
            anything is started or changed.
        RunFailedError: The run has failed for another reason, or its batch cannot be divided among fewer
            replicas.
    """
    config = load_for_run(schema, source, overrides)
    if elsewhere := run_elsewhere(source, config):
        _log.warning("%s", elsewhere)
    with locked_folders(config):
        while True:
            try:
                return train(config)
            except RunFailedError as failed:
                if not continues_on_fewer_nodes(config, failed.error):
                    raise
                smaller = on_fewer_nodes(config) or []
                overrides = [*overrides, *smaller]
                try:
                    config = load_for_run(schema, source, overrides)
                except ConfigError as error:
                    raise failed from error
                _log.warning("%s\nthe run continues with %s", failed.error, " ".join(smaller))
