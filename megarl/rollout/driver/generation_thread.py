"""Generation thread, which generates continuously while the roles train.

It executes the trainer's commands between two iterations.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum, auto
from queue import Empty, SimpleQueue

from megarl.config.schema import OnUpdate
from megarl.rollout.driver.rollout import Rollout
from megarl.rollout.driver.rollout_buffer import RolloutBuffer
from megarl.rollout.driver.sample_groups import StepGroups

_TURN_S = 0.02  # interval at which the thread checks for commands
_END_S = 30.0


class _Command(Enum):
    """Command of the trainer's thread.

    Attributes:
        take: Return the groups of the next step, once they are finished.
        pause: Hand over the replicas, with no call in progress at any of them.
        drain: The same, after the requests in flight.
        resume: End a pause.
        stop: End the thread.
    """

    take = auto()
    pause = auto()
    drain = auto()
    resume = auto()
    stop = auto()


# A command and its answer: the groups of `take`, and otherwise None.
_Order = tuple[_Command, Future[StepGroups | None]]


class GenerationThread:
    """Drives the rollout buffer and the replicas, which have one user at a time.

    The user is this thread, or the trainer's while this thread pauses.

    Args:
        rollout: The rollout role.
        buffer: The rollout buffer.
        on_update: What happens to requests in flight at a weight sync.
    """

    def __init__(self, rollout: Rollout, buffer: RolloutBuffer, on_update: OnUpdate) -> None:
        self._scheduler = rollout.scheduler
        self._runner = rollout.runner
        self._buffer = buffer
        self._on_update = on_update
        self._orders: SimpleQueue[_Order] = SimpleQueue()
        self._failure: BaseException | None = None
        self._has_ended = False
        self._num_pauses = 0  # nested uses of `exclusive` by the trainer's thread
        self._is_held = False  # whether a failed weight sync keeps this thread paused
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    # ---- for the trainer's thread

    def take(self) -> StepGroups:
        """Wait for the groups of the next step and return them. Raises the error of this thread, if any."""
        groups = self._ask(_Command.take)
        if groups is None:
            raise self._failure or RuntimeError("the generation thread has been stopped")
        return groups

    @contextmanager
    def exclusive(self, for_weights: bool = False) -> Generator[None]:
        """Give the calling thread exclusive access to the replicas, with no call in progress at any of them.

        After a failure of this thread, access is free. After a failed weight sync, engines may have a mixture
        of weights, so this thread stays paused until the next sync succeeds.

        Args:
            for_weights: Whether the caller syncs weights. With `drain`, requests in flight finish first.
        """
        if self._num_pauses == 0 and not self._is_held:
            drains = for_weights and self._on_update is OnUpdate.drain
            self._ask(_Command.drain if drains else _Command.pause)

        self._num_pauses += 1
        self._is_held = self._is_held or for_weights
        try:
            yield
            # A failed sync raises above, and leaves the thread paused.
            if for_weights:
                self._is_held = False
        finally:
            self._num_pauses -= 1
            if self._num_pauses == 0 and not self._is_held:
                self._orders.put((_Command.resume, Future()))

    def stop(self) -> None:
        """Stop the thread. Requests in flight end with the replicas."""
        if self._is_held:
            self._orders.put((_Command.resume, Future()))
        self._orders.put((_Command.stop, Future()))
        self._thread.join(_END_S)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _ask(self, command: _Command) -> StepGroups | None:
        """Give an order and wait for its answer, which is None from a thread that has ended."""
        answer: Future[StepGroups | None] = Future()
        self._orders.put((command, answer))

        # An order that comes after the thread's last look at the queue is answered here.
        if self._has_ended:
            return answer.result() if answer.done() else None
        return answer.result()

    # ---- the generation thread

    def _run(self) -> None:
        pending: _Order | None = None
        try:
            while True:
                if (order := self._next_order()) is not None:
                    pending = order
                    if order[0] is _Command.stop:
                        break
                    if order[0] is _Command.take:
                        self._buffer.expect_step()

                # One iteration. Groups taken, groups dropped or weights synced since the last one may allow
                # groups to start.
                self._buffer.score()
                self._buffer.begin()
                if pending is not None and self._is_due(pending[0]):
                    pending = self._serve(*pending)
                elif self._runner.is_at_work or pending is not None:
                    # An order is awaited: poll the engines and environments even if none seems to work. A
                    # restarted replica gets the actor's weights, which are the engines' version only while
                    # the trainer waits.
                    self._scheduler.may_readmit = pending is not None and pending[0] is _Command.take
                    self._runner.poll(_TURN_S)
        except BaseException as error:  # noqa: BLE001
            # Boundary of the thread: the next `take` raises the error.
            self._failure = error

        # No caller may wait for a thread that has ended.
        self._has_ended = True
        unanswered = [] if pending is None else [pending]
        while not self._orders.empty():
            unanswered.append(self._orders.get())
        for _, answer in unanswered:
            answer.set_result(None)

    def _next_order(self) -> _Order | None:
        """Return the next order. An idle thread waits briefly for one."""
        try:
            return self._orders.get(timeout=0 if self._runner.is_at_work else _TURN_S)
        except Empty:
            return None

    def _is_due(self, command: _Command) -> bool:
        if command is _Command.take:
            return self._buffer.is_ready
        if command is _Command.drain:
            return not (self._runner.is_at_work or self._buffer.awaits_scores)
        return True

    def _serve(self, command: _Command, answer: Future[StepGroups | None]) -> _Order | None:
        """Execute an order. Returns the order that ended a pause, unless it is `resume`."""
        if command is _Command.take:
            groups = self._buffer.take()
            # The slots of the taken groups are free now.
            self._buffer.begin()
            answer.set_result(groups._replace(num_ahead=len(self._buffer.staleness.live)))
            return None

        if command is _Command.resume:
            return None

        # In the meantime, the trainer may poll the scheduler itself, and must then be able to readmit
        # replicas.
        self._scheduler.pause()
        self._scheduler.may_readmit = True
        answer.set_result(None)
        following = self._orders.get()
        return None if following[0] is _Command.resume else following
