"""Restarts of processes of any kind, and how their pools move from lost nodes to free ones."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from megarl.config.schema import RecoveryConfig
from megarl.controller import hints
from megarl.controller.cluster import daemons_last_words, ended_node
from megarl.controller.errors import RayEndedError
from megarl.controller.group import RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.machine.errors import RunError, counted
from megarl.tracking.timeline import Span

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


class Fleet(ABC):
    """Worker groups of one kind that are started one by one, and restarted when their processes die or hang.

    A restart kills the processes of a group with all their descendants. One thread at a time uses them.

    Args:
        title: The name of one of them, for messages.
        number: How many are started.
        restart_limit: Number of restarts within a day after which the run ends.
        wait_for_node_s: How long to wait for a free node after one is lost.
    """

    limit_error: type[RunError] = ProcessLimitError  # raised if all restarts are used up
    limit_of = ""  # see `RestartBudget.used_up`

    def __init__(self, title: str, number: int, restart_limit: int, wait_for_node_s: float) -> None:
        self._title = title
        self._wait_for_node_s = wait_for_node_s
        self._budget = RestartBudget(restart_limit)
        self._spans: list[Span] = []
        self.groups = [self._start(each) for each in range(number)]

    @abstractmethod
    def _start(self, number: int) -> RoleGroup:
        """Start a group, without waiting for it."""

    @property
    def num_restarts(self) -> int:
        return self._budget.num_restarts

    def _make_room(self, number: int, pool: RayResourcePool, why: str) -> str:
        """End a group that died or hangs, so that another one can be started. Returns its last words.

        Raises:
            RunError: All restarts are used up (`limit_error`).
            NodeLostError: The node of the group has left the cluster, and no other one can take its place.
        """
        name = f"{self._title} {number} of {len(self.groups)}"
        last_words = f"{name} ended or hung: {why}"
        self.kill(number)

        # Without a node, more restarts would not help.
        leave_lost_nodes(pool, name, self._wait_for_node_s, details=f"\n\n{last_words}")
        if not self._budget.left:
            raise self.limit_error(f"{last_words}\n\n{self._budget.used_up(self.limit_of)}")
        self._budget.spend()
        return last_words

    def kill(self, number: int) -> None:
        self._keep_spans(number)
        self.groups[number].shutdown()

    def shutdown(self) -> None:
        for number in range(len(self.groups)):
            self.kill(number)

    def _keep_spans(self, number: int) -> None:
        self._spans += [span._replace(rank=number) for span in self.groups[number].drain_spans()]

    def drain_spans(self) -> list[Span]:
        """Return the spans of all groups, including replaced ones, with the group's number as the rank.

        See RoleGroup.drain_spans.
        """
        # Spans of replaced groups were kept when those were killed.
        for number in range(len(self.groups)):
            self._keep_spans(number)
        spans = self._spans
        self._spans = []
        return spans
