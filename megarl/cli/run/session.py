"""The environment of a run's trainer: the output folder, the processes, the monitor, and a clean shutdown."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from megarl.checkpoints.object_storage import ObjectStorage
from megarl.cli.run.context import RunContext, Termination
from megarl.cli.tables.console import output_console, print_line
from megarl.cli.tables.run import BFLOAT16_ON_A_CPU, print_run
from megarl.cli.tables.summary import PLAN_FILE, print_summary, title_of, write_plan
from megarl.config.load import dump_config, is_on_cuda, other_run, plain_values
from megarl.config.roles import model_roles
from megarl.config.rules.reward import has_scores
from megarl.config.schema import Device, DType, PPOConfig, RunConfig
from megarl.config.validate import read_architectures
from megarl.controller.cluster import (
    await_ended_daemon,
    daemons_last_words,
    log_folder,
    node_addresses,
    num_cluster_gpus,
    shutdown,
    start_ray,
)
from megarl.controller.environment import Where, describe
from megarl.controller.errors import RayEndedError
from megarl.controller.group import RoleGroup
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.data.chat_clock import saved_chat_time, set_chat_time
from megarl.data.loader import TrainingRows
from megarl.data.tokenizer import load_tokenizer
from megarl.machine.errors import RunError, counted
from megarl.machine.files import write_whole
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.plan.placement.plan import plan_placement
from megarl.plan.placement.transport import joins_weight_groups
from megarl.plan.step_time.device import profile_of
from megarl.rollout.driver.rollout import Rollout
from megarl.tracking.loggers import Tracker, clear
from megarl.tracking.progress import ProgressBar
from megarl.tracking.run_files import CONFIG_FILE, FAILURE_FILE, METRICS_FILE, SUMMARY_FILE, writing
from megarl.tracking.timeline import Timeline
from megarl.tracking.tracked_run import TrackedRun
from megarl.trainers.monitor import Monitor, Position
from megarl.trainers.resume import Resume, checkpoint_folder
from megarl.trainers.step_observers import StepProfiler, Stragglers, predicted_metrics
from megarl.weights.sync.sync import PUSHED_FOLDERS

ENVIRONMENT_FILE = "environment.txt"  # file in `trainer.output_dir`


@dataclass(frozen=True, kw_only=True)
class Session:
    output_dir: Path
    processes: tuple[Device, ResourcePoolManager]  # the device, cpu or cuda, and the pools
    console: Console
    termination: Termination
    position: Position
    at_end: ExitStack  # closed before the processes end
    at_last: ExitStack  # closed after the processes have ended


@contextmanager
def open_session(context: RunContext, resume: Resume | None) -> Generator[Session]:
    """Create the run's folder with the resolved `config.yaml`, and start the processes.

    The processes end with the block.

    Raises:
        ValueError: The folder contains another run.
        CheckpointError: Checkpoints cannot be written.
        InsufficientResourcesError: The cluster does not have the resources of the pools.
    """
    config = context.config
    position = Position()
    output_dir = Path(config.trainer.output_dir)
    console = output_console()
    # Claim and test the folder before any process is started.
    claim_output_dir(output_dir, config, resume, console)
    (output_dir / FAILURE_FILE).unlink(missing_ok=True)  # left by the previous attempt
    context.output_dir = output_dir
    context.position = position
    checkpoint_folder(config).prepare()
    if config.checkpoint.upload is not None:
        ObjectStorage(config.checkpoint.upload).check_writable()
    dump_config(config, output_dir / CONFIG_FILE)
    write_plan(config, output_dir)

    if context.verbose:
        print_run(config, console)
    else:
        print_summary(config, console, with_push=False, is_here=True)
        print_line(console, f"for all tables see {output_dir / PLAN_FILE} or use --verbose", style="dim")

    with (
        ExitStack() as at_last,
        ray_processes(context, console) as started,
        ExitStack() as at_end,
        Termination(partial(print_line, console)) as termination,
    ):
        context.termination = termination
        yield Session(
            output_dir=output_dir,
            processes=started,
            console=console,
            termination=termination,
            position=position,
            at_end=at_end,
            at_last=at_last,
        )


def claim_output_dir(output_dir: Path, config: RunConfig, resume: Resume | None, console: Console) -> None:
    """Create the output folder, or check that it belongs to this run.

    The files of an earlier attempt without a checkpoint are removed, because the run starts over.
    """
    output_dir.mkdir(parents=True, exist_ok=True)

    # Remove folders of a process that failed or was killed during a weight sync through files.
    for folder in output_dir.glob(PUSHED_FOLDERS):
        shutil.rmtree(folder)
    metrics = output_dir / METRICS_FILE
    where = output_dir.absolute()
    if resume is not None and resume.is_own:
        print_line(console, f"resuming the run in {where} after step {resume.step}")
        return
    if not metrics.exists():
        print_line(console, f"new run in {where}{'' if resume is None else f', from {resume.checkpoint}'}")
        return
    num_steps = metrics.read_bytes().count(b"\n")

    # Metrics of different runs in one file could not be distinguished later.
    if num_steps and (why := of_another_run(output_dir, config)):
        raise ValueError(
            f"trainer.output_dir={str(output_dir)!r} contains the metrics of another run ({why}); remove the "
            f"folder or give a new one, so that two runs are not mixed"
        )

    print_line(
        console,
        f"the run in {where} ended before its first checkpoint, after {counted(num_steps, 'logged step')}; "
        "starting over",
        style="yellow",
    )
    clear(output_dir)


def of_another_run(output_dir: Path, config: RunConfig) -> str | None:
    """Explain why the folder belongs to another run than the configuration; empty if it does not."""
    saved = output_dir / CONFIG_FILE
    try:
        changes = other_run(saved, config)
    except (OSError, ValueError) as error:
        return f"{CONFIG_FILE}: {error}"

    return "; ".join(f"{change.key} was {change.before!r}, is {change.now!r}" for change in changes)


def read_summary(output_dir: Path) -> dict[str, Any] | None:
    """Return the summary that `write_summary` wrote; None if no run has completed in the folder.

    Raises ValueError if it is damaged.
    """
    path = output_dir / SUMMARY_FILE
    try:
        summary = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error}); remove it") from error

    if not isinstance(summary, dict) or not isinstance(summary.get("steps"), int):
        raise ValueError(f"{path}: has no number of steps; remove it")
    return summary


def read_models(
    config: RunConfig, resume: Resume | None = None
) -> tuple[dict[str, Architecture], PreTrainedTokenizerBase]:
    """Read the architectures of a run by role, and the tokenizer.

    A chat template that writes the date uses the date of the run's start, also after resuming.
    """
    architectures = {
        role.name: read_architecture(role.path, config.model.trust_remote_code)
        for role in model_roles(config)
    }
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    if resume is not None:
        set_chat_time(tokenizer, saved_chat_time(resume.state["data"]))
    return architectures, tokenizer


def report_filtered(console: Console, data_sets: Mapping[str, TrainingRows]) -> None:
    """Print how many rows `overlong=filter` skipped, if any."""
    for name, data_set in data_sets.items():
        if data_set.num_filtered:
            total = len(data_set) + data_set.num_filtered
            console.print(
                f"{name}: skipped {data_set.num_filtered:,} of {total:,} rows that are longer than the "
                f"configuration allows",
                style="yellow",
            )


def open_monitor(
    session: Session, config: RunConfig, groups: Sequence[RoleGroup | Rollout], resume: Resume | None
) -> Monitor:
    has_rewards = not isinstance(config, PPOConfig) or has_scores(config)
    progress = ProgressBar(
        title_of(config),
        config.trainer.total_steps,
        session.console,
        done=0 if resume is None else resume.step,
        has_rewards=has_rewards,
    )

    # A live progress bar already shows what the console logger would print.
    names = [name for name in config.tracking.loggers if name != "console" or not session.console.is_terminal]
    run = TrackedRun(
        output_dir=session.output_dir,
        project=config.tracking.project,
        name=config.tracking.run_name or session.output_dir.resolve().name,
        config=plain_values(config),
        total_steps=config.trainer.total_steps,
        has_rewards=has_rewards,
        resumed_after=resume.step if resume is not None and resume.is_own else None,
        now=session.position.now,
        prometheus_host=config.tracking.prometheus_host,
        prometheus_port=config.tracking.prometheus_port,
        otlp_endpoint=config.tracking.otlp_endpoint,
    )
    plan = plan_placement(config)
    device = profile_of(config)
    optional = (
        {"predict": partial(predicted_metrics, config, plan, read_architectures(config)[0], device)}
        if isinstance(config, PPOConfig) and device is not None
        else {}
    )

    return Monitor(
        groups,
        Tracker(names, run),
        Timeline(session.output_dir),
        progress,
        plan.num_devices,
        session.position,
        profile=StepProfiler(config.profile, groups, session.output_dir).step,
        watch=Stragglers(config.recovery.straggler_factor, groups).see,
        **optional,
    )


def write_summary(output_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json` atomically. Raises RunError if that fails."""
    with writing(output_dir):
        write_whole(output_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


# ---- processes


@contextmanager
def ray_processes(context: RunContext, console: Console) -> Generator[tuple[Device, ResourcePoolManager]]:
    """Start or join Ray, and reserve the pools. Everything that was started ends with the block.

    Yields the device of the run, which is cpu or cuda, and the pools.

    Raises:
        InsufficientResourcesError: The cluster does not have the resources of the pools.
        RayEndedError: The block raised a RunError because a daemon of the run's own Ray has ended.
    """
    config = context.config
    plan = plan_placement(context.config)
    # Remember the user's environment before Ray starts.
    given = dict(os.environ)
    console.print(f"starting Ray for {counted(len(plan.processes), 'process')}", style="dim")
    start_ray(
        num_cpus=plan.num_cpus, num_gpus=torch.cuda.device_count() if config.device is not Device.cpu else 0
    )

    try:
        context.log_folder = log_folder()
        context.nodes = node_addresses()
        device = config.device
        # The cluster may have GPUs although the driver's machine has none.
        if device is Device.auto:
            device = Device.cuda if num_cluster_gpus() else Device.cpu
        pools = ResourcePoolManager.of_plan(plan, device is Device.cuda)
        joins_engines = joins_weight_groups(config, plan)
        environment = _environment(
            device,
            given,
            [where for where in Where if joins_engines or where is not Where.weight_group_workers],
        )
        if context.output_dir is not None:
            write_whole(context.output_dir / ENVIRONMENT_FILE, environment)
        if context.verbose:
            print_line(console, environment)
        # Only now is it known that the device is CPU.
        if device is Device.cpu and config.model.dtype is DType.bfloat16 and is_on_cuda(config.device):
            print_line(console, f"warning: {BFLOAT16_ON_A_CPU}", style="yellow")
        pools.create_resource_pool()
        yield device, pools
    except RunError as error:
        # An error of ranks or engines that Ray has taken with it does not name the cause.
        if not isinstance(error, RayEndedError) and (daemon := await_ended_daemon()):
            raise RayEndedError(daemon, daemons_last_words()) from error
        raise
    finally:
        shutdown()


def _environment(device: Device, given: Mapping[str, str], places: Sequence[Where]) -> str:
    """Return the environment variables of the run's processes, one per line."""
    rows = describe(device is Device.cuda, places, given)
    return "".join(f"{name}={value}  # {source}\n" for name, value, source in rows)
