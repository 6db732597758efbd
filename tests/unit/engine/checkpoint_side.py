"""What runs inside the ranks of the checkpoint's tests: training, a save into a whole role folder, a load, the next steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import Decay, OptimConfig, ParallelConfig
from megarl.resharding.role_folder import Description, Layout, write_manifest
from tests.unit.engine.models import make_batch
from tests.unit.engine.rank_side import Tensors, build, deal, replica_rows, start, take

if TYPE_CHECKING:
    from megarl.engine.engine import MegatronEngine

NUM_ROWS = 8
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2, decay=Decay.cosine, min_lr=1e-3)


class Settings(NamedTuple):
    """Of an engine."""

    parallel: ParallelConfig
    folder: str
    head: str = "lm"
    dtype: torch.dtype = torch.float32


class Steps(NamedTuple):
    """losses: of the whole batch. state: what a checkpoint keeps, this rank's part of it (weights, masters, moments, RNG draws)."""

    losses: list[float]
    statistics: list[tuple[float, float]]
    state: Tensors


def open_engine(settings: Settings) -> MegatronEngine:
    return build(start(settings.parallel), settings.folder, head=settings.head, dtype=settings.dtype, optim=OPTIM, total_optimizer_steps=8)


def _loss(outputs: Any, rows: Any) -> Any:
    value = (outputs["values"] - 1).square().sum() if "values" in outputs else -outputs["log_probs"].sum()
    return value / 40, {"loss": value / 40}


def train(engine: MegatronEngine, num_steps: int, first: int = 0) -> Steps:
    """Each step has a batch of its own, the same for every layout."""
    groups, losses, statistics = engine.groups, [], []
    for number in range(first, first + num_steps):
        rows = replica_rows(groups, NUM_ROWS)
        sums = engine.forward_backward(take(make_batch(NUM_ROWS, seed=number), rows), deal(len(rows), 2), _loss)
        loss = torch.tensor(sums.get("loss", 0.0) if groups.tensor_rank == 0 else 0.0, dtype=torch.float64)
        dist.all_reduce(loss)
        step = engine.step()
        losses.append(float(loss))
        statistics.append((step.grad_norm, step.lr))
    return Steps(losses, statistics, kept_state(engine))


def kept_state(engine: MegatronEngine) -> Tensors:
    optimizer = engine.training_state().optimizer
    tensors = {name: value.clone() for name, value in engine.parameters().items()}
    for number, part in enumerate(optimizer.slices()):
        tensors |= {f"{number}.{name}": value.clone() for name, value in part.tensors.items()}
    tensors["counts"] = torch.tensor(optimizer.counts())
    return tensors


def draws() -> Tensors:
    """The next numbers of every generator."""
    import random

    import numpy as np
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(4)
    return {
        "tracked": tracked,
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
            data_parallel_size=parallel.data_parallel_size,
        ),
    )


def save_whole(engine: MegatronEngine, settings: Settings, folder: Path, meanwhile: Callable[[], Any] = lambda: None) -> Any:
    """A save with its manifest, as the driver makes it. Returns what `meanwhile` gave, which ran while the save was on its way."""
    from megarl.engine.checkpoint import begin_save

    pending = begin_save(engine, folder)
    result = meanwhile()
    checksums: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(checksums, pending.finish())
    assert pending.is_written()
    if dist.get_rank() == 0:
        write_manifest(folder, describe(settings), {name: value for part in checksums for name, value in part.items()})
    dist.barrier()
    return result


class Saved(NamedTuple):
    """at_save: the state when the save began. after: the next steps without a stop."""

    at_save: Tensors
    draws: Tensors
    after: Steps


def train_and_save(settings: Settings, folder: Path, num_steps: int, num_after: int) -> Saved:
    """In a rank: steps, a save that is written while the next steps run."""
    engine = open_engine(settings)
    if num_steps:
        train(engine, num_steps)
    at_save = kept_state(engine)

    def go_on() -> tuple[Tensors, Steps]:
        return draws(), train(engine, num_after, first=num_steps)

    drawn, after = save_whole(engine, settings, folder, go_on)
    return Saved(at_save, drawn, after)


def load_and_train(settings: Settings, folder: Path, num_steps: int, num_after: int) -> Saved:
    """In a rank: another engine that has gone elsewhere, the load, the next steps."""
    engine = open_engine(settings)
    train(engine, 1, first=90)
    from megarl.engine.checkpoint import load

    load(engine, folder)
    return Saved(kept_state(engine), draws(), train(engine, num_after, first=num_steps))


def save_failure(call: Callable[[], Any]) -> str:
    """The one line of a CheckpointError."""
    from megarl.config.errors import CheckpointError

    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def same(left: Sequence[Tensors], right: Sequence[Tensors]) -> bool:
    """Of all ranks, to the bit."""
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(left, right, strict=True)
    )


def all_of(tensors: Tensors) -> Tensor:
    return torch.cat([value.double().flatten() for value in tensors.values()])
