"""Draws placements, predicted steps, step times over cluster sizes, and the results of simulations.

In a placement, nodes are frames, and devices are groups of bars, one bar per phase, colored by role.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megarl.machine.files import write_whole
from megarl.plan.placement.memory import DeviceMemory
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.search.search import ClusterResult
from megarl.plan.step_time.step import PredictedStep
from megarl.rehearse.simulation.forecast import Forecasts

_MOST_DEVICES = 32  # limit of drawn devices
COLORS = ("#4c78a8", "#72b7b2", "#e45756", "#b279a2", "#f58518", "#9d755d")
_GIB = 2**30

_LEAST_LABELED = 0.06  # share of the step below which a bar has no label


def draw_plan(
    plan: PlacementPlan, memory: Sequence[DeviceMemory], limit_gb: float | None, path: Path
) -> None:
    """Draw a placement. The file suffix determines the format, and the file is written atomically.

    Args:
        limit_gb: Memory limit of a device, drawn as a line.
    """
    shown = memory[:_MOST_DEVICES]

    # One frame for each node, all with the same scale.
    nodes = list(dict.fromkeys(device.node for device in shown))
    colors = {role: COLORS[index % len(COLORS)] for index, role in enumerate(_roles(memory))}
    most_devices = max(Counter(device.node for device in shown).values())
    width = max(7.0, 1.6 * most_devices + 1.5)
    figure, frames = _frames(len(nodes), (width, 2.6 * len(nodes) + 1.2), sharey=True)

    for frame, node in zip(frames, nodes, strict=True):
        _draw_node(frame, node, [device for device in shown if device.node == node], colors, limit_gb)

    left_out = f"; {len(memory) - len(shown)} more devices" if len(shown) < len(memory) else ""
    figure.suptitle(
        f"{plan.strategy.value}: GiB on each device in each phase of a step{left_out}", fontsize=11
    )

    figure.legend(
        handles=[Patch(color=color, label=role) for role, color in colors.items()],
        loc="lower center",
        ncols=6,
        fontsize=8,
    )
    # Leave 0.3 inches at the bottom for the legend.
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    write_figure(figure, path)


def draw_forecasts(forecasts: Forecasts, path: Path) -> None:
    """Draw the results of simulations for each split of the devices.

    The panels are the step time, the trainer's idle share and the engines' slots in use, with one bar per
    max_staleness.
    """
    splits = list(dict.fromkeys(split for split, _ in forecasts))
    stalenesses = list(dict.fromkeys(staleness for _, staleness in forecasts))
    figure, frames = _frames(3, (max(6.0, 1.6 * len(splits) + 1.5), 6.5), sharex=True)
    rows = ("step time, s", "trainer idle, fraction", "slots in use, fraction")

    for frame, label, attribute in zip(frames, rows, ("step_s", "waiting", "busy"), strict=True):
        for number, max_staleness in enumerate(stalenesses):
            # Each split has a width of 1, of which its bars fill 0.8.
            frame.bar(
                [index + 0.1 + 0.8 * number / len(stalenesses) for index in range(len(splits))],
                [
                    getattr(run, attribute)
                    for (_, staleness), run in forecasts.items()
                    if staleness == max_staleness
                ],
                0.75 / len(stalenesses),
                align="edge",
                color=COLORS[number],
                label=f"max_staleness {max_staleness}",
            )
        frame.set_ylabel(label, fontsize=9)

    names = [f"trainer {split.trainer_devices}\nengines {split.num_engines}" for split in splits]
    frames[-1].set_xticks([index + 0.5 for index in range(len(splits))], names, fontsize=8)
    frames[0].legend(
        fontsize=8, ncols=len(stalenesses), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
    )
    figure.tight_layout()
    write_figure(figure, path)


def _frames(number: int, inches: tuple[float, float], **shared: Any) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure, and its axes from top to bottom."""
    figure = Figure(figsize=inches)
    FigureCanvasAgg(figure)
    frames = figure.subplots(number, 1, squeeze=False, **shared)[:, 0]
    for frame in frames:
        frame.spines[["top", "right"]].set_visible(False)
    return figure, frames


def write_figure(figure: Figure, path: Path) -> None:
    """Write a drawing atomically, in the format of the file's suffix."""
    drawn = io.BytesIO()
    metadata = {"Date": None} if path.suffix == ".svg" else None  # The same plan gives the same file.
    # A fixed salt makes files reproducible, and text stays text.
    with rc_context({"svg.hashsalt": "megarl", "svg.fonttype": "none"}):
        figure.savefig(drawn, format=path.suffix.removeprefix("."), dpi=120, metadata=metadata)
    write_whole(path, drawn.getvalue())


def _roles(memory: Sequence[DeviceMemory]) -> list[str]:
    return list(dict.fromkeys(role for device in memory for role in next(iter(device.phases.values()))))


def _draw_node(
    frame: Axes, node: int, devices: Sequence[DeviceMemory], colors: dict[str, str], limit_gb: float | None
) -> None:
    """Draw a group of bars for each device, with its phases from left to right."""
    names: list[str] = []
    for index, device in enumerate(devices):
        width = 0.9 / len(device.phases)
        for number, (phase, usages) in enumerate(device.phases.items()):
            # Stack the roles, because they share the device's memory.
            bottom = 0.0
            left = index + 0.05 + number * width
            for role, usage in usages.items():
                frame.bar(left, usage.total / _GIB, width * 0.9, bottom, align="edge", color=colors[role])
                bottom += usage.total / _GIB
            frame.text(
                left + width / 2, bottom, f" {phase}", rotation=90, fontsize=5, ha="center", va="bottom"
            )
        names.append(f"device {device.device}\npool {device.pool}")

    frame.set_xticks([index + 0.5 for index in range(len(devices))], names, fontsize=8)
    frame.set_xlim(0, len(devices))
    frame.margins(y=0.35)
    frame.set_ylabel(f"node {node}", fontsize=9)
    if limit_gb is not None:
        frame.axhline(limit_gb, color="black", linewidth=0.8, linestyle="--")


def draw_step(step: PredictedStep, path: Path) -> None:
    """Draw the phases of a step over time, with one lane for each pool."""
    pools = list(dict.fromkeys(pool for phase in step.schedule for pool in phase.pools))
    names = list(dict.fromkeys(phase.name for phase in step.schedule))
    figure, (frame,) = _frames(1, (9.0, 1.6 + 0.6 * len(pools)))

    for phase in step.schedule:
        color = COLORS[names.index(phase.name) % len(COLORS)]
        for pool in phase.pools:
            lane = pools.index(pool)
            frame.barh(lane, phase.time.seconds, left=phase.start_s, height=0.6, color=color)
            # The text of a short phase would cover its neighbors.
            if phase.time.seconds > _LEAST_LABELED * step.seconds:
                frame.text(
                    phase.start_s + phase.time.seconds / 2,
                    lane,
                    f"{phase.name}\n{phase.time.seconds:,.1f} s",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white",
                )

    frame.set_yticks(range(len(pools)), pools)
    frame.invert_yaxis()
    frame.set_xlim(0, step.seconds)
    frame.set_xlabel("seconds")
    frame.set_title(f"predicted step: {step.seconds:,.4g} s", fontsize=11)
    figure.tight_layout()
    write_figure(figure, path)


def draw_clusters(results: Sequence[ClusterResult], tokens: float, path: Path) -> None:
    """Draw the step time and the throughput per device over cluster sizes, one line per max_staleness.

    Args:
        tokens: The prompt and response tokens of a step.
        path: The file, whose suffix determines the format.
    """
    figure, (above, below) = _frames(2, (7.0, 6.5), sharex=True)

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

    sizes = list(dict.fromkeys(each.num_devices for each in results))
    below.set_xticks(sizes, [f"{size:,}" for size in sizes])
    below.set_xlabel("devices")
    above.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    write_figure(figure, path)
