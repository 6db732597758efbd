"""Save the training state of a model, including random number generators, and load it into any layout.

Saving runs in the background of training. On disk, the state is a Megatron distributed checkpoint
(`torch_dist`) with Megatron's names and offsets in whole tensors, and the optimizer format
`fully_reshardable`. Each data-parallel rank writes the elements that its optimizer updates, so nothing is
gathered.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megarl.checkpoints.role_folder import WHOLE_FILES, check_folder, item_checksums, item_name
from megarl.checkpoints.torch_dist import DistributedTensor, StoredItem, TorchDistIndex, read_index
from megarl.checkpoints.torch_dist_writer import ItemToWrite, write_index, write_items
from megarl.engine import platform
from megarl.engine.engine import MegatronEngine
from megarl.engine.groups import ParallelGroups
from megarl.engine.offload import OffloadableState, StatePart
from megarl.engine.optimizer import MOMENTS, Optimizer
from megarl.engine.sharding import Shard, sharding_of
from megarl.engine.weight_checks import base_checksum, check_base
from megarl.machine.background import in_background
from megarl.machine.errors import UNWRITTEN, CheckpointError, counted

OPTIMIZER_FORMAT = "fully_reshardable"
RNG_KEY = "rng_state"


class PendingSave:
    """A save whose state has been copied, and which is written while training continues.

    A thread writes a rank's items into one file and frees their memory one by one. Megatron's own writer
    forks processes that have threads, and needs a server for their results.
    """

    def __init__(self, folder: Path, items: list[ItemToWrite], common: dict) -> None:
        self._folder = folder
        self._path = folder / f"__{dist.get_rank()}_0.distcp"
        self._items = items
        self._common = common
        self._written: list[StoredItem] = []
        self._is_canceled = False
        self._work = in_background(self._write, f"checkpoint {self._path.name}")

    def is_written(self) -> bool:
        """Return whether this rank has finished writing, successfully or not. `finish` raises failures."""
        return self._work.done()

    def cancel(self) -> None:
        """Stop writing after the item that is being written, because the save has been dropped.

        The rest is released, and files that are open are still closed by the thread. Does not wait.
        """
        self._is_canceled = True

    def _remaining(self) -> Iterator[ItemToWrite]:
        # Items are popped from the end, so that each one's memory is released once it is written.
        while self._items and not self._is_canceled:
            yield self._items.pop()

    def _write(self) -> None:
        self._items.reverse()
        try:
            if self._items:
                write_items(self._path, self._remaining(), self._written.append)
        finally:
            # After a failure, the copies that were not written are useless too.
            self._items.clear()

    def finish(self) -> dict[str, str]:
        """Wait until everything is written and, with all ranks, complete Megatron's part of the folder.

        Returns:
            The checksums of what this rank wrote, by name (checkpoints/role_folder.py), for the manifest.

        Raises:
            CheckpointError: A rank could not write. Raised on all ranks.
        """
        # A failure on one rank is raised on all of them, so that none waits in the gather below.
        error = self._work.exception()
        failure = None
        if error is not None:
            reason = error.strerror if isinstance(error, OSError) else None
            reason = reason or f"{type(error).__name__}: {error}"
            failure = f"{self._path}: cannot be written: {reason}", UNWRITTEN
        _agree(failure)

        # Rank 0 collects what all ranks wrote, because it writes the index of the whole folder.
        parts: list[list[StoredItem]] | None = (
            [[] for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
        )
        dist.gather_object(self._written, parts, dst=0)

        def complete() -> dict[str, str]:
            if parts is None:
                return {}
            save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))
            write_index(self._folder, [item for part in parts for item in part], self._common)
            return item_checksums(self._folder, WHOLE_FILES)

        return {item_name(item): item.checksum for item in self._written} | _on_all_ranks(
            complete, self._folder, "written"
        )


def begin_save(engine: MegatronEngine, folder: Path) -> PendingSave:
    """Copy the current state to the host, even if it is offloaded, and start to write it into `folder`.

    The folder is created, or must be empty. All ranks of the model call this function. Training may continue
    when it returns.

    Raises:
        CheckpointError: The folder cannot be created. Raised on all ranks. The parent folder is not created:
            if the folder of a run was moved away, a second one must not appear.
    """
    # Rank 0 creates the folder before any rank writes into it.
    _on_all_ranks(lambda: folder.mkdir(exist_ok=True) if dist.get_rank() == 0 else None, folder, "written")
    base = base_checksum(engine)
    common = _common_state(engine.optimizer, base) if dist.get_rank() == 0 else {}

    # The host copies are complete when this function returns; only writing continues in the background.
    return PendingSave(folder, list(_host_items(engine)), common)


def write_tensors(folder: Path, shards: Iterable[Shard], places: OffloadableState) -> None:
    """Write slices of tensors as a distributed checkpoint without a training state.

    All ranks of the model call this function.

    Args:
        folder: The folder, which is created with its parents.
        shards: This rank's slices. Over all ranks, they cover each tensor once.
        places: Copies the tensors, which may be offloaded.

    Raises:
        CheckpointError: A rank cannot write. Raised on all ranks.
    """
    # The other ranks wait here until the folder exists.
    _on_all_ranks(
        lambda: folder.mkdir(parents=True, exist_ok=True) if dist.get_rank() == 0 else None, folder, "written"
    )
    PendingSave(folder, [_item_of(shard, places) for shard in shards], {}).finish()


def _host_items(engine: MegatronEngine) -> Iterable[ItemToWrite]:
    sharding = sharding_of(engine.models, engine.groups)
    slices = engine.optimizer.slices()

    # Weights and optimizer state are copied one slice at a time, from memory or the host buffer.
    for shards in (sharding.of_weights(slices), sharding.of_optimizer(slices)):
        for shard in shards:
            if shard.is_main:
                yield _item_of(shard, engine.places)

    # Objects that Megatron stores in addition to tensors, and the random state.
    for entry in (*sharding.objects, _rng_entry(engine.groups)):
        if is_main_replica(entry.replica_id):
            # Megatron stores a list with one element.
            yield ItemToWrite(entry.unique_key, [entry.data])


def _item_of(shard: Shard, places: OffloadableState) -> ItemToWrite:
    data = places.host_copy(shard.tensor, shard.start, shard.place.volume).view(shard.place.shape)
    return ItemToWrite(shard.key, data, shard.shape, shard.place.starts)


def _rng_entry(groups: ParallelGroups) -> ShardedObject:
    """Describe the random state of this rank. Ranks that share rows store a single state, the first one's."""
    parallel = groups.parallel
    return ShardedObject(
        RNG_KEY,
        random_state(),
        (parallel.pipeline_parallel_size, parallel.tensor_parallel_size, parallel.data_parallel_size),
        (groups.pipeline_rank, groups.tensor_rank, groups.data_rank),
        replica_id=groups.context_rank,
    )


def _common_state(optimizer: Optimizer, base: Mapping[str, int]) -> dict:
    """Return the state that all ranks share, in the place where Megatron's own programs expect it."""
    settings = {
        "distrib_optim_sharding_type": OPTIMIZER_FORMAT,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    return {
        "checkpoint_version": 3.0,
        "content_metadata": settings,
        "optimizer": optimizer.megatron_state(param_state_sharding_type=OPTIMIZER_FORMAT),
        "opt_param_scheduler": optimizer.schedule_state(),
        "step_counts": optimizer.counts(),
        **base,
    }


def load(engine: MegatronEngine, folder: Path) -> None:
    """Load a checkpoint, which may have another layout, into the engine. All of its ranks call this function.

    The learning rate continues at the same point, on this engine's schedule. Random number generators
    continue if the layout is the same; otherwise each rank keeps its own.

    Raises:
        CheckpointError: The folder is damaged or belongs to another model. Raised on all ranks, before
            anything is changed.
    """
    # Tensors are filled in place, so all of them must be in memory.
    with engine.in_memory(*StatePart):
        # Compare the folder with the model before anything is overwritten.
        index = _on_all_ranks(lambda: _checked_index(folder), folder, "read")
        shards = trained_shards(engine)
        vocab_size = engine.spec.architecture.vocab_size
        _on_all_ranks(lambda: _check_shards(index, shards, vocab_size), folder, "read")
        _check_complete(index, shards)
        base = base_checksum(engine)
        _on_all_ranks(lambda: check_base(folder, base), folder, "read")

        # A NaN that remains after loading reveals an element that was not filled.
        for shard in shards:
            shard.view.fill_(float("nan"))
        wanted = {
            str(number): _sharded_tensor(shard, index.tensors[shard.key])
            for number, shard in enumerate(shards)
        }
        common: Any = dist_checkpointing.load(
            {"shards": wanted}, str(folder), validate_access_integrity=False
        )
        _on_all_ranks(lambda: _check_loaded(folder, shards), folder, "read")

        # Counts and random state are set only after all tensors have been loaded.
        engine.optimizer.set_counts(**common["step_counts"])
        _load_random_state(index, engine.groups)


def trained_shards(engine: MegatronEngine) -> list[Shard]:
    """Return everything that a checkpoint restores in this rank's memory: parameters and optimizer state."""
    sharding = sharding_of(engine.models, engine.groups)
    parameters = chain.from_iterable(sharding.parameters.values())
    return [*parameters, *sharding.of_optimizer(engine.optimizer.slices())]


def _checked_index(folder: Path) -> TorchDistIndex:
    """Check this rank's part of the folder's bytes, before Megatron reads the folder and runs its pickles."""
    check_folder(folder, part=(dist.get_rank(), dist.get_world_size()))
    return read_index(folder)


def why_missing(stored: Collection[str], key: str) -> str:
    """Return why a checkpoint with the `stored` tensors lacks one that a model needs."""
    if not key.startswith("optimizer.state."):
        return "the checkpoint has another architecture"
    # The optimizer of that run may have had other values of this parameter.
    state, _, parameter = key.removeprefix("optimizer.state.").partition(".")
    pattern = re.compile(rf"optimizer\.state\.(\w+)\.{re.escape(parameter)}")
    kept = [match[1] for other in stored if (match := pattern.fullmatch(other))]
    if kept:
        return (
            f"the optimizer of that run kept {', '.join(sorted(kept))} of this parameter, and this one "
            f"{state}: use the optimizer of that run, or start a new run from its weights"
        )
    return "it was frozen in that run (experts.freeze_router)"


def _check_shards(index: TorchDistIndex, shards: Sequence[Shard], vocab_size: int) -> None:
    """Check that the checkpoint has what this rank needs. The vocabulary may be padded differently."""
    if not any(key.startswith("optimizer.") for key in index.tensors):
        raise CheckpointError(
            f"{index.folder}: contains a model without its training state, so it cannot be resumed; convert "
            f"it to a Hugging Face folder and start from that (model.path)"
        )
    for shard in shards:
        stored = index.tensors.get(shard.key)
        if stored is None:
            why = why_missing(index.tensors, shard.key)
            raise CheckpointError(f"{index.folder}: has no tensor {shard.key}, which this model needs; {why}")
        # The padding of a vocabulary depends on the layout: only the number of rows may differ.
        same = stored.shape == shard.shape or (
            shard.is_padded
            and stored.shape[1:] == shard.shape[1:]
            and min(stored.shape[0], shard.shape[0]) >= vocab_size
        )
        if not same:
            raise CheckpointError(
                f"{index.folder}: {shard.key} has shape {stored.shape}, but this model needs {shard.shape}"
            )
        if stored.dtype != shard.tensor.dtype:
            # Moments have dtypes of their own with Transformer Engine's Adam.
            is_moment = shard.key.startswith(tuple(f"optimizer.state.{name}." for name in MOMENTS))
            keys = (
                "the dtypes of moments in megatron.optimizer, or model.dtype" if is_moment else "model.dtype"
            )
            raise CheckpointError(
                f"{index.folder}: {shard.key} is {stored.dtype}, but this run uses {shard.tensor.dtype}: set "
                f"{keys}"
            )


def _check_complete(index: TorchDistIndex, shards: Sequence[Shard]) -> None:
    """Check that the ranks together read every stored tensor."""
    parts: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, {shard.key for shard in shards})

    # Each rank knows only its own shards, so leftovers are determined from the union over all ranks.
    extra = index.tensors.keys() - set().union(*parts)

    if extra:
        why = (
            "; it is frozen in this run (experts.freeze_router)"
            if all(key.startswith("optimizer.") for key in extra)
            else ""
        )
        raise CheckpointError(
            f"{index.folder}: has {counted(len(extra), 'tensor')} that this model lacks, such as "
            f"{min(extra)}{why}"
        )


def _sharded_tensor(shard: Shard, stored: DistributedTensor) -> ShardedTensor:
    """Describe a shard for Megatron to fill in place.

    If the stored vocabulary is padded to another size, rows that are not stored become zero.
    """
    return ShardedTensor(
        key=shard.key,
        data=shard.view,
        dtype=shard.tensor.dtype,
        local_shape=shard.place.shape,
        global_shape=shard.shape,
        global_offset=shard.place.starts,
        axis_fragmentations=None,
        allow_shape_mismatch=stored.shape != shard.shape,
    )


def _check_loaded(folder: Path, shards: Sequence[Shard]) -> None:
    for shard in shards:
        if bool(shard.view.isnan().any()):
            raise CheckpointError(
                f"{folder}: {shard.key} contains NaN after loading; an earlier checkpoint may be intact"
            )


def _load_random_state(index: TorchDistIndex, groups: ParallelGroups) -> None:
    item = index.objects.get(_rng_entry(groups).unique_key)

    # A checkpoint of another layout has no entry for this rank, which then keeps its generators.
    if item is None:
        return

    with (index.folder / item.file).open("rb") as file:
        file.seek(item.position)
        # The state consists of tensors, numbers and containers, so no pickled code has to run.
        (state,) = torch.load(io.BytesIO(file.read(item.nbytes)), weights_only=True)

    set_random_state(state)


# A rank's report to the others about files that it could not read or write: the message, and the hint.
_Failure = tuple[str, Sequence[str]]


def _on_all_ranks[Result](
    action: Callable[[], Result], folder: Path, done: Literal["read", "written"]
) -> Result:
    """Return the result of `action`. File errors on any rank are raised on every rank."""
    failure: _Failure | None = None
    try:
        result = action()
    except CheckpointError as error:
        failure = str(error), error.hint
    except OSError as error:
        message = f"{error.filename or folder}: cannot be {done}: {error.strerror or error}"
        failure = message, UNWRITTEN if done == "written" else CheckpointError.hint

    # This collective is reached by every rank, whether its own action failed or not.
    _agree(failure)
    return result  # pyrefly: ignore[unbound-name]  # a failure has been raised


def _agree(failure: _Failure | None) -> None:
    """Raise CheckpointError on every rank if any of them failed, with the message of the first."""
    failures: list[_Failure | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    # Every rank raises, or the others would wait for this one in their next collective.
    for each in failures:
        if each is not None:
            message, hint = each
            raise CheckpointError(message, hint=hint)


def random_state() -> dict[str, Any]:
    """Return the state of the generators of torch, the GPU, Megatron's tracker, numpy and Python.

    It consists of tensors, numbers and containers only, so that it can be read without running pickled code.
    """
    tracker: Any = get_cuda_rng_tracker()
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "tracker": {name: generator.clone() for name, generator in tracker.get_states().items()},
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "python": random.getstate(),
    }
    return {**state, "cuda": torch.cuda.get_rng_state()} if platform.current().is_cuda else state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `random_state`, on the same kind of device."""
    torch.set_rng_state(state["torch"])
    if platform.current().is_cuda and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states(state["tracker"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
