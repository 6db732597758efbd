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

from megarl.checkpoints.snapshot_file import write_snapshot
from megarl.controller import snapshot_memory
from megarl.controller.dispatch import Collect, CollectKind
from megarl.controller.futures import WorkerFuture
from megarl.controller.node_resources import living_nodes
from megarl.controller.snapshot_memory import SnapshotMemory, run_name, steps_left
from megarl.machine.memory_files import HEADER_BYTES, Header
from megarl.roles import model_snapshots
from megarl.roles.model_snapshots import ModelSnapshots, TakenSnapshot
from tests.processes import gone_within
from tests.unit.controller.test_snapshot_memory import joined, soon_lost  # noqa: F401  (fixtures)

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Group:
    """The ranks of a model on the node of the tests. Their files are complete when `begin_snapshot` returns."""

    world_size = 2
    is_slow = False  # whether files stay incomplete

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.loaded: list[str] = []  # how ranks have loaded their state
        (node,) = (each.identity for each in living_nodes())
        self.processes = SimpleNamespace(pool=SimpleNamespace(node_ids=lambda: [node] * self.world_size))

    def call_rank(self, rank: int, method: Any, *arguments: Any) -> WorkerFuture[None]:
        if method.name == "begin_snapshot":
            path, step = arguments
            self.paths.append(path)
            Path(path).write_bytes(b"" if self.is_slow else Header(step, HEADER_BYTES, 0).encode())
        elif method.name.startswith("load"):
            self.loaded.append(method.name)
        return WorkerFuture((), (), Collect(CollectKind.listed))

    def call(self, method: Any) -> Any:
        assert method.name == "wanted_tensors"
        return SimpleNamespace(get=lambda: [[]] * self.world_size)


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
    snapshots.load(2)
    assert (snapshots.secured, snapshots.newest_after_loss()) == (1, 2)
    snapshots.forget()
    assert (snapshots.secured, snapshots.newest_after_loss()) == (None, None)


class Memory:
    """Files of several nodes. One of them can be lost before the copies on it are complete."""

    has_dead = False
    num_looks = 0  # how often the copies of the newest snapshot are looked for before they are complete

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.calls: list[str] = []
        self._node_of: Mapping[str, str] = {}

    def open(self, run: str, node_of: Mapping[str, str], continues: bool) -> Memory:
        self._node_of = node_of
        return self

    def paths(self) -> dict[str, str]:
        return {name: str(self._folder / name) for name in self._node_of}

    def settle(self) -> None:
        self.calls.append("settle")

    def place(self, node_of: Mapping[str, str]) -> None: ...

    def bring_home(self, names: Collection[str], step: int) -> dict[str, str]:
        return self.paths()

    def has_all(self, names: Collection[str], step: int) -> bool:
        self.num_looks -= 1
        if self.num_looks >= 0 or self.has_dead:
            return False
        self.calls.append(f"copies of step {step}")
        return True

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


def test_older_files_are_kept_until_a_loaded_snapshot_has_copies_on_the_new_nodes(
    snapshots: ModelSnapshots, group: Group, memory: Memory
) -> None:
    """Until then, another loss may need the copies on the old nodes, or the snapshot before it."""
    snapshots.begin(0)
    snapshots.begin(1)
    assert memory.calls == ["copies of step 0", "settle"]
    snapshots.move()
    snapshots.load(1)
    assert (snapshots.secured, memory.calls[2:]) == (0, [])
    memory.num_looks = 3
    snapshots.begin(2)
    assert (snapshots.secured, memory.calls[2:]) == (1, ["copies of step 1", "settle"])
    assert group.paths[4:] == group.paths[:2]


@pytest.mark.usefixtures("joined")
def test_a_snapshot_that_was_loaded_is_not_taken_again(group: Group, tmp_path: Path) -> None:
    """A rank may be lost before the second one of this step is complete."""
    (node,) = (each.identity for each in living_nodes())
    run = run_name(tmp_path)
    names = [f"actor-{rank}of2-{slot}" for slot in (0, 1) for rank in (0, 1)]
    before = SnapshotMemory(run, dict.fromkeys(names, node), continues=True)
    paths = before.paths()
    for name in names:
        Path(paths[name]).write_bytes(Header(4 + int(name[-1]), HEADER_BYTES, 0).encode())
    before.close(keeps_files=True)

    model: Any = SimpleNamespace(name="actor", group=group)
    snapshots = ModelSnapshots(run, [model], 10.0, TakenSnapshot(5, {"actor": 2}, has_this_layout=True))
    snapshots.load_taken()
    group.is_slow = True
    snapshots.begin(5)
    assert (group.paths, snapshots.newest_after_loss()) == ([], 5)
    snapshots.begin(6)
    assert group.paths == [paths[name] for name in names[:2]]
    assert (snapshots.secured, snapshots.newest_after_loss()) == (5, 5)

    # The step is repeated after a loss.
    snapshots.load(5)
    group.is_slow = False
    snapshots.begin(6)
    assert group.paths[2:] == group.paths[:2]
    assert (snapshots.secured, snapshots.newest_after_loss()) == (5, 6)
    snapshots.close()


@pytest.mark.usefixtures("joined")
def test_the_snapshot_of_another_layout_is_kept_until_the_first_one_of_this_layout_has_copies(
    group: Group, tmp_path: Path
) -> None:
    (node,) = (each.identity for each in living_nodes())
    run = run_name(tmp_path)
    names = [f"actor-{rank}of3-1" for rank in range(3)]
    before = SnapshotMemory(run, dict.fromkeys(names, node), continues=True)
    for path in before.paths().values():
        write_snapshot(path, 5, [], b"{}")
    before.close(keeps_files=True)

    model: Any = SimpleNamespace(name="actor", group=group)
    snapshots = ModelSnapshots(run, [model], 10.0, TakenSnapshot(5, {"actor": 3}, has_this_layout=False))
    snapshots.load_taken()
    assert group.loaded == ["load_resharded"] * 2

    # A rank is lost before the first snapshot of this layout is complete.
    group.is_slow = True
    snapshots.begin(5)
    assert snapshots.newest_after_loss() == 5
    snapshots.move()
    snapshots.load(5)
    assert group.loaded == ["load_resharded"] * 4

    group.is_slow = False
    snapshots.begin(5)
    snapshots.load(5)
    assert group.loaded[4:] == ["load_snapshot"] * 2
    assert set(names) <= steps_left(run).keys()
    snapshots.begin(6)
    assert set(names).isdisjoint(steps_left(run))
    assert snapshots.secured == 5
    snapshots.close()


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
    snapshots: ModelSnapshots, group: Group, request: pytest.FixtureRequest
) -> None:
    """Its files count as lost."""
    snapshots.begin(0)
    request.getfixturevalue("soon_lost")
    stopped = psutil.Process(int(group.paths[0].split("/")[2]))
    stopped.suspend()
    snapshots.begin(1)
    stopped.resume()  # ended already, which Ray does to a stopped process only after some seconds
    assert gone_within([stopped], 60) == []
    assert (snapshots.secured, snapshots.newest_after_loss()) == (None, 1)
