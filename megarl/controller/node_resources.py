"""The resources of a cluster's nodes, and matching of demands to nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray
import ray._private.state

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
