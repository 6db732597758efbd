"""`megarl check CONFIG --simulate`: estimates step time and idle time.

It compares several values of `rollout.max_staleness` and splits of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megarl.cli.inspect.check import check_drawing
from megarl.cli.tables.console import output_console, print_line, table
from megarl.config.load import schema_of
from megarl.config.schema import PPOConfig
from megarl.doctor.checks import load_for_plan
from megarl.machine.errors import counted
from megarl.plan.placement.plan import plan_placement

if TYPE_CHECKING:
    from megarl.rehearse.simulation.forecast import Forecasts
    from megarl.rehearse.simulation.run import Script


def run(
    config_path: str,
    overrides: Sequence[str],
    output: str | None,
    lengths: str | None,
    run_dir: str | None,
    training_s: float | None,
    tokens_per_s: float | None,
) -> None:
    """Simulate the run, print the results, and draw them if `output` is set.

    Raises:
        ConfigError: The configuration has errors.
        ValueError: An option is missing or cannot be simulated.
    """
    check_drawing(output)
    if schema_of(config_path, overrides) is not PPOConfig:
        raise ValueError(
            "--simulate: supervised fine-tuning generates nothing; give the configuration of a reinforcement "
            "learning run"
        )

    config = load_for_plan(PPOConfig, config_path, overrides).config
    # Imported here, because it imports torch, which would delay the errors of the configuration.
    from megarl.rehearse.simulation.forecast import STALENESSES, forecast, script_of, splits_of

    plan = plan_placement(config)
    console = output_console()
    splits = splits_of(config, plan)
    (sampled, times) = _work(config, lengths, run_dir, training_s, tokens_per_s)
    script = replace(script_of(config, sampled), **times)
    forecasts = {
        (split, max_staleness): forecast(script, split, max_staleness)
        for split in splits
        for max_staleness in STALENESSES
    }
    _print(config, script, forecasts, console)

    if output is not None:
        # Imported here, because it imports matplotlib, which would delay the table.
        from megarl.cli.tables.plan_drawing import draw_forecasts

        draw_forecasts(forecasts, Path(output))
        print_line(console, f"drawn to {output}")


def _work(
    config: PPOConfig,
    lengths: str | None,
    run_dir: str | None,
    training_s: float | None,
    tokens_per_s: float | None,
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the response lengths of each prompt's samples, and the times by their names in a script."""
    from megarl.rehearse.simulation.forecast import log_normal, measured  # imports torch

    for name, value in (("--training-s", training_s), ("--tokens-per-s", tokens_per_s)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} {value:g}: must be above 0")

    wanted = {"--lengths": lengths, "--training-s": training_s, "--tokens-per-s": tokens_per_s}
    missing = [name for name, value in wanted.items() if value is None]
    if run_dir is None and missing:
        raise ValueError(
            f"--simulate requires {', '.join(missing)}, or --from with the folder of a run that has "
            f"measured them"
        )
    sampled, times = ([], {}) if run_dir is None else measured(Path(run_dir))

    # Options replace measured values.
    if lengths is not None:
        sampled = log_normal(*_mean_and_most(lengths, config), config.rollout.n)
    if training_s is not None:
        times["training_s"] = training_s
    if tokens_per_s is not None:
        times["token_s"] = 1 / tokens_per_s

    return sampled, times


def _mean_and_most(text: str, config: PPOConfig) -> tuple[float, int]:
    mean, comma, most = text.partition(",")
    try:
        return float(mean), int(most) if comma else config.data.max_response_length
    except ValueError:
        raise ValueError(f"--lengths {text}: must be MEAN or MEAN,MAX in tokens, such as 500,4096") from None


def _print(config: PPOConfig, script: Script, forecasts: Forecasts, console: Console) -> None:
    own = config.rollout.num_replicas
    drawn = table(
        "Simulated steps",
        ("trainer", "engines", "k", "step, s", "trainer idle", "slots in use", "mean staleness"),
        [
            (
                f"{split.trainer_devices:,}",
                f"{split.num_engines:,}{' *' if split.num_engines == own else ''}",
                str(max_staleness),
                f"{outcome.step_s:,.4g}",
                f"{outcome.waiting:.0%}",
                f"{outcome.busy:.0%}",
                f"{outcome.mean_age:.2f}",
            )
            for (split, max_staleness), outcome in forecasts.items()
        ],
        caption="trainer: devices; *: as configured; k: rollout.max_staleness; staleness: in weight versions",
    )

    # For equal step times, fresher weights are better.
    best = min(forecasts, key=lambda each: (forecasts[each].step_s, each[1]))
    drawn.rows[list(forecasts).index(best)].style = "bold"
    console.print(drawn)

    # The configured value may lie between two simulated ones.
    nearest = max(each for _, each in forecasts if each <= config.rollout.max_staleness)
    now_s = next(
        outcome.step_s
        for (split, max_staleness), outcome in forecasts.items()
        if split.num_engines == own and max_staleness == nearest
    )
    split, max_staleness = best
    fastest = forecasts[best]
    shortest = (
        f"{counted(split.num_engines, 'engine')} and "
        f"rollout.max_staleness={max_staleness}, {fastest.step_s:,.4g} s per step"
    )
    print_line(
        console,
        f"fastest: {shortest}: {now_s / fastest.step_s:.2f} times the speed of the configured setup",
    )
    training = (
        f"{script.training_s:,.4g} s of training on the configured devices, inversely scaled for others"
    )
    tokens = f"{1 / script.token_s:,.4g} tokens/s per sample, independent of the engine's load"
    print_line(console, f"assuming {training}; {tokens}; {script.push_s:,.4g} s per weight sync", style="dim")
