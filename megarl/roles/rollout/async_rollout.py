"""Generation that runs ahead of training, in a thread of the driver: groups are begun as the ledger allows, while roles train."""

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
from megarl.roles.rollout.rollout_buffer import GroupRules, GroupsAhead, Taken
from megarl.roles.weights.rollout_weights import RolloutWeights
from megarl.rollout.staleness import AdmissionLedger

_TURN_S = 0.02  # after which the thread looks whether somebody else wants the replicas
_REST_S = 0.0005
_END_S = 30.0


class GenerationAhead:
    """Stands in the loop for the loader and for the rollout: `next` waits for the next step's samples and gives their prompts, `generate`
    gives the samples, which are there.

    The replicas have one user at a time: the thread is it, and gives way to others, who ask by `Replicas.alone`.
    make_ledger: of a run whose weights have this version.
    """

    def __init__(
        self,
        rollout: Rollout,
        weights: RolloutWeights,
        prompts: BatchLoader,
        scoring: Scoring,
        rules: GroupRules,
        on_update: OnUpdate,
        make_ledger: Callable[[int], AdmissionLedger],
    ) -> None:
        self._rollout, self._weights, self._prompts, self._rules = rollout, weights, prompts, rules
        self._on_update = on_update
        self._make_groups = lambda version: GroupsAhead(rollout, weights, prompts, scoring, rules, make_ledger(version))
        self._groups: GroupsAhead | None = None
        self._stored: Mapping[str, FinishedGroup] = {}
        self._trained: list[str] = []
        self._taken = Taken(DataProto(), [], [], [])
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
        """The prompts of the next step, once all their samples are there. Raises what the generation of any has raised."""
        groups = self._begun()
        self._is_awaited = True
        with self._turns:
            try:
                self._turns.notify_all()
                self._turns.wait_for(lambda: self._failure is not None or groups.is_ready)
                if self._failure is not None:
                    raise self._failure
                self._taken = groups.take()
                self._num_ahead = len(groups.ledger.live)
            finally:
                self._is_awaited = False
                self._turns.notify_all()
        return self._taken.prompts

    def generate(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0, scoring: Scoring | None = None
    ) -> DataProto:
        """As Rollout.generate, of what `next` gave last: the samples, or the greedy ones where a group has those."""
        n = self._rules.sampling.n
        places = range(n) if sampling == self._rules.sampling else [n]
        samples = [samples[place] for samples in self._taken.samples for place in places]
        return self._rollout.assemble(prompts.repeat(len(places)), samples, self._weights.version)

    def drain_metrics(self) -> dict[str, float]:
        """`rollout/groups_ahead`: that were begun for later steps when the trainer went on; `rollout/num_given_up`: groups in this
        process whose samples no engine could write."""
        given_up = 0 if self._groups is None else self._groups.num_given_up
        return {"rollout/groups_ahead": float(self._num_ahead), "rollout/num_given_up": float(given_up)}

    def num_finished(self) -> int:
        """Of the groups that wait to be trained. Any thread may ask."""
        return 0 if self._groups is None else self._groups.num_finished()

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
            return self._prompts.state_dict() if self._groups is None else self._groups.position()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state)
        self._trained = list(state.get("trained", []))

    def finished_groups(self) -> list[FinishedGroup]:
        """Those that wait to be trained."""
        with self._alone():
            return [] if self._groups is None else self._groups.finished()

    def restore(self, groups: Mapping[str, FinishedGroup]) -> None:
        """Before the first step. They are not generated anew where they are still what the run asks for."""
        self._stored = groups

    # ---- who has the replicas

    def _begun(self) -> GroupsAhead:
        if self._groups is None:
            groups = self._make_groups(self._weights.version)
            groups.restore(self._stored, self._trained)
            groups.begin()
            self._groups, self._stored = groups, {}
            self._thread.start()
        return self._groups

    @contextmanager
    def _alone(self, for_weights: bool = False) -> Iterator[None]:
        """No call is under way at a replica within it. for_weights: to give them others, before which, with `drain`, what is begun is
        finished."""
        if self._groups is None or self._num_inside:
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
                    self._groups.begin()
            finally:
                self._num_inside -= 1
                self._is_asked = self._finishes_first = self._has_given_way = False
                self._turns.notify_all()

    def _run(self) -> None:
        assert self._groups is not None
        try:
            while not self._is_closed:
                with self._turns:
                    self._turn(self._groups)
                time.sleep(_REST_S)  # a lock that is let go of and taken again at once is never anybody else's
        except BaseException as error:  # noqa: BLE001  the boundary of the thread: the trainer's next `next` raises it
            self._failure = error
        with self._turns:
            self._turns.notify_all()

    def _turn(self, groups: GroupsAhead) -> None:
        rollout, pump = self._rollout, self._rollout.pump
        groups.score()
        if self._is_asked and not (self._finishes_first and (rollout.is_at_work or groups.awaits_scores)):
            pump.hold()
            pump.may_admit = True
            self._has_given_way = True
            self._turns.notify_all()
            self._turns.wait_for(lambda: not self._has_given_way or self._is_closed)
            return
        if self._is_awaited and groups.is_ready:
            self._turns.notify_all()
            self._turns.wait_for(lambda: not (self._is_awaited and groups.is_ready) or self._is_closed)
            return
        # As long as the trainer waits, the actor has the version of the engines; while it trains, a replica that was started anew waits.
        pump.may_admit = self._is_awaited
        if rollout.is_at_work:
            rollout.turn(_TURN_S)
        else:
            self._turns.wait(_TURN_S)
