"""Asynchronous rollout: a thread of the driver keeps generating, as the staleness controller allows, while
the roles train."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megarl.batch.data_proto import DataProto
from megarl.config.schema import OnUpdate, SamplingConfig
from megarl.data.loader import BatchLoader
from megarl.roles.rollout.finished_groups import FinishedGroup
from megarl.roles.rollout.rollout import Rollout, Scoring
from megarl.roles.rollout.rollout_buffer import GroupRules, RolloutBuffer, StepGroups
from megarl.roles.weights.rollout_weights import RolloutWeights
from megarl.rollout.staleness import StalenessController

_TURN_S = 0.02  # The thread checks this often whether another thread wants the replicas.
_REST_S = 0.0005
_END_S = 30.0


class AsyncRollout:
    """Replaces the loader and the rollout in the training loop.

    `next` waits for the samples of the next step and returns their prompts; `generate` returns these samples.

    The replicas have one user at a time. This is the generation thread, which yields to threads that ask by
    `Replicas.exclusive`.

    Args:
        rollout: The rollout role.
        weights: The weights of its engines.
        prompts: The loader.
        scoring: Scores finished groups.
        rules: The composition of a group.
        on_update: What happens to requests in flight when weights are pushed.
        make_staleness: Builds the staleness controller for a run whose weights have the given version.
    """

    def __init__(
        self,
        rollout: Rollout,
        weights: RolloutWeights,
        prompts: BatchLoader,
        scoring: Scoring,
        rules: GroupRules,
        on_update: OnUpdate,
        make_staleness: Callable[[int], StalenessController],
    ) -> None:
        self._rollout = rollout
        self._weights = weights
        self._prompts = prompts
        self._rules = rules
        self._on_update = on_update

        # The buffer needs the version of the first push, which is not known before the first step.
        self._make_buffer = lambda version: RolloutBuffer(
            rollout, weights, prompts, scoring, rules, make_staleness(version)
        )
        self._buffer: RolloutBuffer | None = None
        self._stored: Mapping[str, FinishedGroup] = {}
        self._trained: list[str] = []
        self._step_groups = StepGroups(DataProto(), [], [], [])
        self._num_in_progress = 0
        self._condition = threading.Condition()  # The holder may use the replicas.
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._failure: BaseException | None = None
        self._is_closed = self._is_awaited = False
        self._num_inside = 0  # nested uses of `_exclusive` by the trainer's thread
        self._is_requested = self._finishes_first = self._has_yielded = False
        rollout.share_through(self._exclusive)

    # ---- for the trainer

    def __next__(self) -> DataProto:
        """Waits for all samples of the next step and returns its prompts. Raises the error of the generation
        thread, if any."""
        buffer = self._started()
        self._is_awaited = True

        # Wait for the generation thread, which notifies as soon as the groups of the step are finished.
        with self._condition:
            try:
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._failure is not None or buffer.is_ready)
                if self._failure is not None:
                    raise self._failure
                self._step_groups = buffer.take()
                # Counted after the step's groups were taken, so that only later steps remain.
                self._num_in_progress = len(buffer.staleness.live)
            finally:
                self._is_awaited = False
                self._condition.notify_all()

        return self._step_groups.prompts

    def generate(
        self,
        prompts: DataProto,
        sampling: SamplingConfig,
        step: int,
        generation: int = 0,
        scoring: Scoring | None = None,
    ) -> DataProto:
        """Returns what Rollout.generate does, for the prompts that `next` returned last: their samples, or
        their greedy responses."""
        # The buffer keeps the greedy response, if any, behind the n samples of each group.
        n = self._rules.sampling.n
        places = range(n) if sampling == self._rules.sampling else [n]
        samples = [samples[place] for samples in self._step_groups.samples for place in places]

        return self._rollout.assemble(prompts.repeat(len(places)), samples, self._weights.version)

    def drain_metrics(self) -> dict[str, float]:
        """Returns the metrics of the buffer.

        `rollout/groups_ahead` is the number of groups that had been started for later steps when the trainer
        got its samples. `rollout/num_given_up` is the number of groups in this process whose samples no
        engine could generate.
        """
        num_failed = 0 if self._buffer is None else self._buffer.num_failed
        return {
            "rollout/groups_ahead": float(self._num_in_progress),
            "rollout/num_given_up": float(num_failed),
        }

    def num_finished(self) -> int:
        """Returns the number of finished groups that wait to be trained. Any thread may call it."""
        return 0 if self._buffer is None else self._buffer.num_finished()

    def close(self) -> None:
        """Ends the thread. Requests in flight end with the replicas."""
        self._is_closed = True
        if self._thread.is_alive():
            with self._condition:
                self._condition.notify_all()
            self._thread.join(_END_S)

    # ---- for a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the loader before the first prompt that is not trained."""
        with self._exclusive():
            return self._prompts.state_dict() if self._buffer is None else self._buffer.position()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state)
        self._trained = list(state.get("trained", []))

    def finished_groups(self) -> list[FinishedGroup]:
        """Returns the finished groups that wait to be trained."""
        with self._exclusive():
            return [] if self._buffer is None else self._buffer.finished()

    def restore(self, groups: Mapping[str, FinishedGroup]) -> None:
        """Restores groups before the first step. Groups that still match the run's configuration are not
        generated again."""
        self._stored = groups

    # ---- access to the replicas

    def _started(self) -> RolloutBuffer:
        if self._buffer is None:
            # Restore before the first admission: a restored group must not be generated again.
            buffer = self._make_buffer(self._weights.version)
            buffer.restore(self._stored, self._trained)
            buffer.begin()
            self._buffer = buffer
            self._stored = {}
            self._thread.start()
        return self._buffer

    @contextmanager
    def _exclusive(self, for_weights: bool = False) -> Iterator[None]:
        """Gives the calling thread exclusive access to the replicas, with no call under way at any of them.

        for_weights: The caller pushes weights. With `drain`, requests in flight finish first.
        """
        # Nobody else uses the replicas yet, or this thread already has them.
        if self._buffer is None or self._num_inside:
            yield
            return

        # Set before the request, because the thread may see the request at any moment.
        self._finishes_first = for_weights and self._on_update is OnUpdate.drain
        self._is_requested = True

        with self._condition:
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._has_yielded or not self._thread.is_alive() or self._failure is not None
            )
            self._num_inside += 1
            try:
                yield
                # New weights admit further groups. Start them here, so that they do not depend on timing.
                if for_weights:
                    self._buffer.begin()
            finally:
                self._num_inside -= 1
                self._is_requested = self._finishes_first = self._has_yielded = False
                self._condition.notify_all()

    def _run(self) -> None:
        assert self._buffer is not None
        try:
            while not self._is_closed:
                with self._condition:
                    self._run_once(self._buffer)
                # Without a pause the thread would take the lock again before anybody else can.
                time.sleep(_REST_S)
        except BaseException as error:  # noqa: BLE001
            # The boundary of the thread: the next call of `next` raises it.
            self._failure = error

        with self._condition:
            self._condition.notify_all()

    def _run_once(self, buffer: RolloutBuffer) -> None:
        rollout = self._rollout
        scheduler = self._rollout.scheduler
        buffer.score()

        # Yield the replicas, after the requests in flight if the weight push drains them.
        if self._is_requested and not (self._finishes_first and (rollout.is_at_work or buffer.awaits_scores)):
            scheduler.pause()
            # The caller may poll the scheduler itself, and must then be able to readmit replicas.
            scheduler.may_readmit = True
            self._has_yielded = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._has_yielded or self._is_closed)
            return

        # The trainer waits for a finished step: let it take the groups before this thread polls again.
        if self._is_awaited and buffer.is_ready:
            self._condition.notify_all()
            self._condition.wait_for(lambda: not (self._is_awaited and buffer.is_ready) or self._is_closed)
            return

        # A restarted replica gets the actor's weights, which are the engines' version only while the trainer
        # waits.
        scheduler.may_readmit = self._is_awaited
        if rollout.is_at_work:
            rollout.poll(_TURN_S)
        else:
            self._condition.wait(_TURN_S)
