"""`megarl check CONFIG`: reports all errors before anything starts, and prints what the run would do."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from megarl.cli.tables.console import output_console, print_line
from megarl.cli.tables.placement import print_absent
from megarl.cli.tables.run import print_run
from megarl.cli.tables.summary import print_summary
from megarl.config.load import is_on_cuda
from megarl.config.schema import PPOConfig, RunConfig
from megarl.config.validate import read_architectures
from megarl.doctor.checks import load_for_plan
from megarl.machine.wording import counted
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.placement.plan import plan_placement

_MORE = (
    "more: --all (every table), --plan (memory and predicted step), --simulate (asynchronous training), "
    "--dry-run (a role on fake devices), --machine (this node)"
)


def run(config_path: str, overrides: Sequence[str], fast: bool = False, shows_all: bool = False) -> None:
    """Print the verdict on a valid configuration and what the run needs.

    Args:
        fast: Read no input files except the models' `config.json`, and plan no weight sync.
        shows_all: Print all tables, with the verdict in the last line.

    Raises:
        ConfigError: The configuration has errors.
    """
    loaded = load_for_plan(RunConfig, config_path, overrides, reads_inputs=not fast)
    config = loaded.config

    console = output_console()
    plan = plan_placement(config)
    status = "OK, except for files that are not on this machine" if loaded.absent else "OK"
    processes, devices = counted(plan.num_processes, "process"), counted(plan.num_devices, "device")
    verdict = f"{config_path}: {status} ({processes}, {devices}; {_planned_for(config, plan)})"

    if shows_all:
        print_run(config, console, with_push=not fast, is_here=not loaded.absent)
    else:
        print_line(console, verdict)
        print_summary(config, console, with_push=not fast, is_here=not loaded.absent)
    if not fast and isinstance(config, PPOConfig):
        print_judge_prompts(config, console)
    for warning in loaded.warnings:
        print_line(console, f"warning: {warning}", style="yellow")
    print_absent(loaded.absent, console)
    print_line(console, verdict if shows_all else _MORE)


def print_judge_prompts(config: PPOConfig, console: Console) -> None:
    """Print the prompt of each judge for the first row of the training data, if both are on this machine."""
    if not config.reward.judges:
        return
    # Imported here, because these modules import torch.
    from megarl.doctor.judges import first_sample, prompt
    from megarl.rewards.judges import JudgePromptError

    if (sample := first_sample(config.data)) is None:
        return
    for judge in config.reward.judges:
        try:
            text = prompt(judge, sample)
        except JudgePromptError:  # `megarl check` reports it
            continue
        print_line(console, f"prompt of judge {judge.name} for the first row:")
        for line in text.splitlines():
            print_line(console, f"    {line}")


def _planned_for(config: RunConfig, plan: PlacementPlan) -> str:
    """Describe the devices that the plan is for, and the memory of the fullest one."""
    dtype = config.model.dtype.value
    limit_gb = config.placement.device_memory_gb
    if not is_on_cuda(config.device) or limit_gb is None:
        return f"planned for {'CUDA' if is_on_cuda(config.device) else 'a CPU'} in {dtype}"

    memory = plan_memory(config, plan, read_architectures(config)[0])
    fullest_gb = max(device.peak for device in memory) / 2**30
    # A larger plan gets here only with placement.over_budget=warn.
    fits = "of" if fullest_gb <= limit_gb else "MORE THAN"
    return f"planned for CUDA in {dtype}, {fullest_gb:,.1f} {fits} {limit_gb:g} GiB"
