"""A Ray cluster of several nodes on this machine, also on a machine that is too busy for Ray's own limits."""

from __future__ import annotations

from typing import Any

from ray.cluster_utils import Cluster

_NUM_ATTEMPTS = 3


def started_cluster(head: dict[str, Any], *others: dict[str, Any]) -> tuple[Cluster, list[Any]]:
    """Start a head node and others, and return the cluster and the other nodes.

    Ray waits 30 s for each node, a constant of its own. A busy machine may need longer for the first one.
    """
    for attempt in range(1, _NUM_ATTEMPTS + 1):
        cluster = Cluster()
        try:
            cluster.add_node(**head, include_dashboard=False)
            return cluster, [cluster.add_node(**other) for other in others]
        except Exception as error:
            cluster.shutdown()
            if attempt == _NUM_ATTEMPTS or "timed out during startup" not in str(error):
                raise
    raise AssertionError("the last attempt returns or raises")
