"""Snapshots of all trained models in host memory: every rank copies its state to a file on its node.

A snapshot is complete when every rank's file is. Two are kept: the older one is overwritten only when the
newer one is complete, with its copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from megarl.checkpoints.snapshot_file import SnapshotIndex, SnapshotSlices, decode_index
from megarl.config.roles import model_roles
from megarl.config.schema import RunConfig
from megarl.controller.futures import WorkerFuture, gather
from megarl.controller.group import RayWorkerGroup
from megarl.controller.snapshot_memory import LOST_S, FileLostError, SnapshotMemory, run_name
from megarl.machine.errors import RunError
from megarl.plan.placement.model_state import NUM_KEPT
from megarl.roles.megatron_worker import MegatronWorker
from megarl.roles.saved_models import SavedModel, SavedModels

_LOOK_S = 0.02
SETTLE_S = 2.0  # how long ranks that still run may take to complete a snapshot after another one died


class SnapshotLostError(RunError):
    """No complete snapshot is left, so that a lost process cannot be restarted."""

    hint = (
        "start the same command again: it continues from the newest state that is left",
        "save checkpoints more often, so that fewer steps are repeated: {checkpoint.every_steps}",
    )


class TakenSnapshot(NamedTuple):
    """A complete snapshot that the previous attempt of a run has left.

    Attributes:
        step: Its step.
        sizes: The number of ranks of each model that wrote it.
        has_this_layout: Whether the models have the same layout now, so that each rank loads its own file.
        slot: The slot of its files, known once they have been looked for.
    """

    step: int
    sizes: Mapping[str, int]
    has_this_layout: bool
    slot: int = 0

    def names(self, model: str | None = None) -> list[str]:
        """Return the names of the files, of one model or of all."""
        return _names(self.sizes if model is None else {model: self.sizes[model]}, self.slot)


class ModelSnapshots:
    """Takes and loads snapshots of the trained models of a run.

    Args:
        run: The name of the run (run_name).
        models: The trained models.
        copy_limit_s: How long copies to other nodes may take.
        continued: The snapshot of an earlier attempt from which the run continues. None: those of earlier
            attempts are released.
    """

    def __init__(
        self,
        run: str,
        models: Sequence[SavedModel],
        copy_limit_s: float,
        continued: TakenSnapshot | None = None,
    ) -> None:
        self._run = run
        self._continued = continued
        self._models = tuple(models)
        self._copy_limit_s = copy_limit_s
        self._memory: SnapshotMemory | None = None
        self._copying: list[WorkerFuture] = []
        self._slot_of: dict[int, int] = {}  # step -> slot, of the snapshots that were begun last
        self._next_slot = 0
        self._is_copied = True  # whether the newest of them is complete with its copies
        # What `continued` has in another layout, until a snapshot of this layout is complete with its copies.
        self._other: TakenSnapshot | None = None
        self._on_replaced: Callable[[], None] = lambda: None
        # The newest snapshot that is complete with its copies: no later loss goes back further.
        self.secured: int | None = None

    @property
    def processes(self) -> list[RayWorkerGroup]:
        """The processes of the models."""
        return list(dict.fromkeys(model.group.processes for model in self._models))

    def begin(self, step: int) -> None:
        """Start a snapshot of the state after `step`. Returns at once unless the previous one is incomplete.

        Does nothing if all ranks have loaded that of `step`, because their state has not changed since then.

        Raises:
            WorkerError: A rank failed or died.
            RunError: The previous snapshot is not complete in time, or a node has no memory for this one.
        """
        memory = self._opened()
        if step in self._slot_of:
            return
        self.finish()
        paths = memory.paths()
        # If a holder was lost before the newest snapshot was copied, that one is overwritten.
        if self.secured is not None:
            self._next_slot = (self._slot_of[self.secured] + 1) % NUM_KEPT
        elif self._other is not None:
            self._next_slot = (self._other.slot + 1) % NUM_KEPT
        slot = self._next_slot
        self._next_slot = (slot + 1) % NUM_KEPT

        # The step of an overwritten snapshot is forgotten before its first file changes.
        self._slot_of = {other: used for other, used in self._slot_of.items() if used != slot} | {step: slot}
        self._is_copied = False
        if not paths.keys() >= set(self._names(step)):
            self._await_ranks()  # raises the error of ranks on a lost node
            raise RunError(
                f"the snapshot of step {step} cannot begin: the process that holds the snapshots of a node "
                f"was lost and has not started again within {LOST_S:g} s; see the logs of Ray on the nodes"
            )
        self._copying = self._on_each_rank(
            lambda model, rank: model.group.call_rank(
                rank, MegatronWorker.begin_snapshot, paths[_file_of(model, rank, slot)], step
            )
        )

    def finish(self) -> None:
        """Wait until the last snapshot is complete everywhere, and release what only older ones need.

        This includes one that was loaded: its files may have no copies on the new nodes of the ranks yet.
        Raises the errors of `begin`.
        """
        if self._is_copied:
            return
        gather(*self._copying)
        self._await_ranks()
        self._copying = []

        newest = max(self._slot_of)
        end_s = time.monotonic() + self._copy_limit_s
        while not self._opened().has_all(self._names(newest), newest):
            if self._opened().has_dead:
                return  # the files of a holder are lost; the next snapshot has all of them again
            if time.monotonic() > end_s:
                raise RunError(
                    f"the snapshot of step {newest} has no complete copy on another node after "
                    f"{self._copy_limit_s:g} s; the network between the nodes is slow or broken"
                )
            time.sleep(_LOOK_S)

        self.secured = newest
        self._is_copied = True
        if self._other is not None:
            self._on_replaced()
            self._other = None
        self._opened().settle()

    def newest_after_loss(self) -> int | None:
        """Return the step of the newest complete snapshot after a rank has died; None if there is none.

        A snapshot that was complete with its copies is lost only with their holders.
        """
        if self._memory is None:
            return None
        begin_s = time.monotonic()
        while True:
            newest = self._newest_complete(self._memory)
            waited_s = time.monotonic() - begin_s
            is_last = newest == max(self._slot_of, default=None)
            if is_last or waited_s >= SETTLE_S:
                is_secured = newest is not None and (self.secured is None or newest >= self.secured)
                return newest if is_last or is_secured else None
            time.sleep(_LOOK_S)

    def _newest_complete(self, memory: SnapshotMemory) -> int | None:
        found = memory.steps()
        complete = [step for step in self._slot_of if self._is_complete(found, step)]
        if self._other is not None and _has_all(found, self._other.names(), self._other.step):
            complete.append(self._other.step)
        return max(complete, default=None)

    def _is_complete(self, found: Mapping[str, Collection[int]], step: int) -> bool:
        return step in self._slot_of and _has_all(found, self._names(step), step)

    def move(self) -> None:
        """Use the nodes that the ranks are on now, after some were restarted on other nodes."""
        self._opened().place(self._node_of())

    def forget(self) -> None:
        """Forget all snapshots, because the models have a state from elsewhere."""
        self._slot_of = {}
        self._copying = []
        self._is_copied = True
        self._other = None
        self.secured = None

    def load_taken(self, on_replaced: Callable[[], None] = lambda: None) -> None:
        """Load the snapshot of an earlier attempt in all ranks.

        Args:
            on_replaced: Called before the files of a snapshot of another layout are released, because one of
                this layout has replaced it.

        Raises:
            WorkerError: A rank failed or died, or a snapshot is damaged.
            SnapshotLostError: A file is lost.
        """
        assert self._continued is not None, "the run does not continue from a snapshot"
        self._on_replaced = on_replaced
        self.load(self._continued.step)

    def _load_other_layout(self, memory: SnapshotMemory, other: TakenSnapshot) -> None:
        try:
            for model in self._models:
                self._load_resharded(memory, model, other)
        except FileLostError as error:
            raise SnapshotLostError(str(error)) from error
        memory.keep(other.names())
        self._slot_of = {}
        self._copying = []
        self._is_copied = True

    def _load_resharded(self, memory: SnapshotMemory, model: SavedModel, other: TakenSnapshot) -> None:
        """Load a model in another layout: each rank gets the parts of snapshots that it needs."""
        stored = memory.stored(other.names(model.name), other.step)
        indexes = {name: decode_index(memory.read_index(name, file)) for name, file in stored.items()}
        slices = SnapshotSlices(indexes)
        node_of = model.group.processes.pool.node_ids()
        sources = [
            # A rank without tensors needs a record.
            slices.sources(wanted, {name for name, (_, nodes) in stored.items() if node in nodes})
            or {next(iter(stored)): []}
            for node, wanted in zip(
                node_of, model.group.call(MegatronWorker.wanted_tensors).get(), strict=True
            )
        ]

        # The ranks of a node share the files on it.
        parts: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for node, of_rank in zip(node_of, sources, strict=True):
            of_node = parts.setdefault(node, {})
            for name, numbers in of_rank.items():
                of_node[name] = _merged([*of_node.get(name, ()), *_ranges(indexes[name], numbers)])
        paths = memory.bring_parts(stored, parts)
        gather(
            *(
                model.group.call_rank(
                    rank,
                    MegatronWorker.load_resharded,
                    {paths[node_of[rank]][name]: numbers for name, numbers in of_rank.items()},
                )
                for rank, of_rank in enumerate(sources)
            )
        )

    def load(self, step: int) -> None:
        """Load the snapshot of a step in all ranks, which may have been restarted.

        Raises:
            WorkerError: A rank failed or died, or its snapshot is damaged.
            SnapshotLostError: A file is lost.
        """
        memory = self._opened()
        other = self._other
        # The first snapshot of this layout has the same step, but may be incomplete.
        if other is not None and other.step == step and not self._is_complete(memory.steps(), step):
            self._load_other_layout(memory, other)
            return
        if step not in self._slot_of:
            raise SnapshotLostError(f"no node has the snapshot of step {step}")
        try:
            paths = memory.bring_home(self._names(step), step)
        except FileLostError as error:
            raise SnapshotLostError(str(error)) from error
        slot = self._slot_of[step]
        gather(
            *self._on_each_rank(
                lambda model, rank: model.group.call_rank(
                    rank, MegatronWorker.load_snapshot, paths[_file_of(model, rank, slot)]
                )
            )
        )

        # A newer snapshot is incomplete, or of a state that is computed again.
        self._next_slot = (slot + 1) % NUM_KEPT
        self._slot_of = {other: used for other, used in self._slot_of.items() if other <= step}
        self._copying = []
        self._is_copied = False

    def close(self, keeps_files: bool = False) -> None:
        """Release the memory of all snapshots, or leave them to the next attempt of the run."""
        if self._memory is not None:
            self._memory.close(keeps_files)

    def _opened(self) -> SnapshotMemory:
        """Start the holders when the first snapshot is taken, when the ranks' nodes are known."""
        if self._memory is None:
            continued = self._continued
            self._memory = SnapshotMemory(self._run, self._node_of(), continues=continued is not None)
            if continued is not None:
                slot = slot_of_step(self._memory.steps(), continued.sizes, continued.step)
                if slot is not None and continued.has_this_layout:
                    self._slot_of = {continued.step: slot}
                elif slot is not None:
                    self._other = continued._replace(slot=slot)
        return self._memory

    def _node_of(self) -> dict[str, str]:
        """Return Ray's id of the node of each file, which is that of its rank."""
        return {
            _file_of(model, rank, slot): node
            for model in self._models
            for rank, node in enumerate(model.group.processes.pool.node_ids())
            for slot in range(NUM_KEPT)
        }

    def _names(self, step: int) -> list[str]:
        sizes = {model.name: model.group.world_size for model in self._models}
        return _names(sizes, self._slot_of[step])

    def _await_ranks(self) -> None:
        """Wait until no rank copies its state any longer. Raises WorkerError."""
        gather(
            *self._on_each_rank(
                lambda model, rank: model.group.call_rank(rank, MegatronWorker.await_snapshot)
            )
        )

    def _on_each_rank(self, call: Callable[[SavedModel, int], WorkerFuture]) -> list[WorkerFuture]:
        return [call(model, rank) for model in self._models for rank in range(model.group.world_size)]


def model_snapshots(
    config: RunConfig, models: SavedModels, continued: TakenSnapshot | None
) -> ModelSnapshots:
    """Return the snapshots of a run. `continued` is explained in ModelSnapshots."""
    run = run_name(config.trainer.output_dir)
    return ModelSnapshots(run, models.models, config.trainer.phase_time_limit_s, continued)


def sizes_of_trained(config: RunConfig) -> dict[str, int]:
    """Return the number of ranks of each model that a run trains."""
    return {role.name: role.parallel.world_size for role in model_roles(config) if role.optim is not None}


def slot_of_step(steps: Mapping[str, Collection[int]], sizes: Mapping[str, int], step: int) -> int | None:
    """Return the slot that has the complete snapshot of a step, or None.

    Args:
        steps: The steps of each file, by name.
        sizes: The number of ranks of each model.
    """
    return next((s for s in range(NUM_KEPT) if _has_all(steps, _names(sizes, s), step)), None)


def _has_all(steps: Mapping[str, Collection[int]], names: Sequence[str], step: int) -> bool:
    return all(step in steps.get(name, ()) for name in names)


def _ranges(index: SnapshotIndex, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return where tensors, and the record, are in a snapshot: first byte and end of each."""
    parts = [*(index[number] for number in numbers), index[-1]]
    return [(each.position, each.position + each.nbytes) for each in parts]


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same bytes as disjoint ranges in order."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def _names(sizes: Mapping[str, int], slot: int) -> list[str]:
    return [_name(model, rank, size, slot) for model, size in sizes.items() for rank in range(size)]


def _file_of(model: SavedModel, rank: int, slot: int) -> str:
    return _name(model.name, rank, model.group.world_size, slot)


def _name(model: str, rank: int, num_ranks: int, slot: int) -> str:
    # Files of some ranks of a larger layout must not pass for those of all ranks of a smaller one.
    return f"{model}-{rank}of{num_ranks}-{slot}"
