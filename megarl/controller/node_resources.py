"""What the nodes of a cluster have, and which of them can hold what is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray

CPU = "CPU"
GPU = "GPU"


class NodeResources(NamedTuple):
    """`node`: its address. `identity`: Ray's id of it."""

    node: str
    resources: Mapping[str, float]
    identity: str = ""


def fits(demands: Sequence[Mapping[str, float]], nodes: Sequence[NodeResources]) -> bool:
    """Whether each demand finds a node; see `match`."""
    return match(demands, nodes) is not None


def match(
    demands: Sequence[Mapping[str, float]], nodes: Sequence[NodeResources], apart: bool = False
) -> list[int] | None:
    """The node of each demand; None where one finds none: the largest first, each on the node where it leaves
    least.

    apart: no node has two.
    """
    left = [dict(node.resources) for node in nodes]
    found = [0] * len(demands)

    # Best fit, largest first: small demands must not take the room that only a large one needs.
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
        # A node without room is not offered to another demand.
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
    # Ray has no public call for this that works without its dashboard.
    free = ray._private.state.available_resources_per_node()
    return [node._replace(resources=free.get(node.identity, {CPU: 0.0})) for node in living_nodes()]


def amounts_in_words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in (GPU, CPU))
