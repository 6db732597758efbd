"""Draws a predicted step as a timeline, and the step time over cluster sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megarl.cli.tables.plan_drawing import COLORS, write_figure
from megarl.search.cluster_sizes import ClusterResult
from megarl.step_time.step import PredictedStep

_LEAST_LABELED = 0.06  # share of the step below which a bar has no label


def draw_step(step: PredictedStep, path: Path) -> None:
    """Draw the phases of a step over time, with one lane for each pool."""
    pools = list(dict.fromkeys(pool for phase in step.schedule for pool in phase.pools))
    names = list(dict.fromkeys(phase.name for phase in step.schedule))
    figure = Figure(figsize=(9.0, 1.6 + 0.6 * len(pools)))
    FigureCanvasAgg(figure)
    frame = figure.subplots()

    for phase in step.schedule:
        color = COLORS[names.index(phase.name) % len(COLORS)]
        for pool in phase.pools:
            lane = pools.index(pool)
            frame.barh(lane, phase.time.seconds, left=phase.start_s, height=0.6, color=color)
            # The text of a short phase would cover its neighbors.
            if phase.time.seconds > _LEAST_LABELED * step.seconds:
                middle = phase.start_s + phase.time.seconds / 2
                label = f"{phase.name}\n{phase.time.seconds:,.1f} s"
                frame.text(middle, lane, label, ha="center", va="center", fontsize=8, color="white")

    frame.set_yticks(range(len(pools)), pools)
    frame.invert_yaxis()
    frame.set_xlim(0, step.seconds)
    frame.set_xlabel("seconds")
    frame.set_title(f"predicted step: {step.seconds:,.4g} s", fontsize=11)
    frame.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    write_figure(figure, path)


def draw_clusters(results: Sequence[ClusterResult], tokens: float, path: Path) -> None:
    """Draw the step time and the throughput per device over cluster sizes, one line per max_staleness.

    Args:
        tokens: The prompt and response tokens of a step.
        path: The file, whose suffix determines the format.
    """
    figure = Figure(figsize=(7.0, 6.5))
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)

    for number, max_staleness in enumerate(dict.fromkeys(each.max_staleness for each in results)):
        found = [
            (each.num_devices, each.solution.seconds)
            for each in results
            if each.max_staleness == max_staleness and each.solution is not None
        ]
        devices = [size for size, _ in found]
        style = {
            "marker": "o",
            "color": COLORS[number % len(COLORS)],
            "label": f"max_staleness {max_staleness}",
        }
        above.plot(devices, [seconds for _, seconds in found], **style)
        below.plot(devices, [tokens / seconds / size for size, seconds in found], **style)

    for frame, label in ((above, "step time, s"), (below, "tokens/s per device")):
        frame.set_ylabel(label, fontsize=9)
        frame.set_xscale("log", base=2)
        frame.set_ylim(bottom=0)
        frame.spines[["top", "right"]].set_visible(False)

    sizes = list(dict.fromkeys(each.num_devices for each in results))
    below.set_xticks(sizes, [f"{size:,}" for size in sizes])
    below.set_xlabel("devices")
    above.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    write_figure(figure, path)
