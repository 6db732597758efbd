"""`megarl plan CONFIG`: shows the placement of all roles and the memory of each device.

The result is printed as tables and can be saved as a drawing.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from megarl.cli.tables.console import output_console, print_line
from megarl.cli.tables.placement import print_absent, print_placement
from megarl.cli.tables.step_time import print_predicted_step
from megarl.config.schema import PPOConfig, RunConfig
from megarl.config.validate import read_architectures
from megarl.doctor.checks import load_for_plan
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import assumed_profile
from megarl.plan.step_time.lengths import expected_lengths
from megarl.plan.step_time.step import predict_step

_FORMATS = (".svg", ".png")


def check_drawing(output: str | None, option: str = "--output") -> None:
    """Raise ValueError for a file that is not a drawing."""
    if output is not None and Path(output).suffix not in _FORMATS:
        raise ValueError(f"{option} {output}: the file name must end in {' or '.join(_FORMATS)}")


def refuse_without_simulation(*options: object) -> None:
    """Raise ValueError if one of the options of a simulation is given."""
    if any(value is not None for value in options):
        raise ValueError("--lengths, --from, --training-s and --tokens-per-s require --simulate")


def run(
    config_path: str,
    overrides: Sequence[str],
    simulate: bool = False,
    output: str | None = None,
    lengths: str | None = None,
    training_s: float | None = None,
    tokens_per_s: float | None = None,
    run_dir: str | None = None,
) -> int:
    """Print the placement of a valid configuration or a simulation of its steps, and draw it to `output`.

    Raises:
        ConfigError: The configuration has errors.
        ValueError: `output` is not a drawing.
    """
    if simulate:
        return importlib.import_module("megarl.cli.inspect.simulate").run(
            config_path,
            overrides,
            output,
            lengths=lengths,
            run_dir=run_dir,
            training_s=training_s,
            tokens_per_s=tokens_per_s,
        )
    refuse_without_simulation(lengths, run_dir, training_s, tokens_per_s)
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
        print_predicted_step(
            predict_step(config, plan, architectures, device, expected), device, expected, console
        )
    for warning in loaded.warnings:
        print_line(console, f"warning: {warning}", style="yellow")
    print_absent(loaded.absent, console)

    if output is not None:
        # Imported here, because it imports matplotlib, which would delay the tables.
        from megarl.cli.tables.plan_drawing import draw_plan

        draw_plan(
            plan, plan_memory(config, plan, architectures), config.placement.device_memory_gb, Path(output)
        )
        console.print(f"drawn to {output}", highlight=False, soft_wrap=True)

    return 0
