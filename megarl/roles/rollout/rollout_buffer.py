"""The groups that are begun ahead of training: a prompt with its samples each, from its admission to the step that trains it."""

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
from megarl.roles.rollout.finished_groups import FinishedGroup, Written
from megarl.roles.rollout.rollout import Deliver, Scoring
from megarl.roles.rollout.scheduler import EngineFaultError, GiveUp
from megarl.rollout.interface import GenerationRequest
from megarl.rollout.staleness import AdmissionLedger

_log = logging.getLogger(__name__)
_MOST_SHOWN = 5
GREEDY = SamplingConfig(n=1, temperature=0.0)


class GivenUpError(RunError):
    """Engines cannot write the samples of more prompts of a step than `rollout.max_error_rate` allows; the message has the causes."""


class Requests(Protocol):
    """See Rollout."""

    kind: type[Written]

    def requests(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0, *, first: int = 0
    ) -> list[GenerationRequest]: ...

    def begin(
        self, prompts: DataProto, place: int, requests: Sequence[GenerationRequest], deliver: Deliver, give_up: GiveUp
    ) -> Callable[[], None]: ...

    def assemble(self, prompts: DataProto, samples: Sequence[Written], version: int) -> DataProto: ...


class HasVersion(Protocol):
    """See RolloutWeights."""

    @property
    def version(self) -> int: ...


class GroupRules(NamedTuple):
    """What a group is. greedy: it has the greedy response to its prompt too (ReMax). max_without_signal: groups whose samples all score the
    same are dropped (DAPO), at most so many for a step; None: none are. max_error_rate: of a step's groups that may be given up, for an
    engine cannot write their samples."""

    sampling: SamplingConfig
    greedy: bool = False
    max_without_signal: int | None = None
    max_error_rate: float = 0.0

    @property
    def size(self) -> int:
        return self.sampling.n + self.greedy


class Taken(NamedTuple):
    """A step's groups, in the order of the data; those that were dropped among them are there too. samples: of each prompt, the greedy one
    behind the others. versions: of the weights that began each."""

    prompts: DataProto
    samples: list[list[Written]]
    versions: list[int]
    is_dropped: list[bool]


@dataclass
class _Prompts:
    """Prompts that were drawn together. serial: of the first, counted from the beginning of the data. position: of the loader before."""

    rows: DataProto
    serial: int
    position: dict[str, Any]
    requests: list[list[GenerationRequest]]  # of each


@dataclass
class _Group:
    prompts: _Prompts
    place: int  # among these
    version: int  # that began it
    samples: dict[int, Written] = field(default_factory=dict)  # by place in the group
    is_dropped: bool = False
    take_back: Callable[[], None] = lambda: None  # those that have not come

    @property
    def uid(self) -> str:
        return str(self.prompts.rows.non_tensor_batch["uid"][self.place])

    @property
    def serial(self) -> int:
        """Its place in the data."""
        return self.prompts.serial + self.place


class GroupsAhead:
    """Begins groups as the ledger allows, in the loader's order, and has them scored when they are finished. Used by one thread at a time.

    The samples of a prompt have seeds by its place in the data: where none is dropped, those of a run that generates each step's prompts
    when it is due.
    """

    def __init__(
        self, rollout: Requests, weights: HasVersion, prompts: BatchLoader, scoring: Scoring, rules: GroupRules, ledger: AdmissionLedger
    ) -> None:
        self._rollout, self._weights, self._loader, self._scoring = rollout, weights, prompts, scoring
        self._rules, self.ledger = rules, ledger
        self._prompts: _Prompts | None = None  # of which the next group is
        self._place = 0
        self._groups: dict[int, _Group] = {}  # by their number in the ledger, in order, until the step that they are for is taken
        self._unscored: list[int] = []  # finished, and not yet sent to be scored
        self._given_up: list[str] = []  # since the last step was taken, with the reasons
        self.num_given_up = 0
        self._in_judgement: dict[str, int] = {}  # by uid: their scores say whether they are trained
        self._stored: dict[str, FinishedGroup] = {}  # by uid, of the run that this one goes on from
        self._trained: dict[str, float] = {}  # uids that were trained before others that come before them, with their places in the data

    @property
    def is_ready(self) -> bool:
        """The next step's groups are there, or too many were dropped for it."""
        most = self._rules.max_without_signal
        return self.ledger.is_ready or (most is not None and self.ledger.num_dropped > most)

    @property
    def awaits_scores(self) -> bool:
        """Groups that are finished may still be dropped."""
        return bool(self._in_judgement)

    def begin(self) -> None:
        """All that may be, with the weights at hand. Called where a step's groups were taken or dropped, and where weights were pushed:
        what is begun then does not depend on time."""
        ledger, version = self.ledger, self._weights.version
        while ledger.may_admit(version):
            prompts, place = self._next_prompt()
            uid = str(prompts.rows.non_tensor_batch["uid"][place])
            if uid in self._trained:
                self._trained[uid] = prompts.serial + place
                continue
            stored = self._stored.pop(uid, None)
            if stored is not None and (ledger.may_admit(stored.version) or not ledger.in_order):
                number = ledger.admit(stored.version)
                self._groups[number] = _Group(prompts, place, stored.version, dict(enumerate(stored.samples)), stored.is_dropped)
                if stored.is_dropped:
                    ledger.drop(number)
                else:
                    self._finish(number)
            else:
                number = ledger.admit(version)
                self._groups[number] = group = _Group(prompts, place, version)
                deliver, give_up = self._deliver_to(number), partial(self._give_up, number)
                group.take_back = self._rollout.begin(prompts.rows, place, prompts.requests[place], deliver, give_up)

    def score(self) -> None:
        """Has those scored that have finished, and drops those whose scores say so. Called again and again."""
        if self._unscored and self._scoring.may_begin:
            unscored = [self._groups[number] for number in self._unscored if number in self._groups]
            self._unscored = []
            if unscored:
                self._scoring.begin(self._training_rows(unscored))
        if self._in_judgement:
            self._judge(self._scoring.scored())

    def take(self) -> Taken:
        """The next step's groups; it is ready. Begins others in their place."""
        ledger = self.ledger
        taken = set(ledger.take(self._weights.version) if ledger.is_ready else self._groups)
        last = max(taken)
        gone = [number for number, group in self._groups.items() if number in taken or (group.is_dropped and number < last)]
        groups = [self._groups.pop(number) for number in gone]
        first = min((group.serial for group in self._groups.values()), default=math.inf)
        self._trained = {uid: serial for uid, serial in self._trained.items() if serial > first}
        self._given_up = []
        self._trained |= {group.uid: group.serial for group in groups if group.serial > first}
        self.begin()
        whole = [group for group in groups if len(group.samples) == self._rules.size]
        samples = [[group.samples[place] for place in range(self._rules.size)] for group in whole]
        return Taken(_rows_of(whole), samples, [group.version for group in whole], [group.is_dropped for group in whole])

    def num_finished(self) -> int:
        """Of those that wait for their step. Any thread may ask."""
        return sum(len(group.samples) == self._rules.size for group in list(self._groups.values()))

    # ---- for a checkpoint

    def position(self) -> dict[str, Any]:
        """Of the loader, before the first prompt whose step was not taken; `trained` are uids behind it that are done all the same."""
        first = next(iter(self._groups.values()), None)
        prompts, place = (first.prompts, first.place) if first is not None else (self._prompts, self._place)
        state = self._loader.state_dict() if prompts is None else self._loader.behind(prompts.position, place)
        return {**state, "trained": list(self._trained)} if self._trained else state

    def finished(self) -> list[FinishedGroup]:
        """Those that wait for their step."""
        places = range(self._rules.size)
        finished = [group for group in self._groups.values() if len(group.samples) == len(places)]
        return [FinishedGroup(group.uid, group.version, [group.samples[place] for place in places], group.is_dropped) for group in finished]

    def restore(self, groups: Mapping[str, FinishedGroup], trained: Sequence[str]) -> None:
        """Before the first is begun. Groups are not generated anew where they are still what the run asks for; nor are the uids that are
        trained (see position)."""
        self._trained = dict.fromkeys(trained, math.inf)
        kind, size = self._rollout.kind, self._rules.size
        self._stored = {
            uid: group
            for uid, group in groups.items()
            if len(group.samples) == size and all(isinstance(sample, kind) for sample in group.samples)
        }

    # ---- parts

    def _next_prompt(self) -> tuple[_Prompts, int]:
        if self._prompts is None or self._place == len(self._prompts.rows):
            size, sampling = self.ledger.prompts_per_step, self._rules.sampling
            position, serial = self._loader.state_dict(), self._loader.num_served
            step, first = divmod(serial, size)  # of a run in which no prompt is dropped, counted from 0
            rows = self._loader.take(size - first)
            requests = _by_prompt(self._rollout.requests(rows, sampling, step + 1, first=first), sampling.n)
            if self._rules.greedy:
                greedy = self._rollout.requests(rows, GREEDY, step + 1, first=first)
                requests = [[*own, one._replace(request_id=sampling.n)] for own, one in zip(requests, greedy, strict=True)]
            self._prompts, self._place = _Prompts(rows, serial, position, requests), 0
        self._place += 1
        return self._prompts, self._place - 1

    def _deliver_to(self, number: int) -> Deliver:
        def deliver(replica: int, place: int, sample: Written) -> None:
            group, versions = self._groups[number], sample.weight_versions
            if not group.version <= versions[0] <= versions[-1] <= self._weights.version:
                raise EngineFaultError(
                    f"rollout replica {replica} wrote a sample with the weight versions {versions}; it was begun with version "
                    f"{group.version}, and the weights at hand are version {self._weights.version}"
                )
            group.samples[place] = sample
            if len(group.samples) == self._rules.size:
                self._finish(number)

        return deliver

    def _give_up(self, number: int, why: str) -> None:
        """Those behind it are trained earlier, and another is begun."""
        group = self._groups[number]
        group.take_back()
        group.is_dropped = True
        self.ledger.drop(number)
        self._given_up.append(f"prompt {group.uid}: {why}")
        self.num_given_up += 1
        _log.warning("dropped: %s", self._given_up[-1])
        if len(self._given_up) > self._rules.max_error_rate * self.ledger.prompts_per_step:
            raise GivenUpError(
                f"step {self.ledger.next_step}: {len(self._given_up)} prompts have no samples, more than "
                f"rollout.max_error_rate={self._rules.max_error_rate:g} of {self.ledger.prompts_per_step} allows:\n"
                + "\n".join(f"  {cause}" for cause in self._given_up[:_MOST_SHOWN])
            )
        self.begin()

    def _finish(self, number: int) -> None:
        self._unscored.append(number)
        if self._rules.max_without_signal is None:
            self.ledger.finish(number)
        else:
            self._in_judgement[self._groups[number].uid] = number

    def _judge(self, scored: Mapping[str, Sequence[float]]) -> None:
        for uid, scores in scored.items():
            number = self._in_judgement.pop(uid)
            if bool(rows_with_signal(torch.tensor(scores, dtype=torch.float64), np.full(len(scores), uid)).any()):
                self.ledger.finish(number)
            else:
                self._groups[number].is_dropped = True
                self.ledger.drop(number)
        if scored:
            self.begin()

    def _training_rows(self, groups: Sequence[_Group]) -> DataProto:
        n = self._rules.sampling.n
        samples = [group.samples[place] for group in groups for place in range(n)]
        return self._rollout.assemble(_rows_of(groups).repeat(n), samples, self._weights.version)


def _by_prompt(requests: Sequence[GenerationRequest], n: int) -> list[list[GenerationRequest]]:
    """The ids are the samples' places in the group."""
    numbered = [request._replace(request_id=index % n) for index, request in enumerate(requests)]
    return [numbered[start : start + n] for start in range(0, len(numbered), n)]


def _rows_of(groups: Sequence[_Group]) -> DataProto:
    """One of each group, in order."""
    parts = []
    for _, together in groupby(groups, key=lambda group: group.prompts.serial):
        of_it = list(together)
        rows, places = of_it[0].prompts.rows, [group.place for group in of_it]
        parts.append(rows if places == list(range(len(rows))) else rows.select_idxs(places))
    return parts[0] if len(parts) == 1 else DataProto.concat(parts)
