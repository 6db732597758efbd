"""Repeat the updates of a recorded step with each trained model alone, and record what they compute."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from megarl.batch.data_proto import DataProto
from megarl.checkpoints.run_folder import step_of
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import Device, PPOConfig, RunConfig, SFTConfig
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.models.families import read_architecture
from megarl.roles.megatron_worker import MegatronWorker
from megarl.roles.models import Actor, Critic
from megarl.roles.preferences import PairModel
from megarl.roles.start import start_trained
from megarl.trainers.recorded_batches import RecordedBatches
from megarl.trainers.resume import checkpoint_folder

# The batch of each step after a checkpoint, up to the repeated one, and the checkpoint.
# Without a checkpoint the run began with the initial weights.
type Recorded = tuple[Mapping[int, DataProto], Path | None]


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

            trace = str((folder / role.name).absolute())
            model.group.call(MegatronWorker.begin_trace, trace, share).get()
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
