"""Test where lost processes start again, with pools that only say which nodes are lost or excluded."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.controller import restarts
from megarl.controller.errors import PhaseTimeoutError, RankFailure, WorkerError
from megarl.controller.futures import DerivedFuture
from megarl.controller.messages import CallFailure, FailureKind
from megarl.controller.restarts import NodeLostError
from megarl.machine.errors import CheckpointError
from megarl.roles.model_recovery import ModelRecovery, SavedStep
from megarl.roles.model_snapshots import SnapshotLostError
from megarl.roles.offload_schedule import OffloadSchedule

BAD = "10.0.0.2"
ERROR = PhaseTimeoutError("actor", "update", 60.0, [])


@pytest.fixture(autouse=True)
def joined_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests before these may have started a Ray in this process, to which no other node could belong."""
    monkeypatch.setattr(restarts, "ended_node", lambda: None)


class Pool:
    """A pool of two processes. Its node is lost until a free one has been looked for `looks` times."""

    def __init__(self, looks: int, has_free_node: bool = True) -> None:
        self.excluded: set[str] = set()
        self.node = BAD
        self._looks = looks
        self._has_free_node = has_free_node

    def lost_nodes(self) -> dict[int, str]:
        return {0: BAD, 1: BAD} if self._looks > 0 else {}

    def move_from_lost_nodes(self) -> dict[int, str]:
        self._looks -= 1
        return {0: BAD, 1: BAD} if self._looks >= 0 else {}

    def excluded_ranks(self) -> list[int]:
        return [0] if self.node in self.excluded else []

    def leave_excluded_nodes(self) -> bool:
        self.node = "10.0.0.3" if self._has_free_node else self.node
        return self._has_free_node


class Processes:
    """Stub for RayWorkerGroup."""

    has_ended = False
    roles = ("actor",)
    ready: Any = DerivedFuture([], lambda results: None)

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.num_restarts = 0

    def lost_ranks(self) -> Sequence[Any]:
        return [SimpleNamespace(node=self.pool.node)]

    def shutdown(self) -> None: ...

    def restart(self) -> None:
        self.num_restarts += 1


def recovery_of(
    processes: Processes, wait_for_node_s: float, newest: int | None = 7, trained: Sequence[Processes] = ()
) -> ModelRecovery:
    group: Any = SimpleNamespace(role="actor", processes=processes)
    snapshots: Any = SimpleNamespace(
        newest_after_loss=lambda: newest,
        move=lambda: None,
        load=lambda step: None,
        forget=lambda: None,
        processes=trained,
    )
    return ModelRecovery([group], snapshots, lambda folder: None, OffloadSchedule(), wait_for_node_s)


def test_a_run_waits_for_a_node(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(restarts, "LOOK_S", 0.001)
    processes = Processes(Pool(looks=3))
    assert recovery_of(processes, 600).recover(ERROR).step == 7
    assert processes.num_restarts == 1
    assert caplog.messages == [
        "node 10.0.0.2 is lost, and no other node of the cluster has free resources for actor "
        "(2 processes on 1 node); waiting up to 600 s for one",
        "node 10.0.0.2 is lost; another one takes its place for actor",
    ]


def test_a_run_ends_when_no_node_comes_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "LOOK_S", 0.01)
    processes = Processes(Pool(looks=9))
    with pytest.raises(
        NodeLostError, match=r"2 processes on 1 node\) after 0.001 s \(recovery.wait_for_node_s\)"
    ):
        recovery_of(processes, 0.001).recover(ERROR)
    assert processes.num_restarts == 0


def test_at_the_start_of_a_run_all_trained_models_get_new_processes() -> None:
    """They may have made a part of the first step."""
    actor, critic = (Processes(Pool(looks=0)) for _ in range(2))
    recovery = recovery_of(actor, 0, newest=None, trained=[actor, critic])
    restarted = recovery.recover(ERROR, lambda: SavedStep(0, None))
    assert (restarted.step, restarted.describe()) == (0, "the start of the run")
    assert (actor.num_restarts, critic.num_restarts) == (1, 1)
    with pytest.raises(SnapshotLostError, match="no complete snapshot"):
        recovery.recover(ERROR, lambda: None)


def test_what_is_saved_is_read_if_no_snapshot_is_left() -> None:
    def read_saved() -> SavedStep:
        raise CheckpointError("trainer.json: the checkpoint is damaged")

    processes = Processes(Pool(looks=0))
    assert recovery_of(processes, 0).recover(ERROR, read_saved).step == 7
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        recovery_of(processes, 0, newest=None).recover(ERROR, read_saved)
    assert processes.num_restarts == 1


def test_a_node_is_excluded_after_two_losses() -> None:
    processes = Processes(Pool(looks=0))
    recovery = recovery_of(processes, 0)
    recovery.recover(ERROR)
    assert (recovery.excluded_nodes, processes.pool.node) == ([], BAD)
    recovery.recover(ERROR)
    assert (recovery.excluded_nodes, processes.pool.node) == ([BAD], "10.0.0.3")
    assert processes.num_restarts == 2


def test_a_bad_node_stays_in_use_if_there_is_no_other(caplog: pytest.LogCaptureFixture) -> None:
    processes = Processes(Pool(looks=0, has_free_node=False))
    recovery = recovery_of(processes, 0)
    recovery.recover(ERROR)
    recovery.recover(ERROR)
    assert recovery.excluded_nodes == []
    assert caplog.messages == [
        "node 10.0.0.2 was involved in 2 losses, and is excluded, but no other node has free resources: it stays"
    ]
    assert processes.num_restarts == 2


class LivingProcesses(Processes):
    """Processes that all report that they are alive."""

    def lost_ranks(self) -> Sequence[Any]:
        return []


def failure(rank: int, node: str, kind: FailureKind) -> RankFailure:
    return RankFailure("actor", rank, node, 7, "update", CallFailure(kind, "it failed", "", 0.0))


@pytest.mark.parametrize(
    ("first", "others", "concerns"),
    [
        (FailureKind.device, [], True),
        (FailureKind.device, [FailureKind.communication], True),
        (FailureKind.exception, [FailureKind.device], True),
        (FailureKind.exception, [FailureKind.communication], False),
        (FailureKind.exception, [], False),
    ],
)
def test_a_rank_whose_gpu_fails_is_replaced_and_counted_to_its_node(
    first: FailureKind, others: list[FailureKind], concerns: bool
) -> None:
    """The rank is alive, so that no report of dead ranks names its node."""
    nodes = [BAD if kind is FailureKind.device else "10.0.0.9" for kind in (first, *others)]
    error = WorkerError(
        failure(0, nodes[0], first),
        [failure(rank, nodes[rank], kind) for rank, kind in enumerate(others, start=1)],
    )
    processes = LivingProcesses(Pool(looks=0))
    recovery = recovery_of(processes, 0)
    assert recovery.concerns(error) == concerns
    if concerns:
        assert BAD in recovery.recover(error).nodes
        assert processes.num_restarts == 1
        recovery.recover(error)
        assert recovery.excluded_nodes[:1] == [BAD]
