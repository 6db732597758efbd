"""The nodes of a Ray cluster: their resources, the demands that they can hold, and what each of them reports.

A report has versions and limits, the files that the node lacks, and the offset of its clock.
"""

from __future__ import annotations

import platform
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray._private.state
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl import __version__

CPU = "CPU"
GPU = "GPU"


class NodeResources(NamedTuple):
    """The resources of one node.

    Attributes:
        node: The address.
        resources: Amounts by kind.
        identity: Ray's id of the node.
    """

    node: str
    resources: Mapping[str, float]
    identity: str = ""

    def without(self, demand: Mapping[str, float]) -> NodeResources:
        """Return what is left after some amounts by kind are taken."""
        return self._replace(
            resources={kind: amount - demand.get(kind, 0) for kind, amount in self.resources.items()}
        )


def fits(demands: Sequence[Mapping[str, float]], nodes: Sequence[NodeResources]) -> bool:
    """Return whether each demand can be placed on a node; see `match`."""
    return match(demands, nodes) is not None


def match(
    demands: Sequence[Mapping[str, float]], nodes: Sequence[NodeResources], apart: bool = False
) -> list[int] | None:
    """Place each demand on a node: the largest first, each on the node where it leaves least.

    Args:
        demands: Amounts by kind.
        nodes: What the nodes have.
        apart: Whether no node may get two demands.

    Returns:
        The index of the node for each demand. None if a demand cannot be placed.
    """
    left = [dict(node.resources) for node in nodes]
    found = [0] * len(demands)

    # Best fit, largest first: small demands must not take the space that only a large one needs.
    for index in sorted(
        range(len(demands)),
        key=lambda index: (demands[index].get(GPU, 0), demands[index][CPU]),
        reverse=True,
    ):
        able = [
            number
            for number, room in enumerate(left)
            if all(room.get(kind, 0) >= need for kind, need in demands[index].items())
        ]
        if not able:
            return None
        found[index] = min(able, key=lambda number: (left[number].get(GPU, 0), left[number][CPU]))
        # A used node is not offered to another demand.
        if apart:
            left[found[index]] = {}
        for kind, amount in demands[index].items():
            left[found[index]][kind] = left[found[index]].get(kind, 0) - amount

    return found


def living_nodes() -> list[NodeResources]:
    """Return the nodes that are alive, with all their resources, whether in use or free."""
    return [
        NodeResources(node["NodeManagerAddress"], node["Resources"], node["NodeID"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def free_nodes() -> list[NodeResources]:
    # Ray has no public API for this that works without its dashboard.
    free = ray._private.state.available_resources_per_node()
    return [node._replace(resources=free.get(node.identity, {CPU: 0.0})) for node in living_nodes()]


def unused(free: Sequence[NodeResources]) -> list[NodeResources]:
    """Return those of `free_nodes` on which no CPU and no GPU is in use."""
    whole = {node.identity: node.resources for node in living_nodes()}
    return [
        node
        for node in free
        if all(
            node.resources.get(kind, 0) == whole.get(node.identity, {}).get(kind, 0) for kind in (CPU, GPU)
        )
    ]


def amounts_in_words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in (GPU, CPU))


# ---- inspection

_PINGS = 5


class NodeReport(NamedTuple):
    """One node.

    Attributes:
        software: Versions by name. None if no worker could be started.
        clock_offset_s: Its clock minus the driver's, in seconds.
        clock_uncertainty_s: The maximum error of the offset, in seconds.
        error: Why no worker could be started.
        limits: The size and the free bytes of /dev/shm, and the soft and hard limit of a worker's open files.
            None if no worker could be started.
        unseen: The requested paths that do not exist on the node.
    """

    address: str
    resources: Mapping[str, float]
    software: Mapping[str, str] | None = None
    clock_offset_s: float = 0.0
    clock_uncertainty_s: float = 0.0
    error: str | None = None
    limits: tuple[tuple[int, int], tuple[int, int]] | None = None
    unseen: tuple[str, ...] = ()


class ClusterReport(NamedTuple):
    """The cluster.

    Attributes:
        nodes: One report per node.
        whole: All resources of each node.
        free: The resources that are not reserved.
        dead: The addresses of nodes that have left.
    """

    nodes: tuple[NodeReport, ...]
    whole: tuple[NodeResources, ...]
    free: tuple[NodeResources, ...]
    dead: tuple[str, ...]


class _Witness:
    """A process on the node. Once it runs, it answers within milliseconds, so that clocks can be compared."""

    def look(self, paths: Sequence[str]) -> dict[str, Any]:
        """Return the fields of a NodeReport that only the node knows."""
        memory = shutil.disk_usage("/dev/shm")
        limits = (memory.total, memory.free), resource.getrlimit(resource.RLIMIT_NOFILE)
        unseen = tuple(path for path in paths if not Path(path).exists())
        return {"software": here(), "limits": limits, "unseen": unseen}

    def now(self) -> float:
        return time.time()


def here() -> dict[str, str]:
    return {"python": platform.python_version(), "ray": ray.__version__, "megarl": __version__}


def inspect_cluster(limit_s: float, paths: Sequence[str] = ()) -> ClusterReport:
    """Inspect the cluster that this process has joined.

    Args:
        limit_s: A node that does not answer within this time is reported as silent.
        paths: Paths that every node should have.
    """
    nodes = living_nodes()
    # A witness takes no CPU, so that it starts even if all are reserved.
    witness = ray.remote(num_cpus=0)(_Witness)
    placed = [NodeAffinitySchedulingStrategy(node.identity, soft=False) for node in nodes]
    actors: list[Any] = [witness.options(scheduling_strategy=place).remote() for place in placed]
    # The nodes share one deadline, so that the delays of several silent ones do not add up.
    deadline_s = time.monotonic() + limit_s

    try:
        reports = tuple(
            _report(node, actor, paths, deadline_s) for node, actor in zip(nodes, actors, strict=True)
        )
    finally:
        for actor in actors:
            ray.kill(actor)

    dead = tuple(node["NodeManagerAddress"] for node in ray.nodes() if not node["Alive"])
    return ClusterReport(nodes=reports, whole=tuple(nodes), free=tuple(free_nodes()), dead=dead)


def _report(node: NodeResources, actor: Any, paths: Sequence[str], deadline_s: float) -> NodeReport:
    try:
        found = ray.get(actor.look.remote(list(paths)), timeout=max(0.0, deadline_s - time.monotonic()))
        offsets = [_compare(actor) for _ in range(_PINGS)]
    except RayError as error:
        return NodeReport(node.node, node.resources, error=str(error).strip().splitlines()[-1])

    # The fastest query bounds the clock's offset most tightly.
    uncertainty, offset = min(offsets)
    return NodeReport(
        node.node, node.resources, clock_offset_s=offset, clock_uncertainty_s=uncertainty, **found
    )


def _compare(actor: Any) -> tuple[float, float]:
    """Return half of the duration of a query, and the node's clock minus this one's, in seconds."""
    before = time.time()
    there: float = ray.get(actor.now.remote(), timeout=5)
    after = time.time()
    # The node is assumed to have read its clock halfway through the query, as in NTP.
    return (after - before) / 2, there - (before + after) / 2
