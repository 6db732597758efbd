"""How often processes of any kind are restarted, and how their pools move from lost nodes to free ones."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from megarl.config.schema import RecoveryConfig
from megarl.controller import hints
from megarl.controller.cluster import daemons_last_words, ended_node
from megarl.controller.errors import RayEndedError
from megarl.controller.resource_pool import RayResourcePool
from megarl.machine.errors import RunError
from megarl.machine.wording import counted

_log = logging.getLogger(__name__)
LOOK_S = 1.0  # interval at which a free node is looked for
_DAY_S = 86_400.0


class NodeLostError(RunError):
    """A node has left the cluster, and no other one has free resources for its processes."""

    hint = hints.NODE_LOST


class ProcessLimitError(RunError):
    """Too many processes of a kind, other than engines, had to be restarted."""


def node_wait_s(config: RecoveryConfig) -> float:
    """Return how long to wait for a node; not at all if the run continues without it, or ends anyway."""
    return config.wait_for_node_s if config.enabled and not config.allow_fewer_replicas else 0.0


def leave_lost_nodes(
    pool: RayResourcePool, what: str, wait_s: float, *, details: str = "", cause: Exception | None = None
) -> None:
    """Move a pool from lost nodes to free ones, and wait for a node if there is none.

    No node can join a Ray that the run has started itself, so its loss ends the run at once.

    Args:
        pool: The pool. Its processes have to be started again.
        what: Its processes, for messages.
        wait_s: How long to wait.
        details: The end of the error's message.
        cause: The cause of the error.

    Raises:
        NodeLostError: There is no free node in time.
        RayEndedError: The node was the only one of the run's own Ray.
    """
    end_s = time.monotonic() + wait_s
    is_told = False
    lost = pool.lost_nodes()
    while gone := pool.move_from_lost_nodes():
        if daemon := ended_node():
            raise RayEndedError(daemon, daemons_last_words()) from cause
        nodes = list(dict.fromkeys(gone.values()))
        missing = (
            f"node {', '.join(nodes)} is lost, and no other node of the cluster has free resources for "
            f"{what} ({counted(len(gone), 'process')} on {counted(len(nodes), 'node')})"
        )
        if time.monotonic() >= end_s:
            waited = f" after {wait_s:g} s (recovery.wait_for_node_s)" if wait_s else ""
            raise NodeLostError(
                f"{missing}{waited}; the same command resumes from the last checkpoint when the cluster has "
                f"enough nodes{details}"
            ) from cause
        if not is_told:
            _log.warning("%s; waiting up to %g s for one", missing, wait_s)
            is_told = True
        time.sleep(LOOK_S)

    if lost:
        addresses = ", ".join(dict.fromkeys(lost.values()))
        _log.warning("node %s is lost; another one takes its place for %s", addresses, what)


class RestartBudget:
    """Restarts of the recent past. A rare fault never exhausts the budget, however long the run is.

    Args:
        limit: The most restarts within a day.
    """

    def __init__(self, limit: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._now_s = now_s
        self._times_s: deque[float] = deque()
        self.num_restarts = 0  # of the whole run

    @property
    def left(self) -> int:
        """The number of restarts that are allowed now."""
        oldest_s = self._now_s() - _DAY_S
        while self._times_s and self._times_s[0] <= oldest_s:
            self._times_s.popleft()
        return self.limit - len(self._times_s)

    def spend(self) -> None:
        """Record a restart."""
        assert self.left > 0
        self._times_s.append(self._now_s())
        self.num_restarts += 1

    def used_up(self, of: str = "") -> str:
        """Return the end of the message about a process that would need another restart.

        Args:
            of: What the restarts are of, such as " of this process".
        """
        return (
            f"rollout.restart_limit: {counted(self.limit, 'restart')} within a day{of} "
            f"{'is' if self.limit == 1 else 'are'} used up. The cause is in the output above; if it is "
            "intermittent, allow more"
        )
