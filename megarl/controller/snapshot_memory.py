"""Memory for snapshots on every node of the trainers, with a copy of each file on a second node.

One small actor per node holds the files (machine/memory_files.py), so a file outlives the rank that writes
it, and a copy outlives the node.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.controller.node_resources import living_nodes
from megarl.machine.errors import RunError
from megarl.machine.memory_files import HEADER_BYTES, Header, MemoryFiles

_PART_BYTES = 32 * 2**20
_LOOK_S = 0.05  # interval at which a holder looks for complete files
_ANSWER_S = 10.0  # after which a holder's answer is not awaited any longer


class FileLostError(RunError):
    """No living node has a file of a snapshot."""


class SnapshotHolder:
    """The actor of one node. Imports no torch, so that it is small and starts quickly."""

    def __init__(self) -> None:
        self._files = MemoryFiles()
        self._copied: dict[str, Header] = {}  # the files that the buddy has
        self._buddy: Any = None
        self._names: list[str] = []  # the files that are copied to it
        self._thread = threading.Thread(target=self._copy_forever, daemon=True)

    def paths(self, names: Sequence[str]) -> list[str]:
        return [self._files.path(name) for name in names]

    def complete(self) -> dict[str, Header]:
        return self._files.complete()

    def copied(self) -> dict[str, Header]:
        return self._copied

    def read(self, name: str, start: int, count: int) -> bytes:
        return self._files.read(name, start, count)

    def write(self, name: str, start: int, data: bytes) -> None:
        self._files.write(name, start, data)

    def copy_to(self, buddy: Any, names: Sequence[str]) -> None:
        """Copy these files to another holder, now and whenever one of them is complete again, in a thread."""
        self._copied = {}
        self._names = list(names)
        self._buddy = buddy
        if not self._thread.is_alive():
            self._thread.start()

    def _copy_forever(self) -> None:
        while True:
            buddy = self._buddy
            complete = self._files.complete()
            for name in self._names:
                if name in complete and self._copied.get(name) != complete[name]:
                    # If the buddy's node is lost, the driver gives this holder another one.
                    with contextlib.suppress(RayError):
                        self._copy(buddy, name, complete[name])
            time.sleep(_LOOK_S)

    def _copy(self, buddy: Any, name: str, header: Header) -> None:
        # The old copy is incomplete from here on, until the header is written again.
        ray.get(buddy.write.remote(name, 0, bytes(HEADER_BYTES)))
        for start in range(HEADER_BYTES, header.nbytes, _PART_BYTES):
            count = min(_PART_BYTES, header.nbytes - start)
            ray.get(buddy.write.remote(name, start, self._files.read(name, start, count)))

        # A file that was written again in the meantime gave a mixture, which gets no header.
        if self._files.complete().get(name) == header:
            ray.get(buddy.write.remote(name, 0, header.encode()))
            if buddy is self._buddy:
                self._copied[name] = header


class SnapshotMemory:
    """The driver's handle on the holders of all nodes.

    Args:
        node_of: Ray's id of the node of each file, by name.
    """

    def __init__(self, node_of: Mapping[str, str]) -> None:
        self._node_of: dict[str, str] = {}
        self._holders: dict[str, Any] = {}  # by node; Ray's annotations do not have the methods of an actor
        self._dead: set[str] = set()  # nodes whose holder has died
        self.place(node_of)

    def place(self, node_of: Mapping[str, str]) -> None:
        """Use other nodes, after some were lost. Files on nodes that stay are kept."""
        self._node_of = dict(node_of)
        nodes = list(dict.fromkeys(node_of.values()))
        self._ask("complete")  # finds the dead
        self._holders = {node: holder for node, holder in self._holders.items() if node not in self._dead}
        self._dead.clear()
        actor = ray.remote(SnapshotHolder)
        self._holders = {
            node: self._holders.get(node)
            or actor.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote()
            for node in nodes
        }
        # Each node's files are copied to the next node.
        if len(nodes) > 1:
            for node, buddy in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
                own = [name for name, home in node_of.items() if home == node]
                self._holders[node].copy_to.remote(self._holders[buddy], own)

    def replace_dead(self) -> bool:
        """Start holders that have died again, without their files. Returns whether there were any.

        The holder of a lost node is not started again: the ranks move to another node first.
        """
        self._ask("complete")
        if not self._dead & {node.identity for node in living_nodes()}:
            return False
        self.place(self._node_of)
        return True

    @property
    def has_dead(self) -> bool:
        """Whether a holder was found dead by the last calls, so that its files are lost."""
        return bool(self._dead)

    def paths(self) -> dict[str, str]:
        """Return the path of each file on its own node. Those of a lost holder are left out."""
        paths: dict[str, str] = {}
        for node, holder in self._holders.items():
            names = [name for name, home in self._node_of.items() if home == node]
            try:
                paths |= zip(names, ray.get(holder.paths.remote(names)), strict=True)
            except RayError:
                self._dead.add(node)
        return paths

    def steps(self) -> dict[str, set[int]]:
        """Return the steps of which a living node has a complete file, by name."""
        steps: dict[str, set[int]] = {}
        for files in self._ask("complete").values():
            for name, header in files.items():
                steps.setdefault(name, set()).add(header.step)
        return steps

    def has_all(self, names: Iterable[str], step: int) -> bool:
        """Return whether these files of a step are complete, with their copies."""
        asked = self._ask("copied" if len(self._holders) > 1 else "complete")
        found = {name for files in asked.values() for name, header in files.items() if header.step == step}
        return found >= set(names)

    def bring_home(self, names: Iterable[str], step: int) -> dict[str, str]:
        """Copy files of a step to their own nodes if only another node has them. Returns the path of each.

        Raises:
            FileLostError: No living node has one of them, or its own node is lost.
        """
        complete = self._ask("complete")
        paths = self.paths()
        for name in names:
            home = self._node_of[name]
            owners = {
                node: files[name]
                for node, files in complete.items()
                if name in files and files[name].step == step
            }
            if not owners or name not in paths:
                raise FileLostError(f"no node has the snapshot {name} of step {step}")
            if home not in owners:
                node, header = next(iter(owners.items()))
                self._fetch(name, node, home, header)
        return {name: paths[name] for name in names}

    def _fetch(self, name: str, source: str, target: str, header: Header) -> None:
        for start in [*range(HEADER_BYTES, header.nbytes, _PART_BYTES), 0]:  # the header last
            count = HEADER_BYTES if start == 0 else min(_PART_BYTES, header.nbytes - start)
            part = self._holders[source].read.remote(name, start, count)
            ray.get(self._holders[target].write.remote(name, start, part))

    def _ask(self, method: str) -> dict[str, dict[str, Header]]:
        """Call a method without arguments on all holders. Lost ones are left out."""
        asking = {node: getattr(holder, method).remote() for node, holder in self._holders.items()}
        answers = {}
        for node, reference in asking.items():
            try:
                answers[node] = ray.get(reference, timeout=_ANSWER_S)
            except ActorDiedError:
                self._dead.add(node)
            except RayError:
                continue
        return answers
