"""Generation that runs ahead of training, in a thread of the driver: groups are begun as the ledger allows, while roles train."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megarl.batch.data_proto import DataProto
from megarl.config.schema import OnUpdate, SamplingConfig
from megarl.data.loader import BatchLoader
from megarl.roles.finished_groups import FinishedGroup
from megarl.roles.pump import EngineFaultError, Pump
from megarl.roles.rollout import Rollout
from megarl.roles.weights import RolloutWeights
from megarl.rollout.interface import FinishedRequest, GenerationRequest, Sample
from megarl.rollout.ledger import AdmissionLedger

_TURN_S = 0.02  # after which the thread looks whether somebody else wants the replicas
_REST_S = 0.0005
_END_S = 30.0


@dataclass
class _Step:
    """The prompts of a step. position: of the loader before them. requests: of their samples, once the first are begun."""

    prompts: DataProto
    position: dict[str, Any]
    requests: list[GenerationRequest] = field(default_factory=list)


@dataclass
class _Group:
    uid: str
    version: int  # that began it
    samples: dict[int, Sample] = field(default_factory=dict)  # by place in the group


class GenerationAhead:
    """Stands in the loop for the loader and for the rollout: `next` gives the prompts of the next step, `generate` their samples, most of
    which are there already.

    They are the loader's next prompts, in its order, and have the seeds that they would have in a run that generates each step's when it
    is due. The replicas have one user at a time: the thread is it, and gives way to others, who ask by `Replicas.alone`.
    make_ledger: of a run whose next step and version of weights are these.
    """

    def __init__(
        self,
        rollout: Rollout,
        weights: RolloutWeights,
        prompts: BatchLoader,
        sampling: SamplingConfig,
        on_update: OnUpdate,
        make_ledger: Callable[[int, int], AdmissionLedger],
    ) -> None:
        self._rollout, self._weights, self._prompts, self._sampling = rollout, weights, prompts, sampling
        self._on_update, self._make_ledger = on_update, make_ledger
        self._ledger: AdmissionLedger | None = None
        self._steps: list[_Step] = []  # that are not trained, the next first
        self._groups: dict[int, _Group] = {}  # by their number in the ledger
        self._stored: dict[str, FinishedGroup] = {}  # by uid, of the run that this one goes on from
        self._num_ahead = 0
        self._turns = threading.Condition()  # who holds it has the replicas
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._failure: BaseException | None = None
        self._is_closed = self._is_awaited = False
        self._num_inside = 0  # times that the trainer's thread is in `_alone`
        self._is_asked = self._finishes_first = self._has_given_way = False
        rollout.give_way_by(self._alone)

    # ---- for the trainer

    def __next__(self) -> DataProto:
        """The prompts of the next step."""
        with self._alone():
            return self._step(0).prompts

    def generate(self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0) -> DataProto:
        """As Rollout.generate, for what `next` gave last; waits for what is not there yet. What is not a step's training samples is
        generated now, before all that waits. Raises what the generation of any has raised."""
        if sampling != self._sampling:
            return self._rollout.generate(prompts, sampling, step, generation)
        if self._ledger is None:
            self._ledger = self._make_ledger(step, self._weights.version)
            self._begin_groups(self._ledger)
            self._thread.start()
        ledger = self._ledger
        self._is_awaited = True
        with self._turns:
            try:
                self._turns.notify_all()
                self._turns.wait_for(lambda: self._failure is not None or ledger.is_ready)
                if self._failure is not None:
                    raise self._failure
                version = self._weights.version
                groups = [self._groups.pop(number) for number in ledger.take(version)]
                self._num_ahead = len(ledger.live)
                self._steps.pop(0)
                self._begin_groups(ledger)
            finally:
                self._is_awaited = False
                self._turns.notify_all()
        samples = [group.samples[place] for group in groups for place in range(sampling.n)]
        return self._rollout.assemble(prompts.repeat(sampling.n), samples, version)

    def drain_metrics(self) -> dict[str, float]:
        """`rollout/groups_ahead`: that were begun for later steps when the trainer went on."""
        return {"rollout/groups_ahead": float(self._num_ahead)}

    def num_finished(self) -> int:
        """Of the groups that wait to be trained. Any thread may ask."""
        return sum(len(group.samples) == self._sampling.n for group in list(self._groups.values()))

    def close(self) -> None:
        """Ends the thread. What is in flight is given up with the replicas."""
        self._is_closed = True
        if self._thread.is_alive():
            with self._turns:
                self._turns.notify_all()
            self._thread.join(_END_S)

    # ---- for a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Of the loader, before the first prompt that is not trained."""
        with self._alone():
            return self._steps[0].position if self._steps else self._prompts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state)

    def finished_groups(self) -> list[FinishedGroup]:
        """Those that wait to be trained."""
        places = range(self._sampling.n)
        with self._alone():
            finished = [group for group in self._groups.values() if len(group.samples) == len(places)]
            return [FinishedGroup(group.uid, group.version, [group.samples[place] for place in places]) for group in finished]

    def restore(self, groups: Mapping[str, FinishedGroup]) -> None:
        """Before the first step. They are not generated anew where they are still what the run asks for."""
        self._stored = {uid: group for uid, group in groups.items() if len(group.samples) == self._sampling.n}

    # ---- who has the replicas

    @contextmanager
    def _alone(self, for_weights: bool = False) -> Iterator[None]:
        """No call is under way at a replica within it. for_weights: to give them others, before which, with `drain`, what is begun is
        finished."""
        if self._ledger is None or self._num_inside:
            yield
            return
        self._finishes_first = for_weights and self._on_update is OnUpdate.drain
        self._is_asked = True
        with self._turns:
            self._turns.notify_all()
            self._turns.wait_for(lambda: self._has_given_way or not self._thread.is_alive() or self._failure is not None)
            self._num_inside += 1
            try:
                yield
                if for_weights:
                    self._begin_groups(self._ledger)
            finally:
                self._num_inside -= 1
                self._is_asked = self._finishes_first = self._has_given_way = False
                self._turns.notify_all()

    @property
    def _is_ready(self) -> bool:
        return self._ledger is not None and self._ledger.is_ready

    def _run(self) -> None:
        try:
            while not self._is_closed:
                with self._turns:
                    self._turn(self._rollout.pump)
                time.sleep(_REST_S)  # a lock that is let go of and taken again at once is never anybody else's
        except BaseException as error:  # noqa: BLE001  the boundary of the thread: the trainer's next `generate` raises it
            self._failure = error
        with self._turns:
            self._turns.notify_all()

    def _turn(self, pump: Pump) -> None:
        if self._is_asked and not (self._finishes_first and pump.is_at_work):
            pump.hold()
            pump.may_admit = True
            self._has_given_way = True
            self._turns.notify_all()
            self._turns.wait_for(lambda: not self._has_given_way or self._is_closed)
            return
        if self._is_awaited and self._is_ready:
            self._turns.notify_all()
            self._turns.wait_for(lambda: not (self._is_awaited and self._is_ready) or self._is_closed)
            return
        # As long as the trainer waits, the actor has the version of the engines; while it trains, a replica that was started anew waits.
        pump.may_admit = self._is_awaited
        if pump.is_at_work:
            pump.turn(_TURN_S)
        else:
            self._turns.wait(_TURN_S)

    # ---- groups

    def _step(self, index: int) -> _Step:
        while len(self._steps) <= index:
            position = self._prompts.state_dict()
            self._steps.append(_Step(next(self._prompts), position))
        return self._steps[index]

    def _begin_groups(self, ledger: AdmissionLedger) -> None:
        """Where a step's groups are taken, and where weights were pushed: what is begun then does not depend on time."""
        version, n = self._weights.version, self._sampling.n
        while ledger.may_admit(version):
            number, place = ledger.admission_place
            step = self._step(number - ledger.next_step)
            if not step.requests:
                step.requests = self._rollout.requests(step.prompts, self._sampling, number)
            uid = str(step.prompts.non_tensor_batch["uid"][place])
            stored = self._stored.pop(uid, None)
            if stored is not None and ledger.may_admit(stored.version):
                group = ledger.admit(stored.version)
                self._groups[group] = _Group(uid, stored.version, dict(enumerate(stored.samples)))
                ledger.finish(group)
            else:
                group = ledger.admit(version)
                self._groups[group] = _Group(uid, version)
                self._rollout.pump.add(step.requests[place * n : (place + 1) * n], self._deliver_to(group))

    def _deliver_to(self, number: int) -> Callable[[int, FinishedRequest], None]:
        def deliver(replica: int, finished: FinishedRequest) -> None:
            group, versions = self._groups[number], finished.sample.weight_versions
            if not group.version <= versions[0] <= versions[-1] <= self._weights.version:
                raise EngineFaultError(
                    f"rollout replica {replica} wrote a sample with the weight versions {versions}; it was begun with version "
                    f"{group.version}, and the weights at hand are version {self._weights.version}"
                )
            group.samples[finished.request_id % self._sampling.n] = finished.sample
            if len(group.samples) == self._sampling.n:
                assert self._ledger is not None
                self._ledger.finish(number)

        return deliver
