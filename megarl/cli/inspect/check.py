"""`megarl check CONFIG`: reports all errors before anything starts, and prints what the run would do.

With `--plan`, it shows the placement of all roles and the memory of each device, as tables or as a drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.load import is_on_cuda
from megarl.config.schema import PPOConfig, RunConfig
from megarl.config.validate import read_architectures
from megarl.doctor.checks import load_for_plan
from megarl.machine.errors import counted
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.placement.plan import plan_placement

# What prints a result is imported once a configuration has no errors: a mistyped key is reported in half the
# time.
if TYPE_CHECKING:
    from rich.console import Console

_MORE = (
    "more: --all (every table), --plan (memory and predicted step), --simulate (asynchronous training), "
    "--dry-run (a role on fake devices), --machine (this node)"
)
_FORMATS = (".svg", ".png")


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

    # After the configuration, so that its errors come soon.
    from megarl.cli.tables.console import output_console, print_line, print_lines
    from megarl.cli.tables.placement import print_absent

    console = output_console()
    plan = plan_placement(config)
    status = "OK, except for files that are not on this machine" if loaded.absent else "OK"
    processes, devices = counted(len(plan.processes), "process"), counted(plan.num_devices, "device")
    verdict = f"{config_path}: {status} ({processes}, {devices}; {_planned_for(config, plan)})"

    if shows_all:
        from megarl.cli.tables.run import print_run

        print_run(config, console, with_push=not fast, is_here=not loaded.absent)
    else:
        from megarl.cli.tables.summary import print_summary

        print_line(console, verdict)
        print_summary(config, console, with_push=not fast, is_here=not loaded.absent)
    if not fast and isinstance(config, PPOConfig):
        print_judge_prompts(config, console)
    print_lines(console, loaded.warnings, "warning: ", "yellow")
    print_absent(loaded.absent, console)
    print_line(console, verdict if shows_all else _MORE)


def print_judge_prompts(config: PPOConfig, console: Console) -> None:
    """Print the prompt of each judge for the first row of the training data, if both are on this machine."""
    if not config.reward.judges:
        return
    # Imported here, because these modules import torch.
    from megarl.cli.tables.console import print_line, print_lines
    from megarl.doctor.agents_and_judges import first_sample, prompt
    from megarl.rewards.judges import JudgePromptError

    if (sample := first_sample(config.data)) is None:
        return
    for judge in config.reward.judges:
        try:
            text = prompt(judge, sample)
        except JudgePromptError:  # `megarl check` reports it
            continue
        print_line(console, f"prompt of judge {judge.name} for the first row:")
        print_lines(console, text.splitlines(), "    ")


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


# ---- the placement and the predicted step


def check_drawing(output: str | None, option: str = "--output") -> None:
    """Raise ValueError for a file that is not a drawing."""
    if output is not None and Path(output).suffix not in _FORMATS:
        raise ValueError(f"{option} {output}: the file name must end in {' or '.join(_FORMATS)}")


def show_plan(config_path: str, overrides: Sequence[str], output: str | None = None) -> None:
    """Print the placement of a valid configuration, and draw it to `output`.

    Raises:
        ConfigError: The configuration has errors.
        ValueError: `output` is not a drawing.
    """
    check_drawing(output)
    loaded = load_for_plan(RunConfig, config_path, overrides)
    config = loaded.config

    # After the configuration, so that its errors come soon.
    from megarl.cli.tables.console import output_console, print_line, print_lines
    from megarl.cli.tables.placement import print_absent, print_placement, print_predicted_step
    from megarl.plan.step_time.device import assumed_profile
    from megarl.plan.step_time.lengths import expected_lengths
    from megarl.plan.step_time.step import PredictedCosts

    plan = plan_placement(config)
    console = output_console()
    architectures, _ = read_architectures(config)
    print_placement(config, plan, architectures, console)
    if isinstance(config, PPOConfig):
        device = assumed_profile(config)
        expected = expected_lengths(config)
        step = PredictedCosts(device, expected).predict_step(config, plan, architectures)
        print_predicted_step(step, device, expected, console)
    print_lines(console, loaded.warnings, "warning: ", "yellow")
    print_absent(loaded.absent, console)

    if output is not None:
        # Imported here, because it imports matplotlib, which would delay the tables.
        from megarl.cli.tables.plan_drawing import draw_plan

        draw_plan(
            plan, plan_memory(config, plan, architectures), config.placement.device_memory_gb, Path(output)
        )
        print_line(console, f"drawn to {output}")
