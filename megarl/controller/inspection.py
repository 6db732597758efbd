"""What a Ray cluster is made of: each node's resources, versions and limits, what it sees of the driver's
files, and its clock."""

from __future__ import annotations

import platform
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl import __version__
from megarl.controller.node_resources import NodeResources, free_nodes, living_nodes

_PINGS = 5


class Software(NamedTuple):
    python: str
    ray: str
    megarl: str


class Limits(NamedTuple):
    """Of a worker on the node: /dev/shm in bytes, and how many files it may have open."""

    shared_memory: int
    shared_memory_free: int
    open_files: int
    open_files_hard: int


class NodeReport(NamedTuple):
    """`software`, `limits`: None where no worker could be started, as `error` says. `unseen`: of the paths
    asked for, those that the node does not have. `clock_offset_s`: its clock less the driver's, known to
    within `clock_uncertainty_s`."""

    address: str
    resources: Mapping[str, float]
    software: Software | None = None
    clock_offset_s: float = 0.0
    clock_uncertainty_s: float = 0.0
    error: str | None = None
    limits: Limits | None = None
    unseen: tuple[str, ...] = ()


class ClusterReport(NamedTuple):
    """`dead`: addresses of nodes that have left. `free`: what nobody has reserved."""

    nodes: tuple[NodeReport, ...]
    whole: tuple[NodeResources, ...]
    free: tuple[NodeResources, ...]
    dead: tuple[str, ...]


class _Witness:
    """A process on the node. It answers within milliseconds once it runs, so that clocks can be compared."""

    def software(self) -> Software:
        return here()

    def limits(self) -> Limits:
        memory = shutil.disk_usage("/dev/shm")
        return Limits(memory.total, memory.free, *resource.getrlimit(resource.RLIMIT_NOFILE))

    def unseen(self, paths: Sequence[str]) -> tuple[str, ...]:
        return tuple(path for path in paths if not Path(path).exists())

    def now(self) -> float:
        return time.time()


def here() -> Software:
    return Software(platform.python_version(), ray.__version__, __version__)


def inspect_cluster(limit_s: float, paths: Sequence[str] = ()) -> ClusterReport:
    """Of the cluster that this process has joined; a node that does not answer within `limit_s` is reported
    as such. `paths`: that every node should have."""
    nodes = living_nodes()
    # A witness takes no CPU, so that it starts where all are reserved.
    witness = ray.remote(num_cpus=0)(_Witness)
    placed = [NodeAffinitySchedulingStrategy(node.identity, soft=False) for node in nodes]
    actors: list[Any] = [witness.options(scheduling_strategy=place).remote() for place in placed]
    # The nodes share one deadline, so that several silent ones do not add up.
    give_up_s = time.monotonic() + limit_s

    try:
        reports = tuple(
            _report(node, actor, paths, give_up_s) for node, actor in zip(nodes, actors, strict=True)
        )
    finally:
        for actor in actors:
            ray.kill(actor)

    dead = tuple(node["NodeManagerAddress"] for node in ray.nodes() if not node["Alive"])
    return ClusterReport(nodes=reports, whole=tuple(nodes), free=tuple(free_nodes()), dead=dead)


def _report(node: NodeResources, actor: Any, paths: Sequence[str], give_up_s: float) -> NodeReport:
    try:
        answers = [actor.software.remote(), actor.limits.remote(), actor.unseen.remote(list(paths))]
        software, limits, unseen = ray.get(answers, timeout=max(0.0, give_up_s - time.monotonic()))
        offsets = [_compare(actor) for _ in range(_PINGS)]
    except RayError as error:
        return NodeReport(node.node, node.resources, error=str(error).strip().splitlines()[-1])

    # The fastest question bounds the clock's offset most tightly.
    uncertainty, offset = min(offsets)
    return NodeReport(node.node, node.resources, software, offset, uncertainty, limits=limits, unseen=unseen)


def _compare(actor: Any) -> tuple[float, float]:
    """(half of the time that the question took, the node's clock less this one's)."""
    before = time.time()
    there: float = ray.get(actor.now.remote(), timeout=5)
    after = time.time()
    return (after - before) / 2, there - (before + after) / 2
