"""A worker group whose calls are sent again when its processes, or servers that they need, are lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from megarl.controller.calls import Call
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import DerivedFuture, RemoteFuture, wait_for_calls
from megarl.controller.group import RoleGroup
from megarl.controller.restarts import ProcessLimitError, RestartBudget, leave_lost_nodes
from megarl.rewards.judge_servers import JudgeServers

_log = logging.getLogger(__name__)


class RestartedGroup:
    """A worker group with one process that has no state of the run, so that another one can take its place.

    A lost process starts again, on another node if its own is lost, and its calls are sent again. One thread
    at a time restarts it; others wait.

    Args:
        budget: The restarts that are allowed.
        servers: The judges that it needs.
        wait_for_node_s: How long to wait for a free node after one is lost.
    """

    def __init__(
        self, group: RoleGroup, budget: RestartBudget, servers: JudgeServers, wait_for_node_s: float = 0.0
    ) -> None:
        self.group = group
        self.servers = servers
        self.lock = threading.RLock()  # held while calls are sent, and during a restart
        self.on_restart: Callable[[], None] = lambda: None  # sends the new process what the old one had
        self._budget = budget
        self._wait_for_node_s = wait_for_node_s
        self._number = 0  # of the current process

    def send[T](
        self, call: Callable[[], RemoteFuture[T]], again: Callable[[], RemoteFuture[T]] | None = None
    ) -> ResentFuture[T]:
        """Send a call.

        Args:
            call: Sends it.
            again: Sends it to a new process; None: `call` does.
        """
        with self.lock:
            return ResentFuture(self, call(), self._number, again or call)

    def resend[T](
        self,
        sent: RemoteFuture[T],
        number: int,
        again: Callable[[], RemoteFuture[T]],
        error: WorkerError | PhaseTimeoutError,
    ) -> tuple[RemoteFuture[T], int] | None:
        """Send a call again if it has failed because its process, number `number`, is lost.

        Returns:
            Its new future, and the number of the new process. None: it has not failed for this reason.

        Raises:
            ProcessLimitError: All restarts are used up.
            NodeLostError: A node is lost, and no other node has become free in time.
            WorkerError: A new process failed to start.
        """
        with self.lock:
            if not self._is_lost(sent, error):
                return None
            if number == self._number:
                self._restart(str(error))
            return again(), self._number

    def _is_lost(self, sent: RemoteFuture[Any], error: WorkerError | PhaseTimeoutError) -> bool:
        # A call that only takes too long would do so again.
        if isinstance(error, PhaseTimeoutError):
            return error.silent_s is not None and error.role == self.group.role
        calls = [*sent.calls, *sent.needed, *self.servers.calls]
        constructions = [each for call in calls for each in call.processes.construction]
        failures = [call.failure for call in (*calls, *constructions) if call.failure is not None]
        return any(failure.failure.kind.is_loss for failure in failures)

    def _restart(self, why: str) -> None:
        role = self.group.role
        while True:
            if not self._budget.left:
                raise ProcessLimitError(f"{role}: {why}\n\n{self._budget.used_up(' of this process')}")
            self._budget.spend()
            _log.warning(
                "%s\nthe process of the role %s is restarted, and its requests are sent again; "
                "restarts left: %d",
                *(why, role, self._budget.left),
            )
            # Without a server, the group's process would wait, so it is restarted in any case.
            for lost in (self.group.processes, *self.servers.lost()):
                lost.shutdown()
                leave_lost_nodes(lost.pool, lost.role or role, self._wait_for_node_s, details=f"\n\n{why}")
                lost.restart()
            try:
                self.servers.connect(self.group)
            except WorkerError as error:
                if not error.kind.is_loss:
                    raise
                why = str(error)
                continue
            self._number += 1
            self.on_restart()
            return


class ResentFuture[T_co](RemoteFuture[T_co]):
    """The future of a call of a `RestartedGroup`.

    Args:
        number: The number of the process to which it was sent.
        again: Sends it again.
    """

    def __init__(
        self,
        group: RestartedGroup,
        sent: RemoteFuture[T_co],
        number: int,
        again: Callable[[], RemoteFuture[T_co]],
    ) -> None:
        self._group = group
        self._sent = sent
        self._number = number
        self._again = again

    @property
    def calls(self) -> tuple[Call, ...]:
        return self._sent.calls

    @property
    def needed(self) -> tuple[Call, ...]:
        return self._group.servers.calls

    def get(self, timeout: float | None = None) -> T_co:
        """Wait for the result. Raises what `WorkerFuture.get` and `RestartedGroup.resend` raise."""
        while True:
            try:
                wait_for_calls(self.calls, timeout, self.needed)
                return self._sent.get()
            except (WorkerError, PhaseTimeoutError) as error:
                if not self.resend(error):
                    raise

    def resend(self, error: WorkerError | PhaseTimeoutError) -> bool:
        if (resent := self._group.resend(self._sent, self._number, self._again, error)) is None:
            return False
        self._sent, self._number = resent
        return True


def nothing() -> RemoteFuture[None]:
    """Return the future of a call that need not be sent."""
    return DerivedFuture([], lambda results: None)
