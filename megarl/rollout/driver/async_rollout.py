"""Generation ahead of training, in a thread of its own.

The thread that has the turn uses the buffer and the replicas alone:

    trainer's thread:    take | trains ... | exclusive: syncs weights | trains ... | take
    generation thread:        | generates  |                          | generates  |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from megarl.config.schema import OnUpdate
from megarl.rollout.driver.rollout import Rollout
from megarl.rollout.driver.rollout_buffer import RolloutBuffer
from megarl.rollout.driver.sample_groups import StepGroups

_WAIT_S = 0.005  # between two polls for the scores that decide whether a group is trained
_TURN_S = 0.02  # the longest time for which the generation thread waits for engines
_END_S = 30.0


class GenerationThread:
    """Drives the rollout buffer and the replicas whenever the trainer's thread does not.

    Args:
        on_update: What happens to requests in flight at a weight sync.
    """

    def __init__(self, rollout: Rollout, buffer: RolloutBuffer, on_update: OnUpdate) -> None:
        self._scheduler = rollout.scheduler
        self._runner = rollout.runner
        self._buffer = buffer
        self._on_update = on_update
        self._turns = threading.Condition()  # its lock is held during an iteration
        self._is_taken = False  # whether the trainer's thread has the turn, or waits for it
        self._num_uses = 0  # nested uses of the turn by the trainer's thread
        self._is_held = False  # whether a failed weight sync keeps the turn with the trainer's thread
        self._failure: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    # ---- for the trainer's thread

    def take(self) -> StepGroups:
        """Wait for the groups of the next step and return them.

        Raises the errors of generation, and that which ended this thread, if any. An error in this call does
        not end the thread: a step that is repeated after a recovery takes its groups again.
        """
        with self._turn():
            if self._failure is not None:
                raise self._failure
            self._buffer.expect_step()
            self._generate_until(lambda: self._buffer.is_ready, may_readmit=True)
            groups = self._buffer.take()
            # The slots of the taken groups are free now.
            self._buffer.begin()
            return groups._replace(num_ahead=len(self._buffer.staleness.live))

    @contextmanager
    def exclusive(self, for_weights: bool = False) -> Generator[None]:
        """Give the calling thread exclusive access to the replicas, with no call in progress at any of them.

        After a failure of this thread, access is free. After a failed weight sync, engines may have a mixture
        of weights, so this thread stays paused until the next sync succeeds.

        Args:
            for_weights: Whether the caller syncs weights. With `drain`, requests in flight finish first.
        """
        is_first = self._num_uses == 0
        with self._turn():
            if is_first and self._generates:
                self._pause(drains=for_weights and self._on_update is OnUpdate.drain and not self._is_held)
            self._is_held = self._is_held or for_weights
            yield
            # A failed sync raises above, and leaves the thread paused.
            if for_weights:
                self._is_held = False

    def stop(self) -> None:
        """Stop the thread. Requests in flight end with the replicas."""
        self._stopped.set()
        self._is_taken = False  # a failed weight sync may still hold the turn
        # An iteration that hangs must not keep the run from ending.
        if self._turns.acquire(timeout=_END_S):
            self._turns.notify()
            self._turns.release()
            self._thread.join(_END_S)

    @contextmanager
    def _turn(self) -> Generator[None]:
        """Give the turn to the trainer's thread, between two iterations of the other one."""
        if self._num_uses == 0 and not self._is_held:
            self._is_taken = True
            with self._turns:  # the end of the iteration in progress
                pass
        self._num_uses += 1
        try:
            yield
        finally:
            self._num_uses -= 1
            if self._num_uses == 0 and not self._is_held:
                self._is_taken = False
                with self._turns:
                    self._turns.notify()

    def _pause(self, *, drains: bool) -> None:
        """End all calls to replicas. An error ends generation: the next `take` raises it."""
        try:
            # All that may start has started, so that timing does not decide which rows are drawn before the
            # update of a curriculum, or are in a checkpoint.
            if not self._is_held:
                self._start_groups()
            if drains:
                self._generate_until(self._is_drained, may_readmit=False)
            self._scheduler.pause()
            # The trainer may poll the scheduler itself, and must then be able to readmit replicas.
            self._scheduler.may_readmit = True
        except Exception as error:  # noqa: BLE001
            self._failure = error

    def _generate_until(self, is_enough: Callable[[], bool], *, may_readmit: bool) -> None:
        while not self._iterate(is_enough, may_readmit=may_readmit):
            if not self._runner.is_at_work:
                time.sleep(_TURN_S)

    def _is_drained(self) -> bool:
        return not (self._runner.is_at_work or self._buffer.awaits_scores)

    # ---- for both threads

    def _iterate(self, is_enough: Callable[[], bool], *, may_readmit: bool) -> bool:
        """Generate for a short time, unless it is enough. Return whether it is.

        Args:
            may_readmit: Whether restarted replicas may get the actor's weights, which are the engines'
                version only while the trainer waits for samples.
        """
        self._start_groups()
        if is_enough():
            return True
        self._scheduler.may_readmit = may_readmit
        self._runner.poll(_TURN_S)
        return False

    def _start_groups(self) -> None:
        """Start what groups taken, groups dropped or weights synced since the last time allow."""
        self._buffer.score()
        self._buffer.begin()

    # ---- the generation thread

    @property
    def _generates(self) -> bool:
        """Whether this thread has neither failed nor been stopped."""
        return self._failure is None and not self._stopped.is_set()

    def _run(self) -> None:
        is_idle = True
        while not self._stopped.wait(_TURN_S if is_idle else 0):
            with self._turns:
                self._turns.wait_for(lambda: not self._is_taken)
                if not self._generates:
                    return
                try:
                    is_idle = self._iterate(lambda: not self._runner.is_at_work, may_readmit=False)
                except BaseException as error:  # noqa: BLE001
                    # Boundary of the thread: the next `take` raises the error. Whoever gets the turn after
                    # this iteration must see it.
                    self._failure = error
                    return
