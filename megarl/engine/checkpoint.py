"""Saves the training state of a model beside its training, that of its random number generators too, and
loads it into any layout.

On disk it is Megatron's distributed checkpoint (`torch_dist`): its names and places in whole tensors, its
optimizer format `fully_reshardable`. Each data-parallel rank writes the elements that its optimizer updates,
so nothing is gathered for it.
"""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megarl.checkpoints.role_folder import WHOLE_FILES, check_folder, item_checksums, item_name
from megarl.checkpoints.torch_dist import DistributedTensor, TorchDistIndex, read_index
from megarl.checkpoints.torch_dist_writer import ItemToWrite, WrittenItem, write_index, write_items
from megarl.engine import platform
from megarl.engine.engine import MegatronEngine, TrainingState
from megarl.engine.groups import ParallelGroups
from megarl.engine.optimizer import StepCounts
from megarl.engine.sharding import Shard, sharding_of
from megarl.machine.errors import UNWRITTEN, CheckpointError

Result = TypeVar("Result")

OPTIMIZER_FORMAT = "fully_reshardable"
RNG_KEY = "rng_state"


class BackgroundWriter:
    """Writes a rank's items into one file, and gives their memory back one by one.

    Megatron's own writer forks processes that have threads and keeps a server for their results; this one is
    a thread.
    """

    def __init__(self, path: Path, items: list[ItemToWrite]) -> None:
        self._path = path
        self._items = items
        self._written: list[WrittenItem] = []
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {path.name}", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Also where it has failed."""
        return not self._thread.is_alive()

    def wait(self) -> tuple[list[WrittenItem], str | None]:
        """What was written, and what went wrong, in one line."""
        self._thread.join()
        return self._written, self._failure

    def _run(self) -> None:
        # Items are popped from the end, so that each one's memory is released as soon as it is written.
        self._items.reverse()
        try:
            if self._items:
                write_items(
                    self._path, (self._items.pop() for _ in range(len(self._items))), self._written.append
                )
        except Exception as error:  # noqa: BLE001  (the boundary of a thread: whoever waits for it raises it)
            reason = (
                error.strerror if isinstance(error, OSError) else None
            ) or f"{type(error).__name__}: {error}"
            self._failure = f"{self._path}: cannot be written: {reason}"
        finally:
            # After a failure the copies that were not written are of no use either.
            self._items.clear()


class PendingSave:
    """A save whose state has been copied, and is being written while training continues."""

    def __init__(self, folder: Path, writer: BackgroundWriter, common: dict) -> None:
        self._folder = folder
        self._writer = writer
        self._common = common

    def is_written(self) -> bool:
        """On this rank; also where that has failed, which `finish` raises."""
        return self._writer.is_done()

    def finish(self) -> dict[str, str]:
        """Waits for what is not written yet and, with all ranks, completes Megatron's part of the folder.

        Returns the checksums of what this rank wrote, by name (checkpoints/role_folder.py), for the manifest.
        Raises CheckpointError, on all ranks, where one of them could not write.
        """
        written, failure = self._writer.wait()

        # A failure on one rank is raised on all of them, so that none waits in the gather below.
        _agree(None if failure is None else _Failure(failure, UNWRITTEN))

        # Rank 0 collects what all ranks wrote, because it writes the index of the whole folder.
        parts: list[list[WrittenItem]] | None = (
            [[] for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
        )
        dist.gather_object(written, parts, dst=0)

        def complete() -> dict[str, str]:
            if parts is None:
                return {}
            save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))
            write_index(self._folder, [item for part in parts for item in part], self._common)
            return item_checksums(self._folder, WHOLE_FILES)

        return {item_name(item.stored): item.checksum for item in written} | _on_all_ranks(
            complete, self._folder, "written"
        )


def begin_save(engine: MegatronEngine, folder: Path) -> PendingSave:
    """Copies the state of now to the host, wherever it is, and starts to write it into `folder`, which is
    made, or empty.

    Called by all ranks of the model. Training may continue when it returns. Raises CheckpointError, on all
    ranks, where the folder cannot be made, also where the one that it is to be in has gone: a run's folder
    that was moved away must not come to be a second time.
    """
    # Rank 0 creates the folder before any rank writes into it.
    _on_all_ranks(lambda: folder.mkdir(exist_ok=True) if dist.get_rank() == 0 else None, folder, "written")
    state = engine.training_state()
    common = _common_state(state) if dist.get_rank() == 0 else {}

    # The host copies are complete when this returns; only the writing continues in the background.
    return PendingSave(
        folder, BackgroundWriter(folder / f"__{dist.get_rank()}_0.distcp", list(_host_items(state))), common
    )


def _host_items(state: TrainingState) -> Iterable[ItemToWrite]:
    sharding = sharding_of(state.models, state.groups)
    slices = state.optimizer.slices()

    # Weights and optimizer state, copied one slice at a time from wherever they are now.
    for shards in (sharding.of_weights(slices), sharding.of_optimizer(slices)):
        for shard in shards:
            if shard.is_main:
                data = state.places.host_copy(shard.tensor, shard.start, shard.place.volume).view(
                    shard.place.shape
                )
                yield ItemToWrite(key=shard.key, shape=shard.shape, offsets=shard.place.starts, data=data)

    # The objects that Megatron stores beside the tensors, and the random state.
    for entry in (*sharding.objects, _rng_entry(state.groups)):
        if is_main_replica(entry.replica_id):
            yield ItemToWrite(key=entry.unique_key, data=[entry.data])  # Megatron stores a list, of one


def _rng_entry(groups: ParallelGroups) -> ShardedObject:
    """Each rank has its own, but for those that share rows: of them the first has theirs."""
    parallel = groups.parallel
    return ShardedObject(
        RNG_KEY,
        random_state(),
        (parallel.pipeline_parallel_size, parallel.tensor_parallel_size, parallel.data_parallel_size),
        (groups.pipeline_rank, groups.tensor_rank, groups.data_rank),
        replica_id=groups.context_rank,
    )


def _common_state(state: TrainingState) -> dict:
    """What all ranks share, where Megatron's own programs look for it."""
    settings = {
        "distrib_optim_sharding_type": OPTIMIZER_FORMAT,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    optimizer = state.optimizer.megatron_state(param_state_sharding_type=OPTIMIZER_FORMAT)
    counts = state.optimizer.counts()

    return {
        "checkpoint_version": 3.0,
        "content_metadata": settings,
        "optimizer": optimizer,
        "opt_param_scheduler": state.optimizer.schedule_state(),
        "step_counts": counts._asdict(),
    }


def load(engine: MegatronEngine, folder: Path) -> None:
    """The engine's state becomes that of the checkpoint, which may be of another layout; called by all its
    ranks.

    The learning rate continues where it was, on this engine's schedule. Random number generators do in the
    same layout; in another one each rank keeps its own. Raises CheckpointError, on all ranks and before
    anything is changed, for a folder that is damaged or of another model.
    """
    state = engine.training_state()

    # Tensors are filled in place, so all of them must be in memory; they are moved away again at the end.
    offloaded = state.places.offloaded
    engine.restore(*offloaded)

    # Compare the folder with the model before anything is overwritten.
    index = _on_all_ranks(lambda: _checked_index(folder), folder, "read")
    sharding = sharding_of(state.models, state.groups)
    shards = [*sharding.of_parameters(), *sharding.of_optimizer(state.optimizer.slices())]
    _on_all_ranks(lambda: _check_shards(index, shards, state.vocab_size), folder, "read")
    _check_complete(index, shards)

    # A NaN that remains after loading reveals an element that was not filled.
    for shard in shards:
        shard.view.fill_(float("nan"))
    wanted = {
        str(number): _sharded_tensor(shard, index.tensors[shard.key]) for number, shard in enumerate(shards)
    }
    common = dist_checkpointing.load({"shards": wanted}, str(folder), validate_access_integrity=False)
    _on_all_ranks(lambda: _check_loaded(folder, shards), folder, "read")

    # Counts and random state follow only after all tensors proved to be loaded.
    state.optimizer.set_counts(StepCounts(**common["step_counts"]))
    _load_random_state(index, state.groups)
    engine.offload(*offloaded)


def _checked_index(folder: Path) -> TorchDistIndex:
    """Each rank checks its part of the folder's bytes. Only after it may Megatron read the folder: it runs
    the pickles."""
    check_folder(folder, part=(dist.get_rank(), dist.get_world_size()))
    return read_index(folder)


def _check_shards(index: TorchDistIndex, shards: Sequence[Shard], vocab_size: int) -> None:
    """The checkpoint has what this rank needs, as it needs it. A vocabulary may be padded to another size."""
    if not any(key.startswith("optimizer.") for key in index.tensors):
        raise CheckpointError(
            f"{index.folder}: holds a model without the state of its training, which cannot be resumed; "
            f"convert it to a Hugging Face "
            "folder and start from that (model.path)"
        )
    for shard in shards:
        stored = index.tensors.get(shard.key)
        if stored is None:
            why = (
                "it was frozen there (experts.freeze_router)"
                if shard.key.startswith("optimizer.")
                else "it is of another architecture"
            )
            raise CheckpointError(f"{index.folder}: has no tensor {shard.key}, which this model has; {why}")
        # The padding of a vocabulary depends on the layout: only its number of rows may differ.
        same = stored.shape == shard.shape or (
            shard.is_padded
            and stored.shape[1:] == shard.shape[1:]
            and min(stored.shape[0], shard.shape[0]) >= vocab_size
        )
        if not same:
            raise CheckpointError(
                f"{index.folder}: {shard.key} has shape {stored.shape}; this model's has {shard.shape}"
            )
        if stored.dtype != shard.tensor.dtype:
            raise CheckpointError(
                f"{index.folder}: {shard.key} is {stored.dtype}; this run has {shard.tensor.dtype}: set "
                f"model.dtype"
            )


def _check_complete(index: TorchDistIndex, shards: Sequence[Shard]) -> None:
    """The ranks together take everything that is stored."""
    parts: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, {shard.key for shard in shards})

    # Each rank knows its own shards only, so leftovers are found in the union over the ranks.
    extra = index.tensors.keys() - set().union(*parts)

    if extra:
        why = (
            "; it is frozen here (experts.freeze_router)"
            if all(key.startswith("optimizer.") for key in extra)
            else ""
        )
        raise CheckpointError(
            f"{index.folder}: has {len(extra)} tensors that this model has not, such as {min(extra)}{why}"
        )


def _sharded_tensor(shard: Shard, stored: DistributedTensor) -> ShardedTensor:
    """For Megatron to fill in place. Where the vocabulary is padded to another size, the rows that are not
    stored become zero."""
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
                f"{folder}: {shard.key} is not a number somewhere after loading; an earlier checkpoint may "
                f"be good"
            )


def _load_random_state(index: TorchDistIndex, groups: ParallelGroups) -> None:
    item = index.objects.get(_rng_entry(groups).unique_key)

    # Another layout has no entry for this rank, which then keeps its own generators.
    if item is None:
        return

    with (index.folder / item.file).open("rb") as file:
        file.seek(item.position)
        # The state consists of tensors, numbers and containers, so no code of a pickle has to run.
        (state,) = torch.load(io.BytesIO(file.read(item.nbytes)), weights_only=True)

    set_random_state(state)


class _Failure(NamedTuple):
    """What a rank has to say to the others about files that it could not read or write."""

    message: str
    hint: Sequence[str]


def _on_all_ranks(action: Callable[[], Result], folder: Path, done: Literal["read", "written"]) -> Result:
    """What `action` returns here. What it raises of files, on any rank, is raised on every rank."""
    failure = None
    try:
        result = action()
    except CheckpointError as error:
        failure = _Failure(str(error), error.hint)
    except OSError as error:
        message = f"{error.filename or folder}: cannot be {done}: {error.strerror or error}"
        failure = _Failure(message, UNWRITTEN if done == "written" else CheckpointError.hint)

    # A collective, which every rank reaches, whether its own action failed or not.
    _agree(failure)
    return result  # there is none only with a failure


def _agree(failure: _Failure | None) -> None:
    """Raise CheckpointError on every rank if any of them failed, with the words of the first."""
    failures: list[_Failure | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for each in failures:
        if each is not None:
            raise CheckpointError(each.message, hint=each.hint)


def random_state() -> dict[str, Any]:
    """Of torch, the GPU, Megatron's tracker, numpy and Python: tensors, numbers and containers of them only,
    so that it can be read without running a pickle's code."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "tracker": {
            name: generator.clone() for name, generator in get_cuda_rng_tracker().get_states().items()
        },
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "python": random.getstate(),
    }
    return {**state, "cuda": torch.cuda.get_rng_state()} if platform.current().is_cuda else state


def set_random_state(state: dict[str, Any]) -> None:
    """What `random_state` gave, on the same kind of device."""
    torch.set_rng_state(state["torch"])
    if platform.current().is_cuda and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
