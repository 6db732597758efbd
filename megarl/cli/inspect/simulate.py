"""`megarl plan CONFIG --simulate`: step time and idleness for several `rollout.max_staleness` and splits of
devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from megarl.cli.inspect.plan import check_drawing
from megarl.cli.tables.console import output_console, print_line, table
from megarl.config.schema import PPOConfig, RunConfig
from megarl.doctor.checked_config import load_checked_anywhere
from megarl.machine.wording import counted
from megarl.placement.plan import plan_placement
from megarl.simulation.forecast import (
    STALENESSES,
    Forecast,
    Times,
    Work,
    forecast,
    log_normal,
    measured,
    splits_of,
)


class Given(NamedTuple):
    """As the command line has it: `--lengths`, `--from`, `--training-s`, `--tokens-per-s`."""

    lengths: str | None = None
    run_dir: str | None = None
    training_s: float | None = None
    tokens_per_s: float | None = None


def run(
    config_path: str,
    overrides: Sequence[str],
    schema: type[RunConfig],
    options: tuple[str | None, str | None, float | None, float | None],
    output: str | None = None,
) -> int:
    """options: as in Given. Raises ConfigError, and ValueError for what is given and cannot be simulated, or
    is not given."""
    check_drawing(output)
    if schema is not PPOConfig:
        raise ValueError(
            "--simulate: a run of fine-tuning generates nothing; give one of reinforcement learning"
        )

    config = load_checked_anywhere(PPOConfig, config_path, overrides).config
    plan = plan_placement(config)
    console = output_console()
    splits = splits_of(config, plan)
    (lengths, times) = _work(config, Given(*options))
    work = Work.of(config, lengths)
    forecasts = [
        forecast(work, times, split, max_staleness) for split in splits for max_staleness in STALENESSES
    ]
    _print(config, times, forecasts, console)

    if output is not None:
        # Here, because it imports matplotlib; the table shall not wait for it.
        from megarl.cli.tables.plan_drawing import draw_forecasts

        draw_forecasts(forecasts, Path(output))
        print_line(console, f"drawn to {output}")

    return 0


def _work(config: PPOConfig, given: Given) -> tuple[list[list[int]], Times]:
    for name, value in (("--training-s", given.training_s), ("--tokens-per-s", given.tokens_per_s)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} {value:g}: must be above 0")

    if given.run_dir is not None:
        lengths, times = measured(Path(given.run_dir))
    else:
        wanted = {
            "--lengths": given.lengths,
            "--training-s": given.training_s,
            "--tokens-per-s": given.tokens_per_s,
        }
        if missing := [name for name, value in wanted.items() if value is None]:
            raise ValueError(
                f"--simulate needs {', '.join(missing)}, or --from with the folder of a run that has "
                f"measured them"
            )
        lengths = []
        times = Times(0.0, 0.0)

    # Options that are given replace what was measured.
    if given.lengths is not None:
        lengths = log_normal(*_mean_and_most(given.lengths, config), config.rollout.n)
    if given.training_s is not None:
        times = times._replace(training_s=given.training_s)
    if given.tokens_per_s is not None:
        times = times._replace(token_s=1 / given.tokens_per_s)

    return lengths, times


def _mean_and_most(text: str, config: PPOConfig) -> tuple[float, int]:
    mean, comma, most = text.partition(",")
    try:
        return float(mean), int(most) if comma else config.data.max_response_length
    except ValueError:
        raise ValueError(f"--lengths {text}: is no mean with a most, as 500,4096 (tokens)") from None


def _print(config: PPOConfig, times: Times, forecasts: Sequence[Forecast], console: Console) -> None:
    own = config.rollout.num_replicas
    drawn = table(
        "Simulated steps",
        *("trainer", "engines", "k", "step, s", "trainer waits", "slots in use", "mean age"),
        wraps="mean age",
    )
    # Of equally short steps, the one with the fresher weights is better.
    best = min(forecasts, key=lambda one: (one.step_s, one.max_staleness))

    for one in forecasts:
        places = (
            f"{one.split.trainer_devices:,}",
            f"{one.split.num_engines:,}{' *' if one.split.num_engines == own else ''}",
        )
        numbers = (
            f"{one.step_s:,.4g}",
            f"{one.trainer_idle:.0%}",
            f"{one.slots_in_use:.0%}",
            f"{one.mean_age:.2f}",
        )
        drawn.add_row(*places, str(one.max_staleness), *numbers, style="bold" if one is best else None)

    drawn.caption = (
        "trainer: devices; *: as configured; k: rollout.max_staleness; age: in versions of the weights"
    )
    console.print(drawn)
    # The simulated values have gaps, so the configured one may lie between two.
    nearest = max(each for each in STALENESSES if each <= config.rollout.max_staleness)
    now = next(one for one in forecasts if one.split.num_engines == own and one.max_staleness == nearest)
    shortest = (
        f"{counted(best.split.num_engines, 'engine')} and "
        f"rollout.max_staleness={best.max_staleness}, {best.step_s:,.4g} s a step"
    )
    print_line(
        console, f"shortest: {shortest}: {now.step_s / best.step_s:.2f} times as many steps as configured"
    )
    training = f"{times.training_s:,.4g} s of training on the configured devices, in inverse ratio on others"
    tokens = f"{1 / times.token_s:,.4g} tokens/s of a sample, whatever else its engine writes"
    print_line(console, f"with {training}; {tokens}; {times.push_s:,.4g} s a push", style="dim")
