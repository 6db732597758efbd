"""The rollout buffer: groups (a prompt with its samples) from their admission to the step that trains
them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from megarl.algorithms.groups import rows_with_signal
from megarl.batch.data_proto import DataProto
from megarl.config.schema import SamplingConfig
from megarl.data.loader import BatchLoader
from megarl.machine.errors import RunError
from megarl.roles.rollout.finished_groups import FinishedGroup, RolloutOutput
from megarl.roles.rollout.rollout import Deliver, Scoring, check_versions
from megarl.roles.rollout.scheduler import OnFailure
from megarl.rollout.interface import GenerationRequest
from megarl.rollout.staleness import StalenessController

_log = logging.getLogger(__name__)
_MOST_SHOWN = 5
GREEDY = SamplingConfig(n=1, temperature=0.0)


class FailedPromptsError(RunError):
    """Engines cannot generate the samples of more prompts of a step than `rollout.max_error_rate` allows. The
    message has the causes."""


class Requests(Protocol):
    """The part of Rollout that the buffer uses."""

    kind: type[RolloutOutput]

    def requests(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0, *, first: int = 0
    ) -> list[GenerationRequest]: ...

    def begin(
        self,
        prompts: DataProto,
        rows: Sequence[int],
        requests: Sequence[GenerationRequest],
        deliver: Deliver,
        on_failure: OnFailure,
    ) -> Callable[[], None]: ...

    def assemble(self, prompts: DataProto, samples: Sequence[RolloutOutput], version: int) -> DataProto: ...


class HasVersion(Protocol):
    """The part of RolloutWeights that the buffer uses."""

    @property
    def version(self) -> int: ...


class GroupRules(NamedTuple):
    """The composition of a group, and when it is dropped.

    Attributes:
        sampling: How its samples are drawn.
        greedy: Whether it also contains the greedy response to its prompt (ReMax).
        max_without_signal: The most groups that may be dropped for a step because all their samples have the
            same score (DAPO). None disables this filter.
        max_error_rate: The share of a step's groups that may be dropped because an engine cannot generate
            their samples.
    """

    sampling: SamplingConfig
    greedy: bool = False
    max_without_signal: int | None = None
    max_error_rate: float = 0.0

    @property
    def size(self) -> int:
        return self.sampling.n + self.greedy


class StepGroups(NamedTuple):
    """The groups of a step in the order of the data, including those that were dropped among them.

    Attributes:
        prompts: The prompts, one row per group.
        samples: The samples of each prompt; the greedy one comes last.
        versions: The version of the weights that started each group.
        is_dropped: Whether each group is not trained.
    """

    prompts: DataProto
    samples: list[list[RolloutOutput]]
    versions: list[int]
    is_dropped: list[bool]


@dataclass
class _Prompts:
    """Prompts that were drawn together.

    Attributes:
        rows: The prompts.
        serial: The position of the first prompt, counted from the beginning of the data.
        position: The state of the loader before they were drawn.
        requests: The requests of each prompt.
    """

    rows: DataProto
    serial: int
    position: dict[str, Any]
    requests: list[list[GenerationRequest]]


@dataclass
class _Group:
    prompts: _Prompts
    place: int  # index among `prompts`
    version: int  # the version of the weights that started it
    samples: dict[int, RolloutOutput] = field(default_factory=dict)  # by index in the group
    is_dropped: bool = False
    cancel: Callable[[], None] = lambda: None  # cancels the samples that are missing

    @property
    def uid(self) -> str:
        return str(self.prompts.rows.non_tensor_batch["uid"][self.place])

    @property
    def serial(self) -> int:
        """Its position in the data."""
        return self.prompts.serial + self.place


class RolloutBuffer:
    """Starts groups in the loader's order, as the staleness controller allows, and has finished groups
    scored.

    It is used by one thread at a time. The seeds of a prompt's samples depend on its position in the data. If
    no group is dropped, they are those of a run that generates each step's prompts when the step is due.
    """

    def __init__(
        self,
        rollout: Requests,
        weights: HasVersion,
        prompts: BatchLoader,
        scoring: Scoring,
        rules: GroupRules,
        staleness: StalenessController,
    ) -> None:
        self._rollout = rollout
        self._weights = weights
        self._loader = prompts
        self._scoring = scoring
        self._rules = rules
        self.staleness = staleness
        self._prompts: _Prompts | None = None  # contains the prompt of the next group
        self._place = 0

        # by their number in the staleness controller, until their step is taken
        self._groups: dict[int, _Group] = {}
        self._unscored: list[int] = []  # finished and not yet sent to be scored
        self._failures: list[str] = []  # reasons of the failures since the last step was taken
        self.num_failed = 0

        # by uid: groups whose scores decide whether they are trained
        self._awaiting_scores: dict[str, int] = {}
        self._stored: dict[str, FinishedGroup] = {}  # by uid, from the checkpoint that the run resumed from

        # uids that were trained out of order, with their positions in the data
        self._trained: dict[str, float] = {}

    @property
    def is_ready(self) -> bool:
        """Whether the groups of the next step are finished, or too many were dropped for it."""
        most = self._rules.max_without_signal
        return self.staleness.is_ready or (most is not None and self.staleness.num_dropped > most)

    @property
    def awaits_scores(self) -> bool:
        """Whether finished groups may still be dropped because of their scores."""
        return bool(self._awaiting_scores)

    def begin(self) -> None:
        """Starts all groups that the staleness controller admits with the current weights.

        It is called after groups were taken or dropped and after weights were pushed, so that what it starts
        does not depend on timing.
        """
        staleness = self.staleness
        version = self._weights.version

        while staleness.may_admit(version):
            prompts, place = self._next_prompt()
            uid = str(prompts.rows.non_tensor_batch["uid"][place])
            # Trained out of order before the checkpoint. Its position tells when the entry can be dropped.
            if uid in self._trained:
                self._trained[uid] = prompts.serial + place
                continue
            # A stored group keeps its age; if it is too old for its step, it is generated again.
            stored = self._stored.pop(uid, None)
            if stored is not None and (staleness.may_admit(stored.version) or not staleness.in_order):
                number = staleness.admit(stored.version)
                self._groups[number] = _Group(
                    prompts, place, stored.version, dict(enumerate(stored.samples)), stored.is_dropped
                )
                if stored.is_dropped:
                    staleness.drop(number)
                else:
                    self._finish(number)
            else:
                # Admit before the request starts: the callbacks need the number of the group.
                number = staleness.admit(version)
                self._groups[number] = group = _Group(prompts, place, version)
                deliver = self._deliver_to(number)
                on_failure = partial(self._fail, number)
                requests = prompts.requests[place]
                group.cancel = self._rollout.begin(
                    prompts.rows, [place] * len(requests), requests, deliver, on_failure
                )

    def score(self) -> None:
        """Sends finished groups to be scored, and drops groups whose scores carry no signal. Call it
        repeatedly."""
        if self._unscored and self._scoring.may_begin:
            # A group may have been taken or dropped since it was finished.
            unscored = [self._groups[number] for number in self._unscored if number in self._groups]
            self._unscored = []
            if unscored:
                self._scoring.begin(self._training_rows(unscored))
        if self._awaiting_scores:
            self._filter(self._scoring.scored())

    def take(self) -> StepGroups:
        """Returns the groups of the next step, which must be ready, and starts new groups."""
        staleness = self.staleness

        # If too many groups were dropped, the step is not ready; return all, so that the trainer can explain.
        taken = set(staleness.take(self._weights.version) if staleness.is_ready else self._groups)
        last = max(taken)

        # Dropped groups among the taken ones leave with them and remain visible in the step's metrics.
        gone = [
            number
            for number, group in self._groups.items()
            if number in taken or (group.is_dropped and number < last)
        ]
        groups = [self._groups.pop(number) for number in gone]

        # A trained prompt behind an open group must be skipped when the data are read again from there.
        first = min((group.serial for group in self._groups.values()), default=math.inf)
        self._trained = {uid: serial for uid, serial in self._trained.items() if serial > first}
        self._failures = []
        self._trained |= {group.uid: group.serial for group in groups if group.serial > first}

        # The places of the taken groups are free now.
        self.begin()

        # A group that failed or was cancelled has missing samples and cannot become rows.
        whole = [group for group in groups if len(group.samples) == self._rules.size]
        samples = [[group.samples[place] for place in range(self._rules.size)] for group in whole]

        return StepGroups(
            _rows_of(whole),
            samples,
            [group.version for group in whole],
            [group.is_dropped for group in whole],
        )

    def num_finished(self) -> int:
        """Returns the number of finished groups that wait for their step. Any thread may call it."""
        return sum(len(group.samples) == self._rules.size for group in list(self._groups.values()))

    # ---- for a checkpoint

    def position(self) -> dict[str, Any]:
        """Returns the state of the loader before the first prompt whose step was not taken.

        `trained` lists the uids of later prompts that were trained already.
        """
        # The oldest open group decides: everything from there on has to be served again.
        first = next(iter(self._groups.values()), None)
        prompts, place = (first.prompts, first.place) if first is not None else (self._prompts, self._place)
        state = self._loader.state_dict() if prompts is None else self._loader.behind(prompts.position, place)

        return {**state, "trained": list(self._trained)} if self._trained else state

    def finished(self) -> list[FinishedGroup]:
        """Returns the finished groups that wait for their step."""
        places = range(self._rules.size)
        finished = [group for group in self._groups.values() if len(group.samples) == len(places)]
        return [
            FinishedGroup(
                group.uid, group.version, [group.samples[place] for place in places], group.is_dropped
            )
            for group in finished
        ]

    def restore(self, groups: Mapping[str, FinishedGroup], trained: Sequence[str]) -> None:
        """Restores the state of a checkpoint before the first group is started.

        Groups that still match the run's configuration are not generated again, nor are prompts in `trained`
        (see position).
        """
        # Their positions are unknown until the loader serves them again.
        self._trained = dict.fromkeys(trained, math.inf)

        # A group of another size or kind belongs to another configuration, and is generated again.
        kind = self._rollout.kind
        size = self._rules.size
        self._stored = {
            uid: group
            for uid, group in groups.items()
            if len(group.samples) == size and all(isinstance(sample, kind) for sample in group.samples)
        }

    # ---- parts

    def _next_prompt(self) -> tuple[_Prompts, int]:
        if self._prompts is None or self._place == len(self._prompts.rows):
            size = self.staleness.prompts_per_step
            sampling = self._rules.sampling
            position = self._loader.state_dict()
            serial = self._loader.num_served
            # Draw only up to the end of the step, so that each request has the seed of its position in it.
            step, first = divmod(serial, size)  # as in a run that drops no prompt, counted from 0
            rows = self._loader.take(size - first)
            requests = _by_prompt(self._rollout.requests(rows, sampling, step + 1, first=first), sampling.n)
            if self._rules.greedy:
                # The greedy response takes the index behind the n samples.
                greedy = self._rollout.requests(rows, GREEDY, step + 1, first=first)
                requests = [
                    [*own, one._replace(request_id=sampling.n)]
                    for own, one in zip(requests, greedy, strict=True)
                ]
            self._prompts = _Prompts(rows, serial, position, requests)
            self._place = 0

        self._place += 1
        return self._prompts, self._place - 1

    def _deliver_to(self, number: int) -> Deliver:
        def deliver(replica: int, place: int, sample: RolloutOutput) -> None:
            group = self._groups[number]
            # A sample may span several pushes, but never weights older than its start or not yet pushed.
            check_versions(replica, sample, oldest=group.version, newest=self._weights.version)
            group.samples[place] = sample
            if len(group.samples) == self._rules.size:
                self._finish(number)

        return deliver

    def _fail(self, number: int, why: str) -> None:
        """Drops a group whose samples cannot be generated. Later groups are trained earlier, and another
        group is started."""
        # Cancel the other samples of the group, since an incomplete group cannot be trained.
        group = self._groups[number]
        group.cancel()
        group.is_dropped = True
        self.staleness.drop(number)
        self._failures.append(f"prompt {group.uid}: {why}")
        self.num_failed += 1
        _log.warning("dropped: %s", self._failures[-1])

        if len(self._failures) > self._rules.max_error_rate * self.staleness.prompts_per_step:
            raise FailedPromptsError(
                f"step {self.staleness.next_step}: {len(self._failures)} prompts have no samples, more than "
                f"rollout.max_error_rate={self._rules.max_error_rate:g} of "
                f"{self.staleness.prompts_per_step} allows:\n"
                + "\n".join(f"  {cause}" for cause in self._failures[:_MOST_SHOWN])
            )

        # The drop has made room for another group.
        self.begin()

    def _finish(self, number: int) -> None:
        self._unscored.append(number)

        # With a filter the group is finished only when its scores show a signal.
        if self._rules.max_without_signal is None:
            self.staleness.finish(number)
        else:
            self._awaiting_scores[self._groups[number].uid] = number

    def _filter(self, scored: Mapping[str, Sequence[float]]) -> None:
        for uid, scores in scored.items():
            number = self._awaiting_scores.pop(uid)
            if bool(
                rows_with_signal(torch.tensor(scores, dtype=torch.float64), np.full(len(scores), uid)).any()
            ):
                self.staleness.finish(number)
            else:
                # Later groups move up: the step trains the next group that has a signal.
                self._groups[number].is_dropped = True
                self.staleness.drop(number)
        if scored:
            self.begin()

    def _training_rows(self, groups: Sequence[_Group]) -> DataProto:
        n = self._rules.sampling.n
        samples = [group.samples[place] for group in groups for place in range(n)]
        return self._rollout.assemble(_rows_of(groups).repeat(n), samples, self._weights.version)


def _by_prompt(requests: Sequence[GenerationRequest], n: int) -> list[list[GenerationRequest]]:
    """Returns the requests of each prompt. Their ids become indices in the group."""
    numbered = [request._replace(request_id=index % n) for index, request in enumerate(requests)]
    return [numbered[start : start + n] for start in range(0, len(numbered), n)]


def _rows_of(groups: Sequence[_Group]) -> DataProto:
    """Returns the prompts of the groups, one row per group, in order."""
    parts = []

    # Groups of the same drawn batch share one selection.
    for _, together in groupby(groups, key=lambda group: group.prompts.serial):
        of_it = list(together)
        rows = of_it[0].prompts.rows
        places = [group.place for group in of_it]
        parts.append(rows if places == list(range(len(rows))) else rows.select_idxs(places))

    return parts[0] if len(parts) == 1 else DataProto.concat(parts)
