"""`megarl check CONFIG`: reports all errors before anything starts, and prints what the run would do."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.cli.tables.console import output_console, print_line
from megarl.cli.tables.placement import print_absent
from megarl.cli.tables.run import print_run
from megarl.config.schema import PPOConfig, RunConfig
from megarl.doctor.checked_config import load_checked_anywhere
from megarl.machine.wording import counted
from megarl.placement.plan import plan_placement


def run(
    config_path: str, overrides: Sequence[str], schema: type[RunConfig] = PPOConfig, fast: bool = False
) -> int:
    """Print models, arithmetic and placement of a valid configuration, and return 0.

    Args:
        fast: Read no input files except the models' `config.json`, and plan no weight sync.

    Raises:
        ConfigError: The configuration has errors.
    """
    if fast:
        config, absent, warnings = load_checked_anywhere(schema, config_path, overrides)
    else:
        from megarl.doctor.examined_config import load_examined_anywhere  # imports torch

        config, absent, warnings = load_examined_anywhere(schema, config_path, overrides)

    console = output_console()
    print_run(config, console, with_push=not fast, is_here=not absent)
    if not fast and isinstance(config, PPOConfig):
        from megarl.cli.tables.judges import print_judge_prompts  # imports torch

        print_judge_prompts(config, console)
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, highlight=False, markup=False)
    plan = plan_placement(config)
    print_absent(absent, console)
    verdict = "OK, except for files that are not on this machine" if absent else "OK"
    print_line(
        console,
        f"{config_path}: {verdict} ({counted(plan.num_processes, 'process')}, "
        f"{counted(plan.num_devices, 'device')})",
    )

    return 0
