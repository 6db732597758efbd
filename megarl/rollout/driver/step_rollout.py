"""Rollout for the training loop.

Synchronous and asynchronous generation use the same rollout buffer. The trainer's thread fills it on demand,
or, ahead of training, a generation thread also fills it. The thread that has the turn uses the buffer and the
replicas alone:

    trainer's thread:    take | trains ... | exclusive: syncs weights | trains ... | take
    generation thread:        | generates  |                          | generates  |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from megarl.batch.branches import last_rows
from megarl.batch.data_proto import DataProto
from megarl.config.schema import OnUpdate, SamplingConfig
from megarl.data.loader import RowLoader
from megarl.rollout.driver.rollout import Rollout
from megarl.rollout.driver.rollout_buffer import RolloutBuffer, Scoring
from megarl.rollout.driver.rollout_weights import RolloutWeights
from megarl.rollout.driver.sample_rows import GREEDY, FinishedGroup, GroupRules, StepGroups, select_samples
from megarl.rollout.staleness import StalenessController

_WAIT_S = 0.005  # between two polls for the scores that decide whether a group is trained
_TURN_S = 0.02  # the longest time for which the generation thread waits for engines
_END_S = 30.0


class StepRollout:
    """Prompt loader and rollout of the training loop.

    `next_step` waits for the groups of the next step; `samples_of` and `greedy_of` return their samples. In a
    user's own loop `next` returns only their prompts, and `generate` finds their samples.

    Args:
        weights: Weight sync of its engines.
        scoring: Scores finished groups.
        rules: Composition of a group.
        on_update: What happens to requests in flight at a weight sync.
        make_staleness: Builds the staleness controller for a run whose weights have the given version. With a
            `max_staleness` of 0, samples are generated during `next_step`; above 0, also between two calls.
    """

    def __init__(
        self,
        rollout: Rollout,
        weights: RolloutWeights,
        prompts: RowLoader,
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

        # The buffer needs the version of the first weight sync, which is not known before the first step.
        self._make_buffer = lambda version: RolloutBuffer(
            rollout, prompts, scoring, self._rules, make_staleness(version)
        )
        self._buffer: RolloutBuffer | None = None
        self._thread: GenerationThread | None = None
        self._stored: Mapping[str, FinishedGroup] = {}
        self._trained: list[str] = []
        # The scores of the samples of a step by the uid of their prompt, until the step ends.
        self._scores: dict[int, dict[str, list[float]]] = {}

        # The groups that were returned last.
        self.taken = StepGroups(DataProto(), DataProto(), [], [])

    # ---- for the trainer

    def next_step(self) -> StepGroups:
        """Wait for all samples of the next step and return its groups. Raises errors of generation."""
        buffer = self._started()
        self.taken = self._thread.take() if self._thread is not None else self._generate_step(buffer)
        return self.taken

    def samples_of(self, groups: StepGroups) -> DataProto:
        """Return the samples of groups without their greedy responses, as Rollout.generate does."""
        return self._assemble(groups, range(self._rules.sampling.n))

    def greedy_of(self, groups: StepGroups) -> DataProto:
        """Return the greedy responses of groups, which the rules must request."""
        return self._assemble(groups, range(self._rules.sampling.n, self._rules.size))

    def __next__(self) -> DataProto:
        """Wait as `next_step` does and return the prompts of the step, for a loop that calls `generate`."""
        return self.next_step().trained.prompts

    def generate(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0
    ) -> DataProto:
        """Return the result of Rollout.generate.

        Prompts that `next` returned already have their samples, and their greedy responses if the rules
        request them. Others are generated now.
        """
        rules = self._rules
        rows = {str(uid): row for row, uid in enumerate(self.taken.prompts.non_tensor_batch.get("uid", ()))}
        of_prompts = [rows.get(str(uid)) for uid in prompts.non_tensor_batch["uid"]]

        # The greedy response, if any, follows the n samples of each group.
        places = range(rules.sampling.n) if sampling == rules.sampling else range(0)
        if rules.greedy and sampling == GREEDY:
            places = range(rules.sampling.n, rules.size)
        if not places or None in of_prompts:
            return self._rollout.generate(prompts, sampling, step, generation)

        groups = self.taken.select([row for row in of_prompts if row is not None])
        return self._assemble(groups._replace(prompts=prompts), places)

    def take(self, count: int) -> DataProto:
        """Return additional prompts, without samples. A resumed run does not serve them again."""
        with self._exclusive():
            return self._prompts.take(count) if self._buffer is None else self._buffer.serve(count)

    def record_scores(self, batch: DataProto, step: int) -> None:
        """Record the scores of a step's samples, from which `end_step` updates the loader.

        A sample whose scoring failed has none. A step that is repeated records the same scores again.

        Raises:
            ValueError: A uid is not that of a prompt of the loader, in a user's own loop.
        """
        if not self._prompts.reads_scores:
            return

        episodes = last_rows(batch)
        arrays = episodes.non_tensor_batch
        are_scored = episodes.tensors.get("is_scored", torch.ones(len(episodes), dtype=torch.bool))

        of_step: dict[str, list[float]] = {}
        for uid, score, is_scored in zip(arrays["uid"], arrays["score"], are_scored.tolist(), strict=True):
            if is_scored:
                of_step.setdefault(str(uid), []).append(float(score))

        self._prompts.check_uids(of_step)
        self._scores.setdefault(step, {}).update(of_step)

    def end_step(self, step: int) -> None:
        """Update the loader by the scores of a step, once, however often the step was repeated.

        Scores that were recorded for other steps are those of repeated steps, and are ignored.
        """
        scores = self._scores.pop(step, None)
        self._scores.clear()
        if scores:
            # Between two iterations of the generation thread, so that timing does not decide which rows are
            # drawn before the update.
            with self._exclusive():
                self._prompts.update(scores)

    def drain_metrics(self, groups: StepGroups) -> dict[str, float]:
        """Return the metrics of the buffer and of the loader (see its `metrics`) for a step of these groups.

        `rollout/groups_ahead` is the number of groups that had been started for later steps when the trainer
        got its samples, in runs that generate ahead. `rollout/num_given_up` is the number of groups in this
        process whose samples no engine could generate, if groups may be dropped.
        """
        num_failed = 0 if self._buffer is None else self._buffer.num_failed
        metrics: dict[str, float] = {}
        if self._prompts.reads_scores:
            # The generation thread may draw rows, and a user's sampler need not be thread-safe.
            with self._exclusive():
                metrics |= self._prompts.metrics()
        if self._thread is not None:
            metrics["rollout/groups_ahead"] = float(groups.num_ahead)
        if self._thread is not None or self._rules.max_error_rate:
            metrics["rollout/num_given_up"] = float(num_failed)
        return metrics

    def num_finished(self) -> int:
        """Return the number of finished groups that wait to be trained. Thread-safe."""
        return 0 if self._buffer is None else self._buffer.num_finished()

    def close(self) -> None:
        """Stop generation. Requests in flight end with the replicas."""
        if self._thread is not None:
            self._thread.stop()

    # ---- for checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader before the first prompt that is not trained."""
        with self._exclusive():
            return self._prompts.state_dict() if self._buffer is None else self._buffer.position()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state)
        self._trained = list(state.get("trained", []))

    def finished_groups(self) -> list[FinishedGroup]:
        """Return the finished groups that wait to be trained."""
        with self._exclusive():
            return [] if self._buffer is None else self._buffer.finished()

    def restore(self, groups: Mapping[str, FinishedGroup]) -> None:
        """Restore groups before the first step.

        Groups that still match the run's configuration are not generated again.
        """
        self._stored = groups

    # ---- internals

    def _assemble(self, groups: StepGroups, places: range) -> DataProto:
        """Return the samples at these places of each group, in consecutive rows."""
        rows = groups.rows
        size = self._rules.size
        if len(places) < size:
            numbers = [size * group + place for group in range(len(groups.prompts)) for place in places]
            rows = select_samples(rows, numbers)
        return self._rollout.assemble(groups.prompts, rows, self._weights.actor_version)

    def _started(self) -> RolloutBuffer:
        if self._buffer is None:
            # Restore before the first admission: a restored group must not be generated again.
            self._buffer = buffer = self._make_buffer(self._weights.version)
            buffer.restore(self._stored, self._trained)
            self._stored = {}
            if buffer.staleness.runs_ahead:
                self._thread = GenerationThread(self._rollout, buffer, self._on_update)
                self._rollout.share_through(self._thread.exclusive)
        return self._buffer

    def _generate_step(self, buffer: RolloutBuffer) -> StepGroups:
        runner = self._rollout.runner
        buffer.expect_step()
        while True:
            buffer.score()
            if buffer.is_ready:
                return buffer.take()

            # Idle engines may sleep, or may have no weights since a restart: start a round.
            if not runner.is_at_work:
                self._weights.bring_in()
            buffer.begin()
            if buffer.awaits_scores and not runner.is_at_work:
                time.sleep(_WAIT_S)
            else:
                runner.poll()

    def _exclusive(self) -> AbstractContextManager[None]:
        return nullcontext() if self._thread is None else self._thread.exclusive()


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
                self._generate_until(
                    lambda: not (self._runner.is_at_work or self._buffer.awaits_scores), may_readmit=False
                )
            self._scheduler.pause()
            # The trainer may poll the scheduler itself, and must then be able to readmit replicas.
            self._scheduler.may_readmit = True
        except Exception as error:  # noqa: BLE001
            self._failure = error

    def _generate_until(self, is_enough: Callable[[], bool], *, may_readmit: bool) -> None:
        while not self._iterate(is_enough, may_readmit=may_readmit):
            if not self._runner.is_at_work:
                time.sleep(_TURN_S)

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
