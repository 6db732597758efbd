"""`megarl replay RUN_DIR STEP`: repeats a recorded step, and finds the first tensor that differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megarl.checkpoints.trace_comparison import ComparedTensor, compare_traces
from megarl.cli.run.context import RunContext
from megarl.cli.run.processes import ray_processes
from megarl.cli.tables.console import output_console, print_line
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.tracking.metrics_file import read_metrics
from megarl.tracking.run_files import CONFIG_FILE, METRICS_FILE
from megarl.trainers.replay import recorded_step, replay, trained_roles

REPLAYS = "replays"  # folder of the traces in the folder of the run
_GRAD_NORM = "/grad_norm"


def run(
    run_dir: str,
    step: int,
    overrides: Sequence[str],
    against: str | None = None,
    tolerance: float = 1e-5,
    num_rows: int = 64,
) -> int:
    """Repeat a step, and compare it.

    Args:
        run_dir: The folder of a run with `tracking.record_batches`.
        overrides: Changes of the configuration, such as another layout.
        against: The trace to compare with, which another version wrote; None: the run's own configuration
            is repeated first, and its gradient norms are compared with the recorded ones.
        tolerance: The relative tolerance.
        num_rows: The number of rows whose hidden states are compared.

    Returns:
        0 if everything agrees, 1 otherwise.

    Raises:
        ValueError: The run did not record the step, its metrics file is damaged, or an override is invalid.
    """
    output_dir = Path(run_dir)
    config = _config(output_dir, ())
    changed = _config(output_dir, overrides)
    # Read first, because repeating a step takes long.
    logged = _logged_norms(output_dir / METRICS_FILE, step) if against is None else {}
    recorded = recorded_step(config, output_dir, step)
    folder = output_dir / REPLAYS / f"step_{step:08d}"
    console = output_console()

    def repeat(with_config: RunConfig, name: str) -> dict[str, float]:
        with ray_processes(RunContext(with_config), console) as started:
            return replay(with_config, recorded, folder / name, started.device, started.pools, num_rows)

    first = folder / "original" if against is None else Path(against)
    good = True
    if against is None:
        metrics = repeat(config, "original")
        good = _agrees_with_run(console, logged, metrics, tolerance)
    # Without overrides there is no second layout: the original was compared with what the run logged.
    if not overrides and against is None:
        return 0 if good else 1

    repeat(changed, "changed")
    for role in trained_roles(changed, step):
        assert role.optim is not None
        pairs = compare_traces(first / role.name, folder / "changed" / role.name, tolerance, role.optim.lr)
        good = report(console, role.name, list(pairs), tolerance) and good
    return 0 if good else 1


def _config(output_dir: Path, overrides: Sequence[str]) -> RunConfig:
    path = str(output_dir / CONFIG_FILE)
    return load_config(RunConfig, path, overrides)


def _logged_norms(path: Path, step: int) -> dict[str, float]:
    """Return the gradient norms that the run logged in a step; empty without a metrics file."""
    series = read_metrics(path) if path.exists() else {}
    return {
        name: dict(zip(points.steps, points.values, strict=True))[step]
        for name, points in series.items()
        if name.endswith(_GRAD_NORM) and step in points.steps
    }


def _agrees_with_run(
    console: Console, logged: dict[str, float], metrics: dict[str, float], tolerance: float
) -> bool:
    """Compare gradient norms with those that the run logged."""
    good = True
    for name in sorted(name for name in metrics if name in logged):
        relative = abs(metrics[name] - logged[name]) / abs(logged[name])
        agrees = relative <= tolerance
        verdict = "agrees" if agrees else "differs"
        print_line(
            console,
            f"{name}: {verdict}: the run logged {logged[name]:.9g}, and the replay has {metrics[name]:.9g}",
        )
        good = good and agrees

    return good


def report(console: Console, role: str, tensors: Sequence[ComparedTensor], tolerance: float) -> bool:
    """Print the first tensor that differs, or the largest difference. Returns whether all agree."""
    different = [tensor for tensor in tensors if not tensor.is_close]
    if different:
        print_line(
            console,
            f"{role}: {len(different)} of {len(tensors)} tensors differ by more than {tolerance:g}; the "
            f"first is in {different[0].describe()}",
        )
        return False

    largest = max(tensors, key=lambda tensor: tensor.relative)
    print_line(
        console, f"{role}: all {len(tensors)} tensors agree; the largest difference: {largest.describe()}"
    )
    return True
