"""Restart lost processes of models in their places, and bring all trained models back to a snapshot."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from megarl.config.schema import RecoveryConfig
from megarl.controller.cluster import await_ended_daemon, daemons_last_words
from megarl.controller.errors import PhaseTimeoutError, RayEndedError, WorkerError
from megarl.controller.futures import gather
from megarl.controller.group import RayWorkerGroup, RoleGroup
from megarl.controller.messages import FailureKind, qualified_name
from megarl.controller.restarts import leave_lost_nodes, node_wait_s
from megarl.machine.errors import NonFiniteUpdateError, ReplicaMismatchError
from megarl.roles.model_snapshots import ModelSnapshots, SnapshotLostError
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.roles.saved_models import SavedModels
from megarl.roles.start import PPORoles
from megarl.rollout.driver.rollout_weights import RolloutWeights

_log = logging.getLogger(__name__)
_FAILURES = 2  # losses in which a node is involved before it is excluded
_LOST_STATES = [qualified_name(kind) for kind in (NonFiniteUpdateError, ReplicaMismatchError)]


class Source(Enum):
    """A kind of state that models return to after a loss."""

    snapshot = "snapshot"
    checkpoint = "checkpoint"
    start = "start"


class SavedStep(NamedTuple):
    """A checkpoint on disk, or the start of the run, whose state new processes have.

    Attributes:
        step: Its step.
        folder: Its folder; None: the start.
        weight_version: The version of the actor's weights in it; None if the run has no engines.
    """

    step: int
    folder: Path | None
    weight_version: int | None = None


class Restarted(NamedTuple):
    """Result of a recovery.

    Attributes:
        step: The step whose state the trained models have now.
        roles: The roles with new processes.
        nodes: The nodes of the lost ranks.
        source: What had the state. Not a snapshot if none is complete.
    """

    step: int
    roles: tuple[str, ...]
    nodes: tuple[str, ...]
    source: Source = Source.snapshot

    def describe(self) -> str:
        """Name the state that the trained models have now."""
        if self.source is Source.start:
            return "the start of the run"
        return f"the {self.source.value} of step {self.step}"


class ModelRecovery:
    """Recovers from the loss of processes of models: actor, critic, reference, reward model.

    Args:
        groups: The groups of all models.
        snapshots: Snapshots of those that train.
        load_checkpoint: Loads a checkpoint on disk in those.
        schedule: The colocation schedule of their devices.
        wait_for_node_s: How long to wait for a free node after one is lost.
        weights: Weight sync of the actor's engines; None if the run has none.
    """

    def __init__(
        self,
        groups: Sequence[RoleGroup],
        snapshots: ModelSnapshots,
        load_checkpoint: Callable[[Path], None],
        schedule: OffloadSchedule,
        wait_for_node_s: float,
        weights: RolloutWeights | None = None,
    ) -> None:
        self._groups = tuple(groups)
        self._snapshots = snapshots
        self._load_checkpoint = load_checkpoint
        self._schedule = schedule
        self._wait_for_node_s = wait_for_node_s
        self._failures: Counter[str] = Counter()  # losses by address of a node
        self.excluded_nodes: list[str] = []  # addresses of nodes that the models have left
        self._weights = weights
        self._version_of: dict[int, int] = {}  # step -> the version of the actor's weights after it

    def begin_snapshot(self, step: int) -> None:
        """Start a snapshot of the state after `step`; see ModelSnapshots.begin."""
        self._snapshots.begin(step)
        if self._weights is not None:
            self._version_of[step] = self._weights.actor_version

    def secured_snapshot(self) -> int | None:
        """Return the step of the newest snapshot that is complete with its copies, and forget older ones."""
        secured = self._snapshots.secured
        if secured is not None:
            self._version_of = {
                step: version for step, version in self._version_of.items() if step >= secured
            }
        return secured

    def concerns(self, error: Exception) -> bool:
        """Return whether processes of these models are lost.

        They died, hang, have a wrong state, or their GPU has failed.
        """
        if not isinstance(error, (WorkerError, PhaseTimeoutError)):
            return False
        roles = {role for group in self._groups for role in (group.role, "+".join(group.processes.roles))}
        if error.role not in roles:
            return False
        if isinstance(error, PhaseTimeoutError):
            return True

        # The ranks are alive, but their state must not be used.
        if error.error_type in _LOST_STATES:
            return True

        # A rank's own exception comes first, although it may follow from the death of a peer.
        kinds = {error.kind, *(other.failure.kind for other in error.others)}
        return any(kind.is_loss for kind in kinds) or error.kind is FailureKind.communication

    def recover(
        self,
        error: WorkerError | PhaseTimeoutError,
        read_saved: Callable[[], SavedStep | None] = lambda: None,
    ) -> Restarted:
        """Restart the processes that `error` concerns, and load the newest complete snapshot in all models.

        Processes of other models keep running, but their state is that of the snapshot, too.

        Args:
            error: What was lost.
            read_saved: Returns what is used if no snapshot is left, and is called only then. At the start of
                the run, all trained models get new processes.

        Raises:
            CheckpointError: No snapshot is left, and the checkpoint is damaged.
            SnapshotLostError: There is neither a complete snapshot nor a checkpoint or the start.
            WorkerError: A process failed or died during the recovery.
            NodeLostError: A node is lost, and no other node has become free in time.
            RayEndedError: The run's own Ray is lost.
        """
        lost, nodes = self._lost(error)
        newest = self._snapshots.newest_after_loss()
        saved = read_saved() if newest is None else None
        # The processes that hold the snapshots are lost with Ray, too.
        if newest is None and (daemon := await_ended_daemon()):
            raise RayEndedError(daemon, daemons_last_words()) from error
        if newest is None and saved is None:
            raise SnapshotLostError("no complete snapshot of the trained models is left in memory")
        if newest is None and saved is not None and saved.folder is None:
            lost += [processes for processes in self._snapshots.processes if processes not in lost]
        for processes in lost:
            processes.shutdown()
            leave_lost_nodes(processes.pool, ", ".join(processes.roles), self._wait_for_node_s, cause=error)
        lost += [processes for processes in self._exclude(nodes) if processes not in lost]

        # Processes on the same devices must be offloaded before the new ones allocate memory.
        roles = [role for processes in lost for role in processes.roles]
        self._schedule.make_room(roles)
        for number, processes in enumerate(lost):
            for earlier in lost[:number]:
                if self._schedule.takes_turns(processes.roles[0], earlier.roles[0]):
                    earlier.ready.get()
            processes.restart()
        gather(*(processes.ready for processes in lost))
        self._schedule.restarted(roles)

        # All models go back to the same step, whether or not they lost a process.
        self._snapshots.move()
        step, source = self._load(newest, read_saved)
        if self._weights is not None:
            # Before the first snapshot, the actor has not changed since the last weight sync.
            version = self._version_of.get(step, self._weights.actor_version)
            self._weights.rewind(version, is_new="actor" in roles)
        return Restarted(step, tuple(roles), nodes, source)

    def _exclude(self, nodes: Sequence[str]) -> list[RayWorkerGroup]:
        """Count a loss for these nodes, and leave those that were involved in too many.

        Returns the process groups that have moved.
        """
        self._failures.update(nodes)
        bad = {node for node in nodes if self._failures[node] >= _FAILURES}
        all_processes = list(dict.fromkeys(group.processes for group in self._groups))

        for processes in all_processes:
            processes.pool.excluded.update(bad)

        on_bad_nodes = [processes for processes in all_processes if processes.pool.excluded_ranks()]
        moved = []
        for processes in on_bad_nodes:
            # Pools that are parts of the same one move together.
            if not processes.pool.excluded_ranks() or processes.pool.leave_excluded_nodes():
                moved.append(processes)
                processes.shutdown()

        has_left = len(moved) == len(on_bad_nodes)
        self.excluded_nodes += sorted(bad - set(self.excluded_nodes)) if has_left else []

        for node in sorted(bad):
            _log.warning(
                "node %s was involved in %d losses, and is excluded%s",
                node,
                self._failures[node],
                "" if has_left else ", but no other node has free resources: it stays",
            )

        return moved

    def _load(self, newest: int | None, read_saved: Callable[[], SavedStep | None]) -> tuple[int, Source]:
        """Load the newest snapshot, or the checkpoint if a part of it is lost. Returns what was loaded."""
        try:
            if newest is not None:
                self._snapshots.load(newest)
                return newest, Source.snapshot
            saved = read_saved()
        except SnapshotLostError:
            saved = read_saved()
            if saved is None or saved.folder is None:
                raise

        assert saved is not None
        if saved.folder is not None:
            self._load_checkpoint(saved.folder)
        self._snapshots.forget()
        if saved.weight_version is not None:
            self._version_of[saved.step] = saved.weight_version
        return saved.step, Source.start if saved.folder is None else Source.checkpoint

    def _lost(self, error: WorkerError | PhaseTimeoutError) -> tuple[list[RayWorkerGroup], tuple[str, ...]]:
        """Return the process groups with a lost rank, and the nodes of these ranks."""
        lost = []
        nodes: list[str] = []
        # All ranks report a gradient that is not finite, so it is not known which node computed it.
        if isinstance(error, WorkerError) and error.error_type != qualified_name(NonFiniteUpdateError):
            nodes.append(error.node)
            # Processes that outlive their GPU are in no report of dead ranks.
            nodes += [other.node for other in error.others if other.failure.kind is FailureKind.device]

        for processes in dict.fromkeys(group.processes for group in self._groups):
            reports = [] if processes.has_ended else processes.lost_ranks()
            nodes += [report.node for report in reports]
            named = error.role in (*processes.roles, "+".join(processes.roles))
            if reports or processes.has_ended or named:
                lost.append(processes)

        return lost, tuple(dict.fromkeys(nodes))


def ppo_recovery(
    roles: PPORoles, models: SavedModels, snapshots: ModelSnapshots, config: RecoveryConfig
) -> ModelRecovery:
    """Build the recovery of a run's models; the processes of its other roles recover by themselves.

    Args:
        roles: All roles.
        models: The trained models.
        snapshots: Their snapshots.
        config: Its limits.
    """
    handles = (roles.actor, *roles.scorers.values(), roles.critic, roles.reward.model)
    groups = [handle.group for handle in handles if handle]
    return ModelRecovery(groups, snapshots, models.load, roles.schedule, node_wait_s(config), roles.weights)


def single_recovery(models: SavedModels, snapshots: ModelSnapshots, config: RecoveryConfig) -> ModelRecovery:
    """Build the recovery of a run that only has the models it trains."""
    groups = [model.group for model in models.models]
    return ModelRecovery(groups, snapshots, models.load, OffloadSchedule(), node_wait_s(config))
