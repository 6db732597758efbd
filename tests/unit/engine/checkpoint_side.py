"""The rank side of the checkpoint tests: training, a save into a complete role folder, a load, the next steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from megarl.batch.metrics import Metric
from megarl.checkpoints.role_folder import Description, Layout, write_manifest
from megarl.checkpoints.snapshot_file import open_snapshot
from megarl.checkpoints.torch_dist import read_chunk, read_index
from megarl.config.schema import Decay, ExpertsConfig, OptimConfig, ParallelConfig
from megarl.models.architecture import LoRA
from tests.ranks import gather
from tests.unit.engine.models import make_batch, make_image_batch
from tests.unit.engine.rank_side import Tensors, build, deal, replica_rows, start, take

if TYPE_CHECKING:
    from megarl.engine.engine import MegatronEngine

NUM_ROWS = 8
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2, decay=Decay.cosine, min_lr=1e-3)


class Settings(NamedTuple):
    """The parameters of an engine."""

    parallel: ParallelConfig
    folder: str
    head: str = "lm"
    dtype: torch.dtype = torch.float32
    routers: ExpertsConfig = ExpertsConfig()
    lora: LoRA | None = None
    lora_path: str | None = None
    runs_base: bool = False


class Steps(NamedTuple):
    """The result of training steps.

    Attributes:
        losses: The losses of the whole batch.
        state: This rank's part of what a checkpoint stores (weights, masters, moments, random numbers).
    """

    losses: list[float]
    statistics: list[tuple[float, float]]
    state: Tensors


def open_engine(settings: Settings) -> MegatronEngine:
    names = ("head", "dtype", "routers", "lora", "lora_path", "runs_base")
    options = {name: getattr(settings, name) for name in names}
    return build(start(settings.parallel), settings.folder, optim=OPTIM, total_optimizer_steps=8, **options)


def contents(path: str) -> list[bytes]:
    """Return the tensors of a snapshot, and the random state at the end."""
    snapshot = open_snapshot(path)
    return [snapshot.memory[each.position : each.position + each.nbytes] for each in snapshot.index]


def _loss(outputs: Any, rows: Any) -> Any:
    value = (outputs["values"] - 1).square().sum() if "values" in outputs else -outputs["log_probs"].sum()
    return value / 40, {"loss": Metric.sum(value / 40)}


def train(engine: MegatronEngine, num_steps: int, first: int = 0) -> Steps:
    """Train with a different batch in each step, the same for every layout."""
    groups = engine.groups
    losses = []
    statistics = []

    for number in range(first, first + num_steps):
        rows = replica_rows(groups, NUM_ROWS)
        make = make_batch if engine.spec.architecture.vision is None else make_image_batch
        metrics = engine.forward_backward(take(make(NUM_ROWS, seed=number), rows), deal(len(rows), 2), _loss)
        share = (
            metrics["loss"].value
            if "loss" in metrics and groups.tensor_rank == groups.context_rank == 0
            else 0.0
        )
        device = next(iter(engine.parameters().values())).device
        loss = torch.tensor(share, dtype=torch.float64, device=device)
        dist.all_reduce(loss)
        step = engine.step()
        losses.append(float(loss))
        statistics.append((step.grad_norm, step.lr))

    return Steps(losses, statistics, kept_state(engine))


def kept_state(engine: MegatronEngine) -> Tensors:
    optimizer = engine.optimizer
    tensors = {name: value.clone() for name, value in engine.parameters().items()}
    for number, part in enumerate(optimizer.slices()):
        tensors |= {f"{number}.{name}": value.clone() for name, value in part.tensors.items()}
    tensors["counts"] = torch.tensor(list(optimizer.counts().values()))
    return tensors


def draws() -> Tensors:
    """Return the next numbers of every generator; for Megatron's, their states."""
    import random

    import numpy as np
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracked = {
        f"tracked {name}": generator.clone()
        for name, generator in get_cuda_rng_tracker().get_states().items()
    }
    assert tracked

    return {
        **tracked,
        "torch": torch.rand(4),
        "numpy": torch.from_numpy(np.random.rand(4)),
        "python": torch.tensor([random.random() for _ in range(4)], dtype=torch.float64),
    }


def describe(settings: Settings) -> Description:
    parallel = settings.parallel
    return Description(
        head="value" if settings.head == "value" else "lm",
        dtype=str(settings.dtype).removeprefix("torch."),
        layout=Layout(
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            virtual_pipeline_parallel_size=parallel.virtual_pipeline_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
        ),
    )


def save_whole(
    engine: MegatronEngine, settings: Settings, folder: Path, meanwhile: Callable[[], Any] = lambda: None
) -> Any:
    """Save with a manifest, as the driver does.

    Returns the result of `meanwhile`, which runs during the save.
    """
    from megarl.engine.checkpoint import begin_save

    pending = begin_save(engine, folder)
    result = meanwhile()
    checksums = gather(pending.finish())
    assert pending.is_written()

    if dist.get_rank() == 0:
        write_manifest(
            folder, describe(settings), {name: value for part in checksums for name, value in part.items()}
        )

    dist.barrier()
    return result


class Saved(NamedTuple):
    """A save and the next steps.

    Attributes:
        at_save: The state when the save began.
        draws: Random numbers drawn afterwards.
        after: The next steps.
    """

    at_save: Tensors
    draws: Tensors
    after: Steps


def train_and_save(settings: Settings, folder: Path, num_steps: int, num_after: int) -> Saved:
    """Run in a rank: train, and finish a save after the next steps have run."""
    engine = open_engine(settings)
    if num_steps:
        train(engine, num_steps)
    at_save = kept_state(engine)

    def go_on() -> tuple[Tensors, Steps]:
        return draws(), train(engine, num_after, first=num_steps)

    drawn, after = save_whole(engine, settings, folder, go_on)

    return Saved(at_save, drawn, after)


def load_and_train(
    settings: Settings, folder: Path, num_steps: int, num_after: int, again: Path | None = None
) -> Saved:
    """Run in a rank: train an engine on other data, load (and save to `again`), and train further."""
    engine = open_engine(settings)
    train(engine, 1, first=90)
    from megarl.engine.checkpoint import load

    load(engine, folder)
    if again is not None:
        save_whole(engine, settings, again)

    return Saved(kept_state(engine), draws(), train(engine, num_after, first=num_steps))


def save_what_is_offloaded(settings: Settings, plain: Path, moved: Path) -> list[str]:
    """Run in a rank: save with everything in memory and with everything offloaded.

    Returns the parts that are offloaded after a load.
    """
    engine = open_engine(settings)
    train(engine, 2)
    from megarl.engine.checkpoint import load
    from megarl.engine.offload import StatePart

    save_whole(engine, settings, plain)
    before = kept_state(engine)
    engine.offload(*StatePart)
    save_whole(engine, settings, moved)
    offloaded = engine.places.offloaded
    load(engine, moved)
    assert engine.places.offloaded == offloaded
    engine.restore(*StatePart)
    assert same([before], [kept_state(engine)])

    return sorted(part.value for part in offloaded)


def load_by_megatron(settings: Settings, folder: Path) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Run in a rank: return what Megatron reads into its own state dicts as (key, place, tensor), without padding."""
    engine = open_engine(settings)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": engine.groups.data_context}
    models = {
        f"model{number}": model.sharded_state_dict(metadata=metadata)
        for number, model in enumerate(engine.models)
    }
    optimizer = engine.optimizer.megatron_optimizer.sharded_state_dict(
        models, is_loading=True, metadata=metadata
    )
    wanted = {**models, "optimizer": optimizer}
    loaded = dist_checkpointing.load(wanted, str(folder))
    assert loaded["optimizer"]["optimizer"]["param_groups"][0]["step"] == 2
    apply_factories(wanted)
    read = []

    for entry in nested_values(wanted):
        if isinstance(entry, ShardedTensor):
            shape = (1,) * entry.prepend_axis_num + entry.local_shape
            read.append((entry.key, entry.global_offset, entry.data.detach().view(shape).clone()))

    return read


def draws_around_a_load(settings: Settings, folder: Path) -> bool:
    """Run in a rank: return whether the generators continue as if nothing had been loaded."""
    import random

    import numpy as np

    engine = open_engine(settings)
    from megarl.engine.checkpoint import load, random_state, set_random_state

    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    state = random_state()
    want = draws()
    set_random_state(state)
    load(engine, folder)

    return same([want], [draws()])


def load_damaged(settings: Settings, folders: Sequence[Path], good: Path) -> list[tuple[str, bool]]:
    """Run in a rank: return the error for each folder, and whether the engine is unchanged; then load the intact one."""
    engine = open_engine(settings)
    train(engine, 1, first=50)
    from megarl.engine.checkpoint import load

    results = []

    for folder in folders:
        before = kept_state(engine)
        line = failure_of(lambda folder=folder: load(engine, folder))  # type: ignore[misc]
        results.append((line, same([before], [kept_state(engine)])))

    load(engine, good)
    return results


def refused_load(settings: Settings, folder: Path) -> str:
    """Run in a rank: return the error for a checkpoint of another model."""
    engine = open_engine(settings)
    from megarl.engine.checkpoint import load

    return failure_of(lambda: load(engine, folder))


def failing_saves(settings: Settings, folder: Path) -> list[str]:
    """Run in a rank: return the errors of saves with a full disk for one file, for none, and into a missing folder.

    The last save succeeds.
    """
    engine = open_engine(settings)
    train(engine, 1)
    full = {"items": "__1_0.distcp", "index": "..metadata.partial"}

    if dist.get_rank() == 0:
        for name, file in full.items():
            (folder / name).mkdir()
            (folder / name / file).symlink_to("/dev/full")
        (folder / "file").touch()

    dist.barrier()
    before = kept_state(engine)
    lines = [
        failure_of(lambda name=name: save_whole(engine, settings, folder / name))
        for name in (*full, "file", "gone/actor")
    ]  # type: ignore[misc]
    assert same([before], [kept_state(engine)])
    save_whole(engine, settings, folder / "good")

    return lines


def failure_of(call: Callable[[], Any]) -> str:
    """Return the message of the CheckpointError that `call` raises."""
    from megarl.machine.errors import CheckpointError

    try:
        call()
    except CheckpointError as error:
        return str(error)

    raise AssertionError("nothing was wrong")


def stored_tensors(folder: Path) -> Tensors:
    """Return every complete tensor of a folder, with NaN where nothing is stored."""
    index = read_index(folder)
    tensors = {}

    for key, tensor in index.tensors.items():
        tensors[key] = torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)
        for chunk in tensor.chunks:
            tensors[key][chunk.tensor_slice.index] = read_chunk(folder, chunk)

    return tensors


def same(left: Sequence[Tensors], right: Sequence[Tensors]) -> bool:
    """Return whether all ranks are bitwise identical."""
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(left, right, strict=True)
    )
