"""Driver side of the environment processes: sends orders, receives reports, and restarts dead processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.config.roles import ENVIRONMENT
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import RemoteFuture, WorkerFuture, wait_for_any
from megarl.controller.group import RayWorkerGroup, RoleGroup, is_dead
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.restarts import Fleet
from megarl.controller.worker import RayClassWithInitArgs
from megarl.rollout.worker.environment import EnvironmentWorker, EpisodeReport, Order

_WAIT_S = 5.0  # A process without a report returns after this time, which shows that it is alive.
_log = logging.getLogger(__name__)


@dataclass
class _Process:
    """A process that runs environments.

    Attributes:
        heard_s: When it last reported a turn, or received its first one.
        orders: Turns that have not been sent to it yet.
        ended: Episodes that have ended, but whose end has not been sent to it yet.
        episodes: Episodes whose environments it may have.
        unanswered: Episodes that have sent it a turn.
        future: The call in progress.
        is_interrupted: Whether this call was interrupted.
        is_up: Whether it has answered a call, so that it is no longer starting.
    """

    heard_s: float
    orders: list[Order] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    episodes: set[int] = field(default_factory=set)
    unanswered: set[int] = field(default_factory=set)
    future: WorkerFuture[list[EpisodeReport]] | None = None
    is_interrupted: bool = False
    is_up: bool = False


class Environments(Fleet):
    """The environment processes, one per pool. An episode stays with one process.

    Args:
        pools: Pool of each process.
        worker: Worker class to start there.
        restart_limit: See `Fleet`.
        hang_limit_s: A process that has unanswered turns and reports none for this long is restarted.
        phase_time_limit_s: Time limit of a call.
        wait_for_node_s: See `Fleet`.
        wait: Has the semantics of wait_for_any.
    """

    limit_of = " of such processes"

    def __init__(
        self,
        pools: Sequence[RayResourcePool],
        worker: RayClassWithInitArgs,
        *,
        restart_limit: int,
        hang_limit_s: float,
        phase_time_limit_s: float,
        wait_for_node_s: float = 0.0,
        wait: Callable[[Sequence[RemoteFuture[Any]], float], list[RemoteFuture[Any]]] = wait_for_any,
    ) -> None:
        self._pools = tuple(pools)
        self._worker = worker
        self._wait = wait
        self._hang_limit_s = hang_limit_s
        self._phase_time_limit_s = phase_time_limit_s
        self._processes = [_Process(0.0) for _ in self._pools]
        super().__init__("environment process", len(self._pools), restart_limit, wait_for_node_s)

    def _start(self, number: int) -> RoleGroup:
        return RayWorkerGroup(
            self._pools[number], self._worker, role=ENVIRONMENT, phase_time_limit_s=self._phase_time_limit_s
        )

    @property
    def is_busy(self) -> bool:
        return any(process.unanswered or process.orders or process.ended for process in self._processes)

    def order(self, order: Order) -> None:
        process = self._process_of(order.episode)

        # The hang limit counts from the first unanswered turn, not from the last report of an idle process.
        if not process.unanswered:
            process.heard_s = time.monotonic()
        process.orders.append(order)
        process.episodes.add(order.episode)
        process.unanswered.add(order.episode)

    def end(self, episode: int) -> None:
        """End an episode and close its environment, if it has one."""
        process = self._process_of(episode)
        if episode in process.episodes:
            process.episodes.remove(episode)
            process.unanswered.discard(episode)
            # A turn that was not sent must not create the environment again after it has been closed.
            process.orders = [order for order in process.orders if order.episode != episode]
            process.ended.append(episode)

    def _process_of(self, episode: int) -> _Process:
        return self._processes[episode % len(self._processes)]

    def poll(self, wait_s: float) -> tuple[list[EpisodeReport], list[int]]:
        """Send orders and wait at most `wait_s` for an answer of a process.

        Returns:
            The reports, and the episodes whose environments are lost.

        Raises:
            ProcessLimitError: All restarts are used up.
            NodeLostError: A node is lost, and no other node has become free in time.
            WorkerError: The code of an environment failed.
        """
        self._send_orders()

        # Collect the answers. A dead or hung process is restarted while the others continue.
        futures = [process.future for process in self._processes if process.future is not None]
        ready = self._wait(futures, wait_s) if futures else []
        reports: list[EpisodeReport] = []
        lost: list[int] = []

        for number, process in enumerate(self._processes):
            if process.future in ready:
                assert process.future is not None
                try:
                    heard = process.future.get()
                except (WorkerError, PhaseTimeoutError) as error:
                    # An error in the user's environment would recur after a restart, so it ends the run.
                    if not is_dead(error):
                        raise
                    lost += self._restart(number, str(error))
                    continue
                process.future = None
                # An empty answer is not progress, except for the first one, which ends the startup.
                if heard or not process.is_up:
                    process.heard_s = time.monotonic()
                    process.is_up = True
                process.unanswered -= {report.episode for report in heard if report.is_final}
                reports += heard
            elif (
                process.is_up
                and process.unanswered
                and time.monotonic() - process.heard_s > self._hang_limit_s
            ):
                lost += self._restart(
                    number, f"{len(process.unanswered)} turns without an answer for {self._hang_limit_s:g} s"
                )

        return reports, lost

    def _send_orders(self) -> None:
        """Send each idle process its turns, and interrupt a waiting call that has new turns to send."""
        for process, group in zip(self._processes, self.groups, strict=True):
            if process.future is None and (process.orders or process.ended or process.unanswered):
                process.future = group.call(
                    EnvironmentWorker.exchange, process.orders, process.ended, _WAIT_S
                )
                process.orders = []
                process.ended = []
                process.is_interrupted = False
            elif (
                process.future is not None
                and (process.orders or process.ended)
                and not process.is_interrupted
            ):
                process.is_interrupted = True
                group.call_beside(EnvironmentWorker.interrupt)

    def _restart(self, number: int, why: str) -> list[int]:
        """Restart a process. Returns the episodes whose environments it had."""
        last_words = self._make_room(number, self._pools[number], why)
        _log.warning("%s\nit is restarted, and its episodes start over", last_words)
        self.groups[number] = self._start(number)
        lost = sorted(self._processes[number].episodes)
        self._processes[number] = _Process(time.monotonic())
        return lost
