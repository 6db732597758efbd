"""`megarl check CONFIG --plan`: shows the placement of all roles and the memory of each device.

The result is printed as tables and can be saved as a drawing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megarl.cli.tables.console import output_console, print_line, table
from megarl.cli.tables.placement import print_absent, print_placement
from megarl.config.schema import PPOConfig, RunConfig
from megarl.config.validate import read_architectures
from megarl.doctor.checks import load_for_plan
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import DeviceProfile, PhaseTime, assumed_profile
from megarl.plan.step_time.lengths import Lengths, expected_lengths
from megarl.plan.step_time.step import PredictedCosts, PredictedStep

_FORMATS = (".svg", ".png")
_MOST_PARTS = 3


def check_drawing(output: str | None, option: str = "--output") -> None:
    """Raise ValueError for a file that is not a drawing."""
    if output is not None and Path(output).suffix not in _FORMATS:
        raise ValueError(f"{option} {output}: the file name must end in {' or '.join(_FORMATS)}")


def run(config_path: str, overrides: Sequence[str], output: str | None = None) -> int:
    """Print the placement of a valid configuration, and draw it to `output`.

    Raises:
        ConfigError: The configuration has errors.
        ValueError: `output` is not a drawing.
    """
    check_drawing(output)
    loaded = load_for_plan(RunConfig, config_path, overrides)
    config = loaded.config
    plan = plan_placement(config)
    console = output_console()
    architectures, _ = read_architectures(config)
    print_placement(config, plan, architectures, console)
    if isinstance(config, PPOConfig):
        device = assumed_profile(config)
        expected = expected_lengths(config)
        step = PredictedCosts(device, expected).predict_step(config, plan, architectures)
        print_predicted_step(step, device, expected, console)
    for warning in loaded.warnings:
        print_line(console, f"warning: {warning}", style="yellow")
    print_absent(loaded.absent, console)

    if output is not None:
        # Imported here, because it imports matplotlib, which would delay the tables.
        from megarl.cli.tables.plan_drawing import draw_plan

        draw_plan(
            plan, plan_memory(config, plan, architectures), config.placement.device_memory_gb, Path(output)
        )
        print_line(console, f"drawn to {output}")

    return 0


def print_predicted_step(
    step: PredictedStep, device: DeviceProfile, lengths: Lengths, console: Console
) -> None:
    """Print the predicted step, and what the prediction assumes."""
    console.print(step_table(step))
    print_line(
        console,
        f"assuming {device.name}, prompts of {lengths.prompt:,} and responses of {lengths.response:,.0f} "
        f"tokens on average; see placement.device_profile",
        style="dim",
    )


def step_table(step: PredictedStep) -> Table:
    """Return the schedule of a step: when each phase begins, how long it takes, and its largest parts."""
    title = f"Predicted step: {step.seconds:,.4g} s, {step.tokens_per_device_s:,.0f} tokens/s per device"
    drawn = table(
        title, "phase", "pools", "begins s", "seconds", "share", "largest parts", wraps="largest parts"
    )

    for phase in step.schedule:
        drawn.add_row(
            phase.name,
            ", ".join(phase.pools),
            f"{phase.start_s:,.1f}",
            f"{phase.time.seconds:,.1f}",
            f"{phase.time.seconds / step.seconds:.0%}",
            largest_parts(phase.time),
        )

    end_s = max(phase.end_s for phase in step.schedule)
    drawn.caption = (
        f"and {step.seconds - end_s:,.1f} s of the driver: requests, scoring and metrics of samples"
    )
    return drawn


def fit_table(
    run_dir: str,
    fitted: DeviceProfile,
    phases: Mapping[str, tuple[float, float, float]],
    lengths: Lengths,
) -> Table:
    """Return the measured phases of a run with their predictions before and after the fit (`fit_run`)."""
    drawn = table(f"Phases of {run_dir}, s", "phase", "measured", "predicted before", "predicted after")

    for name, seconds in phases.items():
        drawn.add_row(name, *(f"{each:,.4g}" for each in seconds))

    constants = {**asdict(fitted.efficiency), "sample_ms": fitted.sample_ms}
    changed = ", ".join(f"{name} {value:.3g}" for name, value in constants.items())
    drawn.caption = (
        f"medians of the last steps, prompts of {lengths.prompt:,} and responses of "
        f"{lengths.response:,.0f} tokens on average\nfitted: {changed}"
    )
    return drawn


def largest_parts(time: PhaseTime) -> str:
    """Name the largest parts of a phase with their shares."""
    parts = sorted(time.parts.items(), key=lambda part: -part[1])[:_MOST_PARTS]
    return ", ".join(f"{name} {seconds / time.seconds:.0%}" for name, seconds in parts)
