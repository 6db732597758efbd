"""Test which snapshots a recovery may count on, with files that a stub of a model writes at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megarl.controller import snapshot_memory
from megarl.controller.dispatch import Collect, CollectKind
from megarl.controller.futures import WorkerFuture
from megarl.controller.node_resources import living_nodes
from megarl.controller.snapshot_memory import run_name
from megarl.machine.memory_files import HEADER_BYTES, Header
from megarl.roles import model_snapshots
from megarl.roles.model_snapshots import ModelSnapshots
from tests.processes import gone_within

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Group:
    """The ranks of a model on the node of the tests. Their files are complete when `begin_snapshot` returns."""

    world_size = 2

    def __init__(self) -> None:
        self.paths: list[str] = []
        (node,) = (each.identity for each in living_nodes())
        self.processes = SimpleNamespace(pool=SimpleNamespace(node_ids=lambda: [node] * self.world_size))

    def call_rank(self, rank: int, method: Any, *arguments: Any) -> WorkerFuture[None]:
        if method.name == "begin_snapshot":
            path, step = arguments
            self.paths.append(path)
            Path(path).write_bytes(Header(step, HEADER_BYTES, 0).encode())
        return WorkerFuture((), (), Collect(CollectKind.listed))


@pytest.fixture
def group(ray_cluster: None) -> Group:
    return Group()


@pytest.fixture
def snapshots(group: Group, tmp_path: Path) -> Iterator[ModelSnapshots]:
    model: Any = SimpleNamespace(name="actor", group=group)
    snapshots = ModelSnapshots(run_name(tmp_path), [model], copy_limit_s=10.0)
    yield snapshots
    snapshots.close()


def test_a_snapshot_is_secured_when_the_next_one_begins(snapshots: ModelSnapshots) -> None:
    """Its files may be complete before, but not yet their copies, so that a lost node would lose it."""
    found = []
    for step in range(3):
        snapshots.begin(step)
        found.append((snapshots.secured, snapshots.newest_after_loss()))
    assert found == [(None, 0), (0, 1), (1, 2)]
    snapshots.load(1)
    assert (snapshots.secured, snapshots.newest_after_loss()) == (1, 1)
    snapshots.forget()
    assert (snapshots.secured, snapshots.newest_after_loss()) == (None, None)


class Memory:
    """Files of several nodes. One of them can be lost before the copies on it are complete."""

    has_dead = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._node_of: Mapping[str, str] = {}

    def open(self, run: str, node_of: Mapping[str, str], continues: bool) -> Memory:
        self._node_of = node_of
        return self

    def paths(self) -> dict[str, str]:
        return {name: str(self._folder / name) for name in self._node_of}

    def settle(self) -> None: ...

    def has_all(self, names: Collection[str], step: int) -> bool:
        return not self.has_dead

    def steps(self) -> dict[str, set[int]]:
        return {name: {0} for name in self._node_of}

    def close(self, keeps_files: bool) -> None: ...


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory(tmp_path)
    monkeypatch.setattr(model_snapshots, "SnapshotMemory", memory.open)
    return memory


def test_the_secured_snapshot_is_kept_if_a_node_is_lost_before_the_next_one_is_copied(
    snapshots: ModelSnapshots, group: Group, memory: Memory
) -> None:
    snapshots.begin(0)
    snapshots.begin(1)
    memory.has_dead = True
    snapshots.begin(2)
    of_step = [group.paths[first : first + 2] for first in (0, 2, 4)]
    assert snapshots.secured == 0
    assert of_step[2] == of_step[1] != of_step[0]


def test_a_holder_that_answers_late_has_not_lost_its_files(
    snapshots: ModelSnapshots, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_memory, "ANSWER_S", 0.1)
    monkeypatch.setattr(model_snapshots, "SETTLE_S", 0.2)
    snapshots.begin(0)
    holder = int(group.paths[0].split("/")[2])
    os.kill(holder, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, [holder, signal.SIGCONT]).start()
    assert snapshots.newest_after_loss() == 0


def test_the_holder_of_a_node_that_does_not_answer_is_started_again(
    snapshots: ModelSnapshots, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files count as lost: the snapshot in them is taken again before the next one."""
    monkeypatch.setattr(snapshot_memory, "ANSWER_S", 0.2)
    monkeypatch.setattr(snapshot_memory, "LOST_S", 1.0)
    snapshots.begin(0)
    stopped = psutil.Process(int(group.paths[0].split("/")[2]))
    stopped.suspend()
    snapshots.begin(1)
    stopped.resume()  # ended already, which Ray does to a stopped process only after some seconds
    assert gone_within([stopped], 60) == []
    assert (snapshots.secured, snapshots.newest_after_loss()) == (None, 1)
