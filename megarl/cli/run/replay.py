"""`megarl replay RUN_DIR STEP`: repeats a recorded step, and finds the first tensor that differs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from megarl.batch.data_proto import DataProto
from megarl.checkpoints.run_folder import step_of
from megarl.checkpoints.trace_comparison import ComparedTensor, compare_traces
from megarl.cli.run.context import RunContext
from megarl.cli.run.session import ray_processes
from megarl.cli.tables.console import output_console, print_line
from megarl.config.load import load_config
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import Device, PPOConfig, RunConfig, SFTConfig
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.models.families import read_architecture
from megarl.roles.megatron_worker import MegatronWorker
from megarl.roles.models import Actor, Critic
from megarl.roles.preferences import PairModel
from megarl.roles.start import start_trained
from megarl.tracking.metrics_file import read_metrics
from megarl.tracking.run_files import CONFIG_FILE, METRICS_FILE
from megarl.trainers.resume import checkpoint_folder
from megarl.trainers.samples import RecordedBatches

REPLAYS = "replays"  # folder of the traces in the folder of the run
# The batch of each step after a checkpoint, up to the repeated one, and the checkpoint.
# Without a checkpoint the run began with the initial weights.
type Recorded = tuple[Mapping[int, DataProto], Path | None]


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
    config = load_config(RunConfig, output_dir / CONFIG_FILE)
    changed = load_config(RunConfig, output_dir / CONFIG_FILE, overrides)
    # Read first, because repeating a step takes long.
    logged = _logged_norms(output_dir / METRICS_FILE, step) if against is None else {}
    recorded = recorded_step(config, output_dir, step)
    folder = output_dir / REPLAYS / f"step_{step:08d}"
    console = output_console()

    def repeat(with_config: RunConfig, name: str) -> dict[str, float]:
        with ray_processes(RunContext(with_config), console) as (device, pools):
            return replay(with_config, recorded, folder / name, device, pools, num_rows)

    first = folder / "original" if against is None else Path(against)
    good = True
    if against is None:
        good = _agrees_with_run(console, logged, repeat(config, "original"), tolerance)
    # Without overrides there is no second layout: the original was compared with what the run logged.
    if not overrides and against is None:
        return 0 if good else 1

    repeat(changed, "changed")
    for role in trained_roles(changed, step):
        assert role.optim is not None
        pairs = compare_traces(first / role.name, folder / "changed" / role.name, tolerance, role.optim.lr)
        good = report(console, role.name, list(pairs), tolerance) and good
    return 0 if good else 1


def _logged_norms(path: Path, step: int) -> dict[str, float]:
    """Return the gradient norms that the run logged in a step; empty without a metrics file."""
    series = read_metrics(path) if path.exists() else {}
    return {
        name: dict(zip(points.steps, points.values, strict=True))[step]
        for name, points in series.items()
        if name.endswith("/grad_norm") and step in points.steps
    }


def _agrees_with_run(
    console: Console, logged: dict[str, float], metrics: dict[str, float], tolerance: float
) -> bool:
    """Compare gradient norms with those that the run logged."""
    good = True
    for name in sorted(name for name in metrics if name in logged):
        agrees = abs(metrics[name] - logged[name]) / abs(logged[name]) <= tolerance
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


def recorded_step(config: RunConfig, output_dir: Path, step: int) -> Recorded:
    """Find the newest checkpoint of a run before a step, and the batches since then.

    Raises:
        ValueError: A batch is missing. The message names the step.
    """
    earlier = [path for path in checkpoint_folder(config).whole() if step_of(path) < step]
    checkpoint = earlier[-1] if earlier else None
    start = 0 if checkpoint is None else step_of(checkpoint)
    recorded = RecordedBatches(output_dir, 0)
    # The error names the first batch that is missing, so the step itself is read first.
    batches = {number: recorded.read(number) for number in range(step, start, -1)}
    return dict(sorted(batches.items())), checkpoint


def trained_roles(config: RunConfig, step: int) -> list[ModelRole]:
    """Return the models that a step trains."""
    warmup = config.trainer.critic_warmup_steps if isinstance(config, PPOConfig) else 0
    return [
        role
        for role in model_roles(config)
        if role.optim is not None and (role.name != "actor" or step > warmup)
    ]


def replay(
    config: RunConfig,
    recorded: Recorded,
    folder: Path,
    device: Device,
    pools: ResourcePoolManager,
    num_rows: int,
) -> dict[str, float]:
    """Repeat a step with one trained model after the other.

    Args:
        config: The configuration. Its layouts may be others than those of the run.
        recorded: What `recorded_step` has found.
        folder: Where the trace of each model is written, in a folder named after its role. An older trace is
            removed.
        device: The kind of device.
        pools: The pools of the configuration's placement.
        num_rows: The number of rows, about, whose hidden states are recorded.

    Returns:
        The metrics of the step's updates.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    metrics: dict[str, float] = {}
    batches, checkpoint = recorded
    *earlier, (last_step, last) = batches.items()
    share = min(1.0, num_rows / len(last))

    for role in trained_roles(config, last_step):
        architecture = read_architecture(role.path, config.model.trust_remote_code)
        model = start_trained(config, role, architecture, device, pools)
        try:
            if checkpoint is not None:
                path = str((checkpoint / role.name).absolute())
                model.group.call(MegatronWorker.load_checkpoint, path).get()

            # Repeat the updates since the checkpoint, which lead to the state before the recorded step.
            for step, batch in earlier:
                if role in trained_roles(config, step):
                    _update(model, batch, step, config)

            model.group.call(MegatronWorker.begin_trace, str((folder / role.name).absolute()), share).get()
            metrics |= _update(model, last, last_step, config)
            model.group.call(MegatronWorker.end_trace).get()
        finally:
            model.group.shutdown()

    return metrics


def _update(
    model: Actor | Critic | PairModel, batch: DataProto, step: int, config: RunConfig
) -> Mapping[str, float]:
    # An update may add its scores to the batch, which the next replay must not see.
    rows = batch.select()
    if isinstance(model, PairModel):
        return model.update(rows).get()
    if isinstance(config, SFTConfig):
        assert isinstance(model, Actor)
        return model.update_sft(rows).get()
    return model.update(rows, step).get()
