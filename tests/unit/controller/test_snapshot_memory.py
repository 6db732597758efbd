"""Test the memory of snapshots that outlives its driver. Lost nodes are tested in tests/integration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from megarl.controller import snapshot_memory
from megarl.controller.node_resources import NodeResources, living_nodes
from megarl.controller.snapshot_memory import (
    FileLostError,
    SnapshotHolder,
    SnapshotMemory,
    holders_of,
    run_name,
    steps_left,
)
from megarl.machine.memory_files import HEADER_BYTES, Header
from megarl.roles.model_snapshots import slot_of_step
from tests.processes import gone_within

pytestmark = pytest.mark.usefixtures("ray_cluster")
DATA = bytes(range(100))


def write(path: str, step: int, written_ns: int = 0) -> None:
    with Path(path).open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(DATA)
        file.seek(0)
        file.write(Header(step, HEADER_BYTES, len(DATA), written_ns).encode())


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster of the tests, as if another process had started it."""
    monkeypatch.setattr(snapshot_memory, "is_joined", lambda: True)


@pytest.fixture
def soon_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that does not answer is lost after a second, but one that is started then has longer."""

    def found_lost() -> list[NodeResources]:
        monkeypatch.setattr(snapshot_memory, "LOST_S", 60.0)
        return living_nodes()

    monkeypatch.setattr(snapshot_memory, "ANSWER_S", 0.2)
    monkeypatch.setattr(snapshot_memory, "LOST_S", 1.0)
    monkeypatch.setattr(snapshot_memory, "living_nodes", found_lost)


def test_the_next_driver_of_the_run_finds_the_files(joined: None, tmp_path: Path) -> None:
    (node,) = (each.identity for each in living_nodes())
    node_of = {"actor-0-0": node, "actor-0-1": node}
    run = run_name(tmp_path)
    first = SnapshotMemory(run, node_of)
    write(first.paths()["actor-0-1"], step=7)
    assert steps_left(run) == {"actor-0-1": {7}}
    assert steps_left(run_name(tmp_path / "other")) == {}

    second = SnapshotMemory(run, node_of, continues=True)
    assert second.paths() == first.paths()
    assert Path(second.bring_home(["actor-0-1"], 7)["actor-0-1"]).read_bytes()[HEADER_BYTES:] == DATA

    # A driver that starts from elsewhere must not find these steps.
    third = SnapshotMemory(run, node_of)
    assert third.steps() == {}
    third.close()
    assert holders_of(run) == {}


def test_a_holder_on_a_node_without_ranks_is_read_and_then_released(joined: None, tmp_path: Path) -> None:
    (node,) = (each.identity for each in living_nodes())
    run = run_name(tmp_path)
    memory = SnapshotMemory(run, {"actor-0-0": node})
    write(memory.paths()["actor-0-0"], step=3)
    holder, buddy = holders_of(run)[node], ray.remote(SnapshotHolder).options(num_cpus=0).remote(None)
    holder.copy_to.remote(buddy, ["actor-0-0"])
    while "actor-0-0" not in ray.get(holder.copied.remote()):
        time.sleep(0.02)

    memory.place({})
    assert memory.steps() == {"actor-0-0": {3}}
    # A copy would replace the one that the new node of the rank makes.
    assert ray.get(holder.copied.remote()) == {}
    memory.settle()
    assert memory.steps() == {}
    memory.close()


def test_files_of_ranks_that_are_left_out_are_read_and_then_released(joined: None, tmp_path: Path) -> None:
    (node,) = (each.identity for each in living_nodes())
    memory = SnapshotMemory(run_name(tmp_path), {"actor-0-0": node, "actor-1-0": node})
    for path in memory.paths().values():
        write(path, step=3)
    memory.place({"actor-0-0": node})
    stored = memory.stored(["actor-0-0", "actor-1-0"], 3)
    assert memory.read_index("actor-1-0", stored["actor-1-0"]) == DATA
    parts = memory.bring_parts(stored, {node: {"actor-1-0": [(HEADER_BYTES, HEADER_BYTES + 5)]}})
    assert (
        Path(parts[node]["actor-1-0"]).read_bytes()[HEADER_BYTES:] == DATA
    )  # the whole file is on this node
    with pytest.raises(FileLostError, match="no node has the snapshot actor-1-0 of step 4"):
        memory.stored(["actor-1-0"], 4)
    memory.settle()
    assert memory.steps() == {"actor-0-0": {3}}
    memory.close()


def test_files_are_lost_if_their_holder_dies_while_they_are_read(joined: None, tmp_path: Path) -> None:
    """The run can then continue from a checkpoint."""
    (node,) = (each.identity for each in living_nodes())
    memory = SnapshotMemory(run_name(tmp_path), {"actor-0-0": node})
    write(memory.paths()["actor-0-0"], step=3)
    stored = memory.stored(["actor-0-0"], 3)
    process = psutil.Process(int(memory.paths()["actor-0-0"].split("/")[2]))
    process.kill()
    assert gone_within([process], 60) == []
    with pytest.raises(FileLostError, match="snapshot actor-0-0 cannot be read or copied: Actor"):
        memory.read_index("actor-0-0", stored["actor-0-0"])
    with pytest.raises(FileLostError, match=f"snapshots on node {node} cannot be read or copied"):
        memory.bring_parts(stored, {node: {"actor-0-0": []}})
    memory.close()


def test_a_holder_that_does_not_answer_in_time_is_lost(
    joined: None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It is started again. A driver that looks for its files finds none."""
    (node,) = (each.identity for each in living_nodes())
    run = run_name(tmp_path)
    memory = SnapshotMemory(run, {"actor-0-0": node})
    write(path := memory.paths()["actor-0-0"], step=3)
    stopped = psutil.Process(int(path.split("/")[2]))
    stopped.suspend()
    request.getfixturevalue("soon_lost")
    assert steps_left(run) == {}
    assert memory.paths()["actor-0-0"] != path
    stopped.resume()  # ended already, which Ray does to a stopped process only after some seconds
    assert gone_within([stopped], 60) == []
    assert memory.steps() == {}
    memory.close()


class CountingHolder(SnapshotHolder):
    """A holder that counts what is written to it."""

    num_writes = 0

    def write(self, name: str, start: int, data: bytes) -> None:
        self.num_writes += 1
        super().write(name, start, data)

    def count(self) -> int:
        return self.num_writes


@pytest.fixture
def holders(ray_cluster: None) -> Iterator[list[Any]]:
    """Holders without a driver, whose file has a path already."""
    actors = [ray.remote(CountingHolder).options(num_cpus=0).remote(None) for _ in range(3)]
    ray.get([actor.paths.remote(["file"]) for actor in actors])
    yield actors
    for actor in actors:
        ray.kill(actor)


def path_of(holder: Any) -> str:
    (path,) = ray.get(holder.paths.remote(["file"]))
    return path


def wait_until_copied(holder: Any, written_ns: int) -> None:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        copied = ray.get(holder.copied.remote(), timeout=60)
        if "file" in copied and copied["file"].written_ns == written_ns:
            return
        time.sleep(0.02)
    raise AssertionError("the file is not copied")


def test_files_are_copied_to_another_holder_if_the_first_one_stops(holders: list[Any]) -> None:
    source, first, second = holders
    write(path_of(source), step=3)
    stopped = psutil.Process(int(path_of(first).split("/")[2]))
    stopped.suspend()
    source.copy_to.remote(first, ["file"])
    source.copy_to.remote(second, ["file"])
    wait_until_copied(source, written_ns=0)
    stopped.resume()
    assert ray.get(second.complete.remote(), timeout=60)["file"].step == 3


def test_a_copy_that_another_holder_has_already_is_not_written_again(holders: list[Any]) -> None:
    """It may be the only other one, and would be incomplete meanwhile."""
    source, buddy, _ = holders
    for holder in (source, buddy):
        write(path_of(holder), step=3, written_ns=7)
    source.copy_to.remote(buddy, ["file"])
    wait_until_copied(source, written_ns=7)
    assert ray.get(buddy.count.remote()) == 0


def test_a_file_that_is_written_again_has_no_copy_yet(holders: list[Any]) -> None:
    """The step may be the same: it is repeated after a loss, perhaps on a node whose clock is slow."""
    source, buddy, _ = holders
    write(path_of(source), step=3, written_ns=9)
    source.copy_to.remote(buddy, ["file"])
    wait_until_copied(source, written_ns=9)
    stopped = psutil.Process(int(path_of(buddy).split("/")[2]))
    stopped.suspend()
    write(path_of(source), step=3, written_ns=2)
    assert ray.get(source.copied.remote()) == {}
    stopped.resume()
    wait_until_copied(source, written_ns=2)
    assert ray.get(buddy.count.remote()) == 6


def test_a_holder_that_no_driver_needs_ends(joined: None) -> None:
    holder = ray.remote(SnapshotHolder).options(num_cpus=0).remote(2.0)
    (path,) = ray.get(holder.paths.remote(["file"]))
    pid = int(path.split("/")[2])
    assert gone_within([psutil.Process(pid)], 60) == []
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(holder.complete.remote())


def test_a_slot_has_a_step_if_the_files_of_all_ranks_do() -> None:
    sizes = {"actor": 2, "critic": 1}
    files = {
        "actor-0of2-0": [4],
        "actor-1of2-0": [4],
        "critic-0of1-0": [4],
        "actor-0of2-1": [5],
        "actor-1of2-1": [3],
        "critic-0of1-1": [5],
    }
    assert [slot_of_step(files, sizes, step) for step in (3, 4, 5)] == [None, 0, None]
    assert slot_of_step(files | {"actor-1of2-1": [5]}, sizes, 5) == 1
    assert slot_of_step({}, sizes, 4) is None
