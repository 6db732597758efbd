"""`megarl report RUN_DIR --png`: draws a run's curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megarl.machine.folder_kinds import is_run, no_run
from megarl.tracking.metrics_file import MetricsFileError, Points, Series, read_metrics
from megarl.tracking.run_files import METRICS_FILE

CURVES_FILE = "curves.png"
_NUM_COLUMNS = 3
_PANEL_INCHES = (4.6, 3.0)
_COLORS = ("#1f6fb4", "#d1603d", "#3b8f5a", "#8a5ba6", "#b8860b", "#4f9da6", "#c2477f", "#6b6b6b")
_SMOOTHED_FROM = 30  # number of points from which a moving average is drawn over the raw curve


def run(run_dirs: Sequence[str]) -> None:
    """Write curves.png in the folder of each run. Raises MetricsFileError."""
    for run_dir in run_dirs:
        print(f"curves drawn to {plot_run(Path(run_dir))}")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Contents of one pair of axes.

    Attributes:
        curves: Metric -> its label.
        sparse: Metrics with few points, drawn with markers.
        along: What the points are numbered by, if not by step.
    """

    title: str
    curves: Mapping[str, str]
    unit: str = ""
    sparse: frozenset[str] = field(default_factory=frozenset)
    logarithmic: bool = False
    along: str = ""


_PANELS = (
    Panel(
        title="KL to the reference",
        curves={"actor/reward_kl_penalty": "in the reward", "actor/kl_loss": "in the loss"},
        unit="nats / token",
    ),
    Panel(title="Policy entropy", curves={"actor/entropy": "entropy"}, unit="nats / token"),
    Panel(
        title="Fine-tuning loss",
        curves={"sft/loss": "training", "val/loss": "held out"},
        sparse=frozenset({"val/loss"}),
    ),
    Panel(
        title="Accuracy on pairs",
        curves={
            "dpo/accuracy": "policy",
            "reward_model/accuracy": "reward model",
            "val/accuracy": "held out",
        },
        unit="share",
        sparse=frozenset({"val/accuracy"}),
    ),
    Panel(title="Loss of pairs", curves={"dpo/loss": "policy", "reward_model/loss": "reward model"}),
    Panel(title="Policy loss", curves={"actor/pg_loss": "loss"}),
    Panel(title="Value loss", curves={"critic/vf_loss": "loss"}),
    Panel(title="Explained variance of the values", curves={"critic/vf_explained_var": "explained variance"}),
    Panel(
        title="Clipped tokens",
        curves={"actor/pg_clipfrac": "policy", "critic/vf_clipfrac": "values"},
        unit="share",
    ),
    Panel(
        title="Gradient norm",
        curves={"actor/grad_norm": "actor", "critic/grad_norm": "critic"},
        logarithmic=True,
    ),
    Panel(
        title="Response length",
        curves={"response_length/max": "max", "response_length/mean": "mean", "response_length/min": "min"},
        unit="tokens",
    ),
    Panel(
        title="Turns per episode",
        curves={"agent/turns/mean": "training samples", "val/turns/mean": "held out"},
        sparse=frozenset({"val/turns/mean"}),
    ),
    Panel(
        title="Token probability: rollout vs. trainer",
        curves={
            "training/rollout_probs_diff_max": "largest difference",
            "training/rollout_probs_diff_mean": "mean difference",
        },
        logarithmic=True,
    ),
    Panel(title="Throughput", curves={"perf/throughput": "tokens / s"}, unit="tokens / s"),
    Panel(
        title="Update speed",
        curves={
            "perf/tflops/actor": "actor",
            "perf/tflops/critic": "critic",
            "perf/tflops/sft": "fine-tuning",
            "perf/tflops/dpo": "policy",
            "perf/tflops/reward_model": "reward model",
        },
        unit="TFLOP/s per device",
    ),
)


def plot_run(run_dir: Path) -> Path:
    """Plot the `metrics.jsonl` of a run folder.

    Returns:
        Path of the image, `curves.png` in the folder.

    Raises:
        MetricsFileError: The metrics cannot be read, or none of them is plotted.
    """
    if not is_run(run_dir):
        raise MetricsFileError(no_run(run_dir))
    path = run_dir / METRICS_FILE
    series = read_metrics(path)
    panels = panels_with_data(series)
    timings = _phase_timings(series)
    if not panels and not timings:
        raise MetricsFileError(f"{path}: contains no metric that is plotted, only {sorted(series)[:5]}")
    written = run_dir / CURVES_FILE
    draw_panels(run_dir.resolve().name, panels, series, written, timings)

    return written


def draw_panels(
    title: str, panels: Sequence[Panel], series: Series, output: Path, timings: Series | None = None
) -> None:
    """Draw panels to an image, and the seconds of phases in a last panel if there are any."""
    num_axes = len(panels) + bool(timings)
    num_columns = min(_NUM_COLUMNS, num_axes)
    num_rows = math.ceil(num_axes / num_columns)
    figure = Figure(
        figsize=(_PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * num_rows + 0.5), layout="constrained"
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    # Draw the panels, then the timings. Unused cells of the grid stay empty.
    axes = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    last_step = max(points.steps[-1] for points in series.values())
    for panel, axis in zip(panels, axes, strict=False):
        _draw(axis, panel, series)
    if timings:
        _draw_timings(axes[len(panels)], timings)
    for axis in axes[:num_axes]:
        _finish(axis, last_step)
    for axis in axes[num_axes:]:
        axis.set_axis_off()
    figure.savefig(output, dpi=130)


def panels_with_data(series: Series) -> list[Panel]:
    """Return the panels for which the run has a curve.

    The first panel shows the training score and the held-out score of each data source.
    """
    validation = sorted(name for name in series if name.startswith("val/") and name.endswith("/score/mean"))
    if len(validation) == 2:  # one data source: its mean equals the overall mean
        validation.remove("val/score/mean")
    sources = {name: name.removeprefix("val/").removesuffix("/score/mean") for name in validation}
    labels = {
        name: f"held out: {'all' if name == 'val/score/mean' else source}" for name, source in sources.items()
    }
    score = Panel(
        title="Score", curves={"critic/score/mean": "training samples", **labels}, sparse=frozenset(labels)
    )

    return [panel for panel in (score, *_PANELS) if any(name in series for name in panel.curves)]


def _draw(axis: Axes, panel: Panel, series: Series) -> None:
    present = [(name, label) for name, label in panel.curves.items() if name in series]
    for (name, label), color in zip(present, _COLORS, strict=False):
        points = series[name]
        # A curve with few points needs markers; a single point would be invisible without one.
        if name in panel.sparse or len(points.steps) == 1:
            axis.plot(points.steps, points.values, color=color, marker="o", markersize=4, label=label)
            _annotate_ends(axis, points, color)
        elif len(points.steps) >= _SMOOTHED_FROM:
            axis.plot(points.steps, points.values, color=color, alpha=0.25, linewidth=0.9)
            axis.plot(points.steps, moving_average(points.values), color=color, label=label)
        else:
            axis.plot(points.steps, points.values, color=color, label=label)

    # A logarithmic axis cannot show zeros or negative values.
    if panel.logarithmic and all(value > 0 for name, _ in present for value in series[name].values):
        axis.set_yscale("log")
    axis.set_title(panel.title, fontsize=10)
    axis.set_ylabel(panel.unit, fontsize=8)
    if panel.along:
        axis.set_xlabel(panel.along, fontsize=8)

    if len(present) > 1:
        axis.margins(y=0.15)
        axis.legend(fontsize=7, framealpha=0.85, edgecolor="none")


def _annotate_ends(axis: Axes, points: Points, color: str) -> None:
    """Annotate the first value (below its marker) and the last value (above it), which readers look for."""
    for index, side, offset_points in ((0, "left", -11), (len(points.steps) - 1, "right", 6)):
        axis.annotate(
            f"{points.values[index]:.3g}",
            (points.steps[index], points.values[index]),
            xytext=(0, offset_points),
            textcoords="offset points",
            fontsize=7,
            color=color,
            ha=side,
        )
    axis.margins(y=0.15)


def moving_average(values: Sequence[float]) -> list[float]:
    """Return the mean over a centered window of 1/15 of the curve, truncated at both ends of the curve."""
    half = max(1, len(values) // 30)
    windows = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _phase_timings(series: Series) -> dict[str, Points]:
    """Return the seconds of each phase per step, longest phases first, without `step` and validation."""
    phases = {
        name: points
        for name, points in series.items()
        if name.startswith("timing_s/") and name not in ("timing_s/step", "timing_s/testing")
    }
    return dict(sorted(phases.items(), key=lambda item: -sum(item[1].values)))


def _draw_timings(axis: Axes, timings: Series) -> None:
    """Draw the mean seconds per step of each phase as bars.

    Phases of different pools overlap, so they are not stacked.
    """
    shown = list(timings.items())[: len(_COLORS)]
    names = [name.removeprefix("timing_s/") for name, _ in shown]
    means = [sum(points.values) / len(points.values) for _, points in shown]
    axis.bar_label(axis.barh(names, means, color=_COLORS[0]), fmt="%.2g", fontsize=7, padding=2)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_title("Time per phase (phases may overlap)", fontsize=10)
    axis.set_xlabel("mean seconds / step", fontsize=8)


def _finish(axis: Axes, last_step: int) -> None:
    axis.tick_params(which="both", labelsize=7)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)

    if not axis.get_xlabel():
        axis.set_xlabel("step", fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if last_step > 0 and axis.get_autoscalex_on():
            axis.set_xlim(-0.03 * last_step, 1.03 * last_step)
