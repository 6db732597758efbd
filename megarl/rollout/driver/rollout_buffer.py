"""Rollout buffer: groups (a prompt with its samples) from their admission to the step that trains them.

    drawn -> generating -----------> finished -> taken with its step
                 |                      ^
                 +-----> undecided -----+   if samples of equal score are dropped (DAPO)
                 |           |
                 +-----------+-> dropped    an engine cannot generate a sample, or the scores are equal

The staleness controller has the groups from `generating` on. Early scores delay a step only if they decide
which groups it trains; otherwise it may also take unscored groups.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import batched, chain
from typing import TYPE_CHECKING, Any, Protocol

from megarl.batch.branches import BRANCH
from megarl.batch.data_proto import DataProto
from megarl.batch.token_rows import ROUTED_EXPERTS
from megarl.config.schema import SamplingConfig
from megarl.data.loader import RowLoader
from megarl.machine.errors import RunError, counted
from megarl.rollout.driver.rollout import check_versions
from megarl.rollout.driver.sample_rows import (
    GREEDY,
    FinishedGroup,
    Group,
    GroupRules,
    GroupState,
    RolloutOutput,
    StepGroups,
    num_samples,
    rows_of,
    sample_rows,
    select_samples,
)
from megarl.rollout.driver.scheduler import RequestScheduler
from megarl.rollout.interface import GenerationRequest
from megarl.rollout.staleness import DynamicSampling, StalenessController

if TYPE_CHECKING:
    from megarl.rollout.episodes.episode_runner import EpisodeRunner

_log = logging.getLogger(__name__)
_MOST_SHOWN = 5


class FailedPromptsError(RunError):
    """Engines cannot generate the samples of more prompts of a step than `rollout.max_error_rate` allows.

    The message has the causes.
    """


class Requests(Protocol):
    """The part of Rollout that the buffer uses."""

    def requests(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0, *, first: int = 0
    ) -> list[GenerationRequest]: ...

    @property
    def runner(self) -> RequestScheduler | EpisodeRunner: ...

    @property
    def version(self) -> int: ...

    def assemble(self, prompts: DataProto, rows: DataProto, version: int) -> DataProto: ...


class Scoring(Protocol):
    """The part of Reward that the buffer uses."""

    @property
    def may_begin(self) -> bool: ...

    def begin(self, groups: DataProto) -> None: ...

    @property
    def scores_rounds(self) -> bool: ...

    def scored(self) -> Mapping[str, Sequence[float]]: ...

    def score_round(self, groups: DataProto) -> Mapping[str, Sequence[float]]: ...


class RolloutBuffer:
    """Starts groups as the staleness controller allows, and has finished groups scored.

    One thread at a time uses the buffer, calling `score`, `begin` and the runner's `poll` in turn until the
    next step `is_ready`. The seeds of a prompt's samples depend on its position in the data. If no group is
    dropped, they are those of a run that generates each step's prompts when the step is due.

    Example::

        buffer = RolloutBuffer(rollout, prompts, scoring, rules, staleness)
        buffer.restore(stored, trained)
        buffer.expect_step()
        while not buffer.is_ready:
            buffer.score()
            buffer.begin()
            rollout.runner.poll()
        groups = buffer.take()
    """

    def __init__(
        self,
        rollout: Requests,
        prompts: RowLoader,
        scoring: Scoring,
        rules: GroupRules,
        staleness: StalenessController,
    ) -> None:
        self._rollout = rollout
        self._loader = prompts
        self._scoring = scoring
        self._rules = rules
        most = rules.max_without_signal
        # With this filter the step may train a group only when its scores show a signal.
        self._filter = None if most is None else DynamicSampling(most)
        self.staleness = staleness
        self._drawn: deque[Group] = deque()  # their prompts were drawn; they are not started
        self._failures: list[str] = []  # reasons of the failures since the last step was taken
        self.num_failed = 0
        self._stored: dict[str, FinishedGroup] = {}  # by uid, from the checkpoint that the run resumed from

        # uids that were trained out of order, with their positions in the data
        self._trained: dict[str, float] = {}

    @property
    def is_ready(self) -> bool:
        """Whether the groups of the next step are finished, or too many groups were dropped for it."""
        filtered = self._filter
        return self.staleness.is_ready or (
            filtered is not None and self.staleness.num_dropped > filtered.max_dropped
        )

    @property
    def awaits_scores(self) -> bool:
        """Whether finished groups may still be dropped because of their scores."""
        return any(group.state is GroupState.undecided for group in self.staleness.live)

    def expect_step(self) -> None:
        """Prepare for the next step, which trains the current weights. See StalenessController.expect."""
        self.staleness.expect(self._rollout.version)

    def begin(self) -> None:
        """Start all groups that the staleness controller admits with the current weights.

        Call this whenever groups may have been taken or dropped, or weights synced, and before the rollout is
        polled, so that the groups it starts do not depend on timing.
        """
        staleness = self.staleness
        version = self._rollout.version

        while staleness.may_admit(version):
            if not self._drawn:
                self._draw()
            group = self._drawn.popleft()
            uid = group.uid
            # Trained out of order before the checkpoint. Its position determines when the entry can be
            # dropped.
            if uid in self._trained:
                self._trained[uid] = group.serial
                continue
            stored = self._stored.pop(uid, None)
            if stored is not None and self._is_usable(stored, group):
                staleness.admit(group, stored.version)
                group.rows = stored.rows
                if stored.is_dropped:
                    staleness.drop(group)
                else:
                    self._finish(group)
            else:
                staleness.admit(group, version)
                group.request_numbers = self._rollout.runner.begin(
                    group.requests,
                    [partial(self._deliver, group, index) for index in range(len(group.requests))],
                    on_failure=partial(self._fail, group),
                )

    def score(self) -> None:
        """Send finished groups for scoring, and drop groups whose scores carry no signal.

        Call this repeatedly.
        """
        scoring = self._scoring
        live = self.staleness.live
        unscored = [group for group in live if group.is_unscored]

        # If nothing runs ahead, the step's scores are requested as soon as generation is idle.
        is_early = self.staleness.runs_ahead or self._rollout.runner.is_at_work or self._filter is not None
        if unscored and is_early and scoring.may_begin:
            for group in unscored:
                group.is_unscored = False
            scoring.begin(self._training_rows(unscored))

        undecided = [group for group in live if group.state is GroupState.undecided]
        if not undecided:
            return

        # A reward model may need the engines' devices, so it scores when no group is being generated.
        if not scoring.scores_rounds:
            self._decide(scoring.scored(), undecided)
        elif all(group.state is not GroupState.generating for group in live):
            self._decide(scoring.score_round(self._training_rows(undecided)), undecided)

    def take(self) -> StepGroups:
        """Return the groups of the next step, which must be ready.

        Raises:
            NoSignalError: Too many groups were dropped for it.
        """
        staleness = self.staleness
        if not staleness.is_ready:
            assert self._filter is not None, "it is ready"
            raise self._filter.error(
                staleness.next_step,
                staleness.prompts_per_step,
                staleness.num_finished,
                staleness.num_dropped,
            )
        num_rounds = staleness.num_rounds
        # Groups that leave with the taken ones remain visible in the step's metrics.
        groups = staleness.take(self._rollout.version)

        # A trained prompt after an open group must be skipped when the data is read again from there. A
        # prompt with unknown position has not been served yet.
        first = self._first_open_serial()
        self._trained = {
            uid: serial for uid, serial in self._trained.items() if serial > first or serial == math.inf
        }
        self._trained |= {group.uid: group.serial for group in groups if group.serial > first}
        self._failures = []
        if self._filter is not None:
            self._filter.end_step()

        # A group that failed or was cancelled has missing samples and cannot become rows.
        whole = [group for group in groups if group.rows is not None]
        decided = (GroupState.taken, GroupState.dropped)
        return StepGroups(
            rows_of(whole),
            DataProto.concat([group.rows for group in whole if group.rows is not None]),
            [group.version for group in whole],
            [group.state is GroupState.taken for group in whole],
            num_surplus=sum(group.state not in decided for group in whole),
            num_rounds=num_rounds,
        )

    def serve(self, count: int) -> DataProto:
        """Return additional prompts, which are not generated. A resumed run does not serve them again."""
        serial = self._loader.num_served
        rows = self._loader.take(count)
        if self._first_open_serial() < serial:
            uids = map(str, rows.non_tensor_batch["uid"])
            self._trained |= {uid: serial + place for place, uid in enumerate(uids)}
        return rows

    def num_finished(self) -> int:
        """Return the number of finished groups that wait for their step. Thread-safe."""
        return sum(group.rows is not None for group in self._groups())

    # ---- for checkpoints

    def position(self) -> dict[str, Any]:
        """Return the state of the loader before the first prompt whose step was not taken.

        `trained` lists the uids of later prompts that were already trained.
        """
        # The oldest open group decides: everything from there on must be served again.
        opened = self._first_open()
        state = (
            self._loader.state_dict()
            if opened is None
            else self._loader.state_at(opened.position, opened.place)
        )

        return {**state, "trained": list(self._trained)} if self._trained else state

    def finished(self) -> list[FinishedGroup]:
        """Returns the finished groups that wait for their step."""
        return [
            FinishedGroup(group.uid, group.version, group.rows, group.state is GroupState.dropped)
            for group in self._groups()
            if group.rows is not None
        ]

    def restore(self, groups: Mapping[str, FinishedGroup], trained: Sequence[str]) -> None:
        """Restore the state of a checkpoint before the first group is started.

        Groups that still match the run's configuration are not generated again, nor are prompts in `trained`
        (see position).
        """
        # Their positions are unknown until the loader serves them again.
        self._trained = dict.fromkeys(trained, math.inf)
        self._stored = dict(groups)

    # ---- internals

    def _groups(self) -> list[Group]:
        """Return the groups that were admitted and whose step was not taken, in order."""
        return sorted([*self.staleness.live, *self.staleness.dropped], key=lambda group: group.number)

    def _is_usable(self, stored: FinishedGroup, group: Group) -> bool:
        """Return whether samples of a checkpoint can take the place of those of a group."""
        # Groups of another size or kind belong to another configuration.
        rows = stored.rows
        first = group.requests[0]
        are_episodes = "episode_end" in rows.non_tensor_batch
        has_routes = ROUTED_EXPERTS in rows.ragged
        if are_episodes != (first.task is not None) or has_routes != first.sampling.with_routes:
            return False
        # Conversations of an agent program have other columns than an episode of tools or an environment.
        if (BRANCH in rows.non_tensor_batch) != self._rules.have_branches:
            return False
        if num_samples(rows) != self._rules.size:
            return False
        # A stored group keeps its age, and may be too old for its step.
        return self.staleness.may_admit(stored.version) or not self.staleness.in_order

    def _first_open(self) -> Group | None:
        """Return the group of the first drawn prompt whose step was not taken."""
        return next(chain(self._groups(), self._drawn), None)

    def _first_open_serial(self) -> float:
        opened = self._first_open()
        return math.inf if opened is None else opened.serial

    def _draw(self) -> None:
        """Draw prompts up to the end of a step, or of a round, and plan their requests."""
        staleness = self.staleness
        rules = self._rules
        position = self._loader.position
        serial = self._loader.num_served

        # A request has the seed of its position in the data, as if no prompt were dropped, or in the round.
        if staleness.runs_ahead:
            steps_before, place = divmod(serial, staleness.prompts_per_step)
            step = steps_before + 1
            seeds = {"generation": 0, "first": place}
            count = staleness.prompts_per_step - place
        else:
            step = staleness.next_step
            seeds = {"generation": staleness.num_rounds - 1, "first": 0}
            count = staleness.num_missing

        rows = self._loader.take(count)
        sampled = self._rollout.requests(rows, rules.sampling, step, **seeds)
        requests = list(batched(sampled, rules.sampling.n))
        if rules.greedy:
            # The greedy response comes after the n samples.
            greedy = self._rollout.requests(rows, GREEDY, step, **seeds)
            requests = [(*own, one) for own, one in zip(requests, greedy, strict=True)]

        self._drawn.extend(
            Group(rows, place, position, serial + place, of_prompt)
            for place, of_prompt in enumerate(requests)
        )

    def _deliver(self, group: Group, index: int, replica: int, sample: RolloutOutput) -> None:
        # A sample may span several weight syncs, but never weights older than its start or not yet synced.
        check_versions(replica, sample, oldest=group.version, newest=self._rollout.version)

        group.samples[index] = sample
        if len(group.samples) == self._rules.size:
            # Only the rows are kept, because the samples would take the same memory again.
            group.rows = sample_rows([group.samples[place] for place in range(self._rules.size)])
            group.samples = {}
            self._finish(group)

    def _fail(self, group: Group, why: str) -> None:
        """Drop a group whose samples cannot be generated. Another group is started instead."""
        # Cancel the other samples of the group, since an incomplete group cannot be trained.
        self._rollout.runner.cancel(group.request_numbers)
        self.staleness.drop(group)
        self._failures.append(f"prompt {group.uid}: {why}")
        self.num_failed += 1
        _log.warning("dropped: %s", self._failures[-1])

        if len(self._failures) > self._rules.max_error_rate * self.staleness.prompts_per_step:
            raise FailedPromptsError(
                f"step {self.staleness.next_step}: there are no samples for "
                f"{counted(len(self._failures), 'prompt')}, more than "
                f"rollout.max_error_rate={self._rules.max_error_rate:g} of "
                f"{self.staleness.prompts_per_step} allows:\n"
                + "\n".join(f"  {cause}" for cause in self._failures[:_MOST_SHOWN])
            )

    def _finish(self, group: Group) -> None:
        group.is_unscored = self._filter is not None or self._rules.scores_early
        if self._filter is None:
            self.staleness.finish(group)
        else:
            group.state = GroupState.undecided

    def _decide(self, scored: Mapping[str, Sequence[float]], undecided: Sequence[Group]) -> None:
        assert self._filter is not None, "a group is undecided"
        groups = {group.uid: group for group in undecided}
        for uid, scores in scored.items():
            group = groups[uid]
            group.is_unscored = False  # a round is scored at once
            if self._filter.is_trained(uid, scores):
                self.staleness.finish(group)
            else:
                # Later groups move up: the step trains the next group that has a signal.
                self.staleness.drop(group)

    def _training_rows(self, groups: Sequence[Group]) -> DataProto:
        n = self._rules.sampling.n
        rows = DataProto.concat([group.rows for group in groups if group.rows is not None])
        if self._rules.greedy:
            rows = select_samples(rows, [place for place in range(num_samples(rows)) if place % (n + 1) < n])
        return self._rollout.assemble(rows_of(groups), rows, self._rollout.version)
