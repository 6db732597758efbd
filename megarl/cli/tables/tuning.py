"""The results of a search as tables. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megarl.cli.tables.console import print_line, table, table_of_numbers
from megarl.config.schema import RolloutConfig
from megarl.machine.wording import counted
from megarl.plan.placement.dataflow import phases_of
from megarl.plan.search.search import ClusterResult
from megarl.plan.search.solution import Solution
from megarl.plan.search.space import Reason, Rejections, Space, units_of
from megarl.plan.search.variants import describe
from megarl.plan.step_time.step import PredictedStep

_GIB = 2**30
_LEVELS = ("placements", "layouts", "variants", "engines", "configurations")


def print_results(space: Space, solutions: Sequence[Solution], console: Console) -> None:
    """Print the best configurations: their times, what was chosen, and the time of each phase."""
    console.print(results_table(space, solutions))
    console.print(choices_table(solutions))
    console.print(phases_table(solutions))


def results_table(space: Space, solutions: Sequence[Solution]) -> Table:
    """Return a table of the best configurations, and of the phase in which each loses against the first."""
    size = f"{space.num_nodes} x {counted(space.devices_per_node, 'device')}"
    drawn = table(
        f"Fastest predicted configurations on {size}",
        *("", "step, s", "placement", "GiB", "slower than 1 in"),
    )
    best = solutions[0]

    for number, each in enumerate(solutions, 1):
        drawn.add_row(
            str(number),
            f"{each.seconds:,.4g}",
            _pools(each),
            f"{max(device.peak for device in each.memory) / _GIB:,.1f}",
            "" if each is best else slower_in(each, best),
        )

    drawn.caption = "GiB: the fullest device in its fullest phase"
    return drawn


def choices_table(solutions: Sequence[Solution]) -> Table:
    """Return a table of the layouts of the models, and of the engines."""
    drawn = table("Chosen", "", "role", "layout")

    for number, each in enumerate(solutions, 1):
        first = str(number)
        for name, roles in units_of(each.config).items():
            drawn.add_row(first, name, describe(roles[0]))
            first = ""
        drawn.add_row("", "rollout", _engines(each.config.rollout))

    drawn.caption = (
        "TP, PP, VPP, CP, EP, ETP, DP: tensor, pipeline, virtual pipeline, context, expert, expert tensor "
        "and data parallel size"
    )
    return drawn


def phases_table(solutions: Sequence[Solution]) -> Table:
    """Return a table of the seconds of each phase."""
    phases = [each.step.phases for each in solutions]
    names = list(dict.fromkeys(name for each in phases for name in each))
    columns = {
        str(number): [f"{each[name].seconds:,.1f}" if name in each else "" for name in names]
        for number, each in enumerate(phases, 1)
    }
    return table_of_numbers("Seconds of each phase", columns, names)


def _pools(solution: Solution) -> str:
    pools = ", ".join(f"{' + '.join(pool.units)} {pool.num_devices:,}" for pool in solution.pools)
    return f"{solution.config.placement.strategy.value}: {pools}"


def _engines(rollout: RolloutConfig) -> str:
    expert = f", EP {rollout.expert_parallel_size}" if rollout.expert_parallel_size > 1 else ""
    share = rollout.memory_share_of(rollout.engine)
    memory = "" if share is None else f", {share:.0%} of the memory"
    ahead = f", max_staleness {rollout.max_staleness}" if rollout.max_staleness else ""
    sizes = f"{rollout.num_replicas:,} x TP {rollout.tensor_parallel_size}{expert}"
    return f"{sizes}, {rollout.max_concurrency:,} sequences{memory}{ahead}"


def slower_in(solution: Solution, best: Solution) -> str:
    """Name the phase in which a configuration loses most against the best one, with the part of it."""
    names = [phase.name for phase in phases_of(solution.plan.roles)]
    ours, theirs = solution.step.phases, best.step.phases
    lost = {
        name: ours[name].seconds - theirs[name].seconds for name in names if name in ours and name in theirs
    }
    phase = max(lost, key=lambda name: lost[name])

    # No phase is slower, but fewer phases run at the same time.
    if lost[phase] <= 0:
        return "no phase, but phases follow each other"

    parts = {
        name: seconds - theirs[phase].parts.get(name, 0.0) for name, seconds in ours[phase].parts.items()
    }
    part = max(parts, key=lambda name: parts[name])
    return f"{phase} +{lost[phase]:,.3g} s ({part} +{parts[part]:,.3g})"


def print_configured(step: PredictedStep | None, solutions: Sequence[Solution], console: Console) -> None:
    """Print how much faster the best configuration is than the file's."""
    if step is None:
        print_line(console, "as configured, the run is not valid on these devices")
        return
    best_s = solutions[0].seconds
    faster = f"1 is {step.seconds / best_s:.2f} times as fast"
    print_line(console, f"as configured, a step takes {step.seconds:,.4g} s; {faster}")


def print_rejections(rejections: Rejections, console: Console) -> None:
    """Print what was considered at each level, and why the rest was left out."""
    drawn = table("Considered and left out", "level", "considered", "kept", "reason", "number", "for example")
    for level in _LEVELS:
        considered = rejections.considered.get(level, 0)
        first = (level, f"{considered:,}", f"{rejections.kept(level):,}")
        reasons = [(reason, count) for (name, reason), count in rejections.rejected.items() if name == level]
        for reason, count in sorted(reasons, key=lambda each: -each[1]) or [(None, 0)]:
            example = "" if reason is None else rejections.example(level, reason)
            drawn.add_row(*first, *_reason(reason, count), example)
            first = ("", "", "")
    console.print(drawn)


def _reason(reason: Reason | None, count: int) -> tuple[str, str]:
    return ("", "") if reason is None else (reason.value, f"{count:,}")


def clusters_table(results: Sequence[ClusterResult], tokens: float) -> Table:
    """Return the step time and the throughput of each cluster.

    Args:
        tokens: The prompt and response tokens of a step.
    """
    drawn = table(
        "Predicted step by cluster size",
        "devices",
        "max_staleness",
        "step, s",
        "tokens/s per device",
        "placement",
    )

    for each in results:
        first = (f"{each.num_devices:,}", str(each.max_staleness))
        if each.solution is None:
            drawn.add_row(*first, "-", "-", "no valid configuration")
            continue

        rate = tokens / each.solution.seconds / each.num_devices
        drawn.add_row(*first, f"{each.solution.seconds:,.4g}", f"{rate:,.0f}", _pools(each.solution))

    return drawn


def print_problems(results: Sequence[ClusterResult], console: Console) -> None:
    """Print why clusters have no valid configuration."""
    for each in results:
        if each.problem:
            where = f"{counted(each.num_devices, 'device')}, max_staleness {each.max_staleness}"
            print_line(console, f"{where}: {each.problem}", style="yellow")
