"""Memory for snapshots on every node of the trainers, with a copy of each file on a second node.

One small actor per node holds the files (machine/memory_files.py), so a file outlives the rank that writes
it, and a copy outlives the node. In a cluster that outlives the driver, so do the holders: the next driver of
the same run finds them by their names. They end by themselves when no driver needs them for some time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import xxhash
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.controller.cluster import is_joined
from megarl.controller.lost_process import ProcessSilence
from megarl.controller.node_resources import living_nodes
from megarl.machine.errors import RunError, one_line
from megarl.machine.memory_files import HEADER_BYTES, Header, MemoryFiles

_PART_BYTES = 32 * 2**20
_LOOK_S = 0.05  # interval at which a holder looks for complete files
ANSWER_S = 10.0  # how long answers are awaited before it is looked which holders are lost
LOST_S = 120.0  # a holder that does not answer for this long is lost, as one that has died
_NAMESPACE = "megarl snapshots 2"  # changes with the format of the files, so that older ones are not found
_ATTEND_S = 10.0  # interval at which a driver tells its holders that it needs them
KEPT_S = 900.0  # how long a holder without a driver keeps its files
_NUM_FETCHING = 16  # nodes that parts of files are brought to at the same time


class FileLostError(RunError):
    """No living node has a file of a snapshot."""


# A complete file of a snapshot: its header, and Ray's ids of the nodes that have it.
StoredFile = tuple[Header, tuple[str, ...]]


class _OtherBuddyError(Exception):
    """The files of a holder are to be copied to another one, or to none, from now on."""


class SnapshotHolder(MemoryFiles):
    """The actor of one node, which holds its files. Imports no torch, so that it is small and starts quickly.

    Args:
        kept_s: How long it lives after a driver needed it last. None: until it is ended.
    """

    def __init__(self, kept_s: float | None) -> None:
        super().__init__()
        self._needed_s = time.monotonic()  # when a driver needed it last
        if kept_s is not None:
            threading.Thread(target=self._end_when_left, args=(kept_s,), daemon=True).start()
        self._copied: dict[str, Header] = {}  # the files that the buddy has
        self._buddy: Any = None
        self._names: list[str] = []  # the files that are copied to it
        self._lock = threading.Lock()  # a copy on an earlier buddy must not count
        self._thread = threading.Thread(target=self._copy_forever, daemon=True)

    def attend(self) -> None:
        """Tell the holder that a driver needs it."""
        self._needed_s = time.monotonic()

    def _end_when_left(self, kept_s: float) -> None:
        while time.monotonic() < self._needed_s + kept_s:
            time.sleep(min(1.0, kept_s))
        os._exit(0)  # the files are released with the process

    def paths(self, names: Sequence[str]) -> list[str]:
        return [self.path(name) for name in names]

    def copied(self) -> dict[str, Header]:
        """Return the headers of the files of which the buddy has a copy, as they are now."""
        complete = self.complete()
        with self._lock:
            return {name: header for name, header in self._copied.items() if complete.get(name) == header}

    def copy_to(self, buddy: Any, names: Sequence[str]) -> None:
        """Copy these files to another holder, now and whenever one of them is complete again, in a thread.

        Files that were copied before are not copied any longer. Without files, `buddy` is None.
        """
        with self._lock:
            self._copied = {}
            self._names = list(names)
            self._buddy = buddy
        if names and not self._thread.is_alive():
            self._thread.start()

    def _copy_forever(self) -> None:
        while True:
            buddy = self._buddy
            complete = self.complete()
            for name in self._names:
                if name in complete and self._copied.get(name) != complete[name]:
                    # If the buddy is lost, the driver gives this holder another one.
                    with contextlib.suppress(RayError, _OtherBuddyError):
                        self._copy(buddy, name, complete[name])
            time.sleep(_LOOK_S)

    def _copy(self, buddy: Any, name: str, header: Header) -> None:
        # A copy that the buddy has already, from before nodes were replaced, may be the only other one.
        if self._answer(buddy, buddy.complete.remote()).get(name) != header:
            # The old copy is incomplete from here on, until the header is written again.
            self._answer(buddy, buddy.write.remote(name, 0, bytes(HEADER_BYTES)))
            for start in range(HEADER_BYTES, header.nbytes, _PART_BYTES):
                part = self.read(name, start, min(_PART_BYTES, header.nbytes - start))
                self._answer(buddy, buddy.write.remote(name, start, part))

            # A file that was written again in the meantime gave a mixture, which gets no header.
            if self.complete().get(name) != header:
                return
            self._answer(buddy, buddy.write.remote(name, 0, header.encode()))

        with self._lock:
            if buddy is self._buddy:
                self._copied[name] = header

    def _answer(self, buddy: Any, reference: Any) -> Any:
        """Return the answer of the buddy, which is awaited until it answers, dies, or is replaced."""
        while not ray.wait([reference], timeout=_LOOK_S)[0]:
            if buddy is not self._buddy:
                raise _OtherBuddyError
        return ray.get(reference)


class SnapshotMemory:
    """The driver's handle on the holders of all nodes.

    Args:
        run: The name of the run.
        node_of: Ray's id of the node of each file, by name.
        continues: Whether the files of an earlier driver of the run are used. Otherwise they are released.
    """

    def __init__(self, run: str, node_of: Mapping[str, str], continues: bool = False) -> None:
        self._run = run
        self._node_of: dict[str, str] = {}
        self._holders: dict[str, Any] = {}  # by node; Ray's annotations do not have the methods of an actor
        self._left: dict[str, Any] = {}  # of nodes without ranks, by node: they may have the only copy
        self._dead: set[str] = set()  # nodes whose holder is lost
        self._silence = ProcessSilence[str]()

        if continues:
            self._holders = holders_of(run)
        else:
            _end(holders_of(run).values())
        self.place(node_of)

        self._is_closed = threading.Event()
        if is_joined():
            threading.Thread(target=self._attend, daemon=True).start()

    def close(self, keeps_files: bool = False) -> None:
        """Release all files, or leave them to the next driver of the run."""
        self._is_closed.set()
        if not keeps_files:
            _end([*self._holders.values(), *self._left.values()])
        self._holders = {}
        self._left = {}

    def place(self, node_of: Mapping[str, str]) -> None:
        """Use other nodes, after some were lost. Files on all living nodes are kept until `settle`."""
        self._node_of = dict(node_of)
        nodes = list(dict.fromkeys(node_of.values()))

        self._ask("complete", self._all())  # finds the dead
        living = {node: holder for node, holder in self._all().items() if node not in self._dead}
        for node in self._dead:
            self._silence.forget(node)
        self._dead.clear()

        self._holders = {node: living.pop(node, None) or self._start(node) for node in nodes}
        self._left = living
        self._is_settled = False
        # A late copy from a node without ranks would replace one that a rank's new node has made.
        for holder in living.values():
            holder.copy_to.remote(None, [])

        # Each node's files are copied to the next node.
        for node, buddy in zip(nodes, [*nodes[1:], *nodes[:1]], strict=True):
            own = [name for name, home in node_of.items() if home == node != buddy]
            self._holders[node].copy_to.remote(self._holders[buddy], own)

    def settle(self) -> None:
        """Release the files on nodes without ranks, and those that no rank of this layout writes.

        Call this when a snapshot is complete on the nodes of the ranks, with its copies.
        """
        if self._is_settled:
            return
        _end(self._left.values())
        self._left = {}
        self.keep(())
        self._is_settled = True

    def keep(self, names: Iterable[str]) -> None:
        """Release all files but these, and those that ranks of this layout write."""
        kept = [*self._node_of, *names]
        for holder in self._all().values():
            holder.keep.remote(kept)

    def _start(self, node: str) -> Any:
        """Start a holder. In a cluster that outlives this process, so does the holder."""
        outlives = is_joined()
        of_run = {"name": f"{self._run} {node}", "namespace": _NAMESPACE, "lifetime": "detached"}
        actor = ray.remote(SnapshotHolder).options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            **(of_run if outlives else {}),
        )
        return actor.remote(KEPT_S if outlives else None)

    def _attend(self) -> None:
        while not self._is_closed.wait(_ATTEND_S) and ray.is_initialized():
            for holder in self._all().values():
                holder.attend.remote()

    def _all(self) -> dict[str, Any]:
        return {**self._left, **self._holders}

    @property
    def has_dead(self) -> bool:
        """Whether a holder was found lost by the last calls, and its files with it."""
        return bool(self._dead)

    def paths(self) -> dict[str, str]:
        """Return the path of each file on its own node.

        Holders that are lost alone are started again, without their files. Files of lost nodes are left out:
        the ranks move to another node first.
        """
        paths = self._ask_paths()
        if self._dead & {node.identity for node in living_nodes()}:
            self.place(self._node_of)
            paths = self._ask_paths()
        return paths

    def _ask_paths(self) -> dict[str, str]:
        names: dict[str, list[str]] = {node: [] for node in self._holders}
        for name, home in self._node_of.items():
            names[home].append(name)
        answers = self._answers(
            self._holders, lambda node, holder: holder.paths.remote(names[node]), waits=True
        )
        return {
            name: path
            for node, of_node in answers.items()
            for name, path in zip(names[node], of_node, strict=True)
        }

    def steps(self) -> dict[str, set[int]]:
        """Return the steps of which a living node has a complete file, by name.

        Holders that do not answer are asked until they are lost: then it is known whether their node is.
        """
        return _steps(self._ask("complete", self._all(), waits=True))

    def has_all(self, names: Iterable[str], step: int) -> bool:
        """Return whether these files of a step are complete, with their copies."""
        asked = self._ask("copied" if len(self._holders) > 1 else "complete", self._holders)
        found = {name for files in asked.values() for name, header in files.items() if header.step == step}
        return found >= set(names)

    def bring_home(self, names: Iterable[str], step: int) -> dict[str, str]:
        """Copy files of a step to their own nodes if only another node has them. Returns the path of each.

        Raises:
            FileLostError: No living node has one of them, its own node is lost, or a holder dies meanwhile.
        """
        paths = self.paths()
        for name, stored in self.stored(names, step).items():
            home = self._node_of[name]
            if name not in paths:
                raise FileLostError(f"the node of the snapshot {name} of step {step} is lost")
            header, nodes = stored
            if home not in nodes:
                self._fetch(name, stored, home, name, [(HEADER_BYTES, header.nbytes)])
        return {name: paths[name] for name in names}

    def stored(self, names: Iterable[str], step: int) -> dict[str, StoredFile]:
        """Return where files of a step are, by name.

        Raises:
            FileLostError: No living node has one of them.
        """
        complete = self._ask("complete", self._all(), waits=True)
        found = {}

        for name in names:
            owners = {
                node: files[name]
                for node, files in complete.items()
                if name in files and files[name].step == step
            }
            if not owners:
                raise FileLostError(f"no node has the snapshot {name} of step {step}")
            found[name] = next(iter(owners.values())), tuple(owners)

        return found

    def read_index(self, name: str, stored: StoredFile) -> bytes:
        """Return the index at the end of a file.

        Raises:
            FileLostError: Its holder has died or does not answer.
        """
        header, nodes = stored
        index = self._all()[nodes[0]].read.remote(name, header.index_start, header.index_bytes)
        return _answer(index, f"snapshot {name}")

    def bring_parts(
        self,
        stored: Mapping[str, StoredFile],
        parts: Mapping[str, Mapping[str, Sequence[tuple[int, int]]]],
    ) -> dict[str, dict[str, str]]:
        """Make parts of files available on nodes that need them.

        A node that has a whole file uses it. Others get a file of the same size, which has memory only for
        its header, its index, and the parts. It is released by `keep` and `settle`.

        Args:
            stored: All files (`stored`).
            parts: The ranges (first byte, end) by node and name.

        Returns:
            The path of each of these files on its node, by node and name.

        Raises:
            FileLostError: A holder has died or does not answer.
        """

        def bring(node: str) -> dict[str, str]:
            local: dict[str, str] = {}
            for name, ranges in parts[node].items():
                header, nodes = stored[name]
                local[name] = name if node in nodes else f"{name}-parts"
                if local[name] != name:
                    of_index = (header.index_start, header.nbytes)
                    self._fetch(name, stored[name], node, local[name], [*ranges, of_index])
            paths = _answer(
                self._holders[node].paths.remote(list(local.values())), f"snapshots on node {node}"
            )
            return dict(zip(local, paths, strict=True))

        with ThreadPoolExecutor(_NUM_FETCHING, thread_name_prefix="snapshot parts") as threads:
            return dict(zip(parts, threads.map(bring, parts), strict=True))

    def _fetch(
        self, name: str, stored: StoredFile, target: str, as_name: str, ranges: Iterable[tuple[int, int]]
    ) -> None:
        """Copy ranges of a file to another node, and its header last."""
        _, nodes = stored
        source = self._all()[nodes[0]]
        # Contents of another step are incomplete from here on.
        _answer(self._holders[target].write.remote(as_name, 0, bytes(HEADER_BYTES)), f"snapshot {name}")
        for first, end in [*ranges, (0, HEADER_BYTES)]:
            for start in range(first, end, _PART_BYTES):
                part = source.read.remote(name, start, min(_PART_BYTES, end - start))
                _answer(self._holders[target].write.remote(as_name, start, part), f"snapshot {name}")

    def _ask(
        self, method: str, holders: Mapping[str, Any], waits: bool = False
    ) -> dict[str, dict[str, Header]]:
        """Call a method without arguments on holders. Lost ones are left out."""
        return self._answers(holders, lambda _, holder: getattr(holder, method).remote(), waits)

    def _answers(
        self, holders: Mapping[str, Any], ask: Callable[[str, Any], Any], waits: bool
    ) -> dict[str, Any]:
        answers, lost = self._silence.ask(
            holders, lambda node: ask(node, holders[node]), limit_s=ANSWER_S, lost_s=LOST_S, waits=waits
        )
        self._dead |= lost
        # One that only stopped must not continue to write into the files of others.
        _end(holders[node] for node in lost)
        return answers


def run_name(output_dir: str | Path) -> str:
    """Return the name that the holders of a run have in common."""
    return xxhash.xxh3_64_hexdigest(os.fsencode(Path(output_dir).absolute()))


def holders_of(run: str) -> dict[str, Any]:
    """Return the holders that an earlier driver of the run has left in the cluster, by node."""
    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name, _, node = actor["name"].partition(" ")
        if actor["namespace"] == _NAMESPACE and name == run:
            with contextlib.suppress(ValueError):  # it has ended in the meantime
                found[node] = ray.get_actor(actor["name"], _NAMESPACE)
    return found


def steps_left(run: str) -> dict[str, set[int]]:
    """Return the steps of the complete files that an earlier driver of the run has left, by name.

    The holders then wait for the next driver for another KEPT_S.
    """
    holders = holders_of(run)
    for holder in holders.values():
        holder.attend.remote()
    answers, _ = ProcessSilence[str]().ask(
        holders, lambda node: holders[node].complete.remote(), limit_s=ANSWER_S, lost_s=LOST_S
    )
    return _steps(answers)


def _end(holders: Iterable[Any]) -> None:
    for holder in holders:
        ray.kill(holder)


def _answer(reference: Any, what: str) -> Any:
    """Return the answer of a holder that reads or writes a file.

    Raises:
        FileLostError: The holder has died, does not answer, or has no memory left.
    """
    try:
        return ray.get(reference, timeout=LOST_S)
    except RayError as error:
        raise FileLostError(
            f"{what} cannot be read or copied: {type(error).__name__}: {one_line(error)}"
        ) from error


def _steps(files_of_nodes: Mapping[str, Mapping[str, Header]]) -> dict[str, set[int]]:
    steps: dict[str, set[int]] = {}
    for files in files_of_nodes.values():
        for name, header in files.items():
            steps.setdefault(name, set()).add(header.step)
    return steps
