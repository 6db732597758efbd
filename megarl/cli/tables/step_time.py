"""The predicted time of a step as a table. This module does not import torch."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from megarl.cli.tables.console import print_line, table
from megarl.plan.step_time.device import DeviceProfile
from megarl.plan.step_time.lengths import Lengths
from megarl.plan.step_time.measured_run import RunFit
from megarl.plan.step_time.phase_time import PhaseTime
from megarl.plan.step_time.step import PredictedStep

_MOST_PARTS = 3


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


def fit_table(run_dir: str, fit: RunFit) -> Table:
    """Return the measured phases of a run with their predictions before and after the fit."""
    drawn = table(f"Phases of {run_dir}, s", "phase", "measured", "predicted before", "predicted after")

    for phase in fit.phases:
        drawn.add_row(
            phase.name, *(f"{each:,.4g}" for each in (phase.measured_s, phase.before_s, phase.after_s))
        )

    constants = {**asdict(fit.device.efficiency), "sample_ms": fit.device.sample_ms}
    fitted = ", ".join(f"{name} {value:.3g}" for name, value in constants.items())
    drawn.caption = (
        f"medians of the last steps, prompts of {fit.lengths.prompt:,} and responses of "
        f"{fit.lengths.response:,.0f} tokens on average\nfitted: {fitted}"
    )
    return drawn


def largest_parts(time: PhaseTime) -> str:
    """Name the largest parts of a phase with their shares."""
    parts = sorted(time.parts.items(), key=lambda part: -part[1])[:_MOST_PARTS]
    return ", ".join(f"{name} {seconds / time.seconds:.0%}" for name, seconds in parts)
