"""Simulate a run in virtual time, with the scheduling code of a real run.

This is its rollout buffer, staleness controller, request scheduler and router.

Engines, trainer and scoring only consume time.

    outcome = Simulation(Script(lengths=[[120, 80], [300, 40], ...], prompts_per_step=2, ...)).run()

The simulation shows what a schedule gains, not how fast an engine or a trainer is. Every slot of an engine
writes a token in the same time regardless of load, and tokens written before a weight sync are not
recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from megarl.batch.data_proto import DataProto
from megarl.config.schema import Late, OnUpdate, SamplingConfig
from megarl.data.loader import BatchLoader
from megarl.data.tables import RowIdentity
from megarl.rehearse.simulation.engines import ScriptedEngines, VirtualClock
from megarl.rollout.driver.rollout_buffer import RolloutBuffer
from megarl.rollout.driver.sample_rows import FinishedGroup, GroupRules, StepGroups
from megarl.rollout.driver.scheduler import RequestScheduler
from megarl.rollout.interface import GenerationRequest, SamplingParameters
from megarl.rollout.staleness import StalenessController

_NEVER_S = 1e12  # nothing hangs in a simulation


@dataclass(frozen=True, kw_only=True)
class Script:
    """Inputs of a simulation. Times are in seconds, or in any other unit.

    Attributes:
        lengths: Tokens of the samples of each prompt, in data order. The data repeats after its end.
        slots: Samples that an engine writes concurrently, each at one token per `token_s`.
        training_s: Time of a training step, from its samples to its weight sync.
        push_s: Duration of a weight sync, during which engines and trainer pause.
        scoring_s: Time to score a group. The run waits for scores if `max_without_signal` is set, as in
            GroupRules.
        without_signal: Prompts whose samples all have the same score.
        failing: Prompts whose samples no engine can write.
        start_s: Restart time of an engine that was lost.
    """

    lengths: Sequence[Sequence[int]]
    prompts_per_step: int
    total_steps: int
    max_staleness: int = 0
    on_update: OnUpdate = OnUpdate.continue_
    late: Late = Late.wait
    num_engines: int = 1
    slots: int = 64
    token_s: float = 1.0
    training_s: float = 0.0
    push_s: float = 0.0
    critic_warmup_steps: int = 0
    max_without_signal: int | None = None
    without_signal: frozenset[int] = frozenset()
    failing: frozenset[int] = frozenset()
    max_error_rate: float = math.inf
    scoring_s: float = 0.0
    start_s: float = 30.0


class Step(NamedTuple):
    """Record of a training step.

    Attributes:
        uids: Its prompts, in order.
        versions: For each prompt, the weight version that began it.
        trained_version: Weight version that was trained.
        start_s: Time at which the trainer had the samples, after waiting for `waiting_s`.
        age: Age of the oldest token, in versions.
    """

    number: int
    uids: list[str]
    versions: list[int]
    trained_version: int
    lengths: list[int]
    start_s: float
    waiting_s: float
    age: int


class Saved(NamedTuple):
    """Contents of a checkpoint after a step."""

    step: int
    version: int
    position: Mapping[str, Any]
    groups: Mapping[str, FinishedGroup]


class SimulatedRun(NamedTuple):
    """Result of a simulation.

    Attributes:
        seconds: Total time.
        busy: Share of the engines' slots in use.
    """

    steps: list[Step]
    seconds: float
    busy: float
    num_restarts: int

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.steps)

    @property
    def waiting(self) -> float:
        """Share of the time in which the trainer waits for samples."""
        return sum(step.waiting_s for step in self.steps) / self.seconds

    @property
    def ages(self) -> list[int]:
        """Age of each group when it is trained, in versions since it was begun."""
        return [step.trained_version - version for step in self.steps for version in step.versions]

    @property
    def mean_age(self) -> float:
        return fmean(self.ages)


class StalledError(RuntimeError):
    """No event can ever happen again, which means that the schedule is wrong."""


class Simulation:
    """Simulation of all steps, or of the steps after `saved`.

    Args:
        on_event: Called for each event; it may kill an engine, or end the run by raising.
    """

    def __init__(
        self,
        script: Script,
        saved: Saved | None = None,
        on_event: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._script = script
        self.clock = VirtualClock(on_event)
        self.version = saved.version if saved is not None else 1
        self.saved = saved
        self.steps: list[Step] = []
        sampling = SamplingConfig(n=len(script.lengths[0]))
        self.engines = ScriptedEngines(
            self.clock,
            script.num_engines,
            lambda request: (
                0 if _number_of(request.uid) in script.failing else request.sampling.max_new_tokens
            ),
            version=self.version,
            restart_limit=10**9,
            start_s=script.start_s,
            tick_s=script.token_s,
        )

        # Use the scheduler, controller and buffer of a real run; replace only what takes time.
        clock = self.clock
        self.scheduler = RequestScheduler(
            self.engines,  # pyrefly: ignore[bad-argument-type]
            self.engines.readmit,
            max_concurrency=script.slots,
            answer_limit_s=_NEVER_S,
            sample_limit_s=_NEVER_S,
            clock=lambda: clock.now_s,
            wait=clock.wait,
        )
        self._loader = BatchLoader(_Rows(len(script.lengths)), script.prompts_per_step, shuffle=False, seed=0)
        self._scoring = _Scoring(clock, script)
        staleness = StalenessController(
            max_staleness=script.max_staleness,
            prompts_per_step=script.prompts_per_step,
            total_steps=script.total_steps,
            next_step=saved.step + 1 if saved is not None else 1,
            version=self.version,
            step_pushes=lambda step: step > script.critic_warmup_steps,
            in_order=script.late is Late.wait,
        )
        rules = GroupRules(
            sampling, max_without_signal=script.max_without_signal, max_error_rate=script.max_error_rate
        )
        self.buffer = RolloutBuffer(self, self._loader, self._scoring, rules, staleness)

        if saved is not None:
            self._loader.load_state_dict(saved.position)
            self.buffer.restore(saved.groups, saved.position.get("trained", []))

    def run(self) -> SimulatedRun:
        for number in range(self.buffer.staleness.next_step, self._script.total_steps + 1):
            start_s = self.clock.now_s
            self.run_until(lambda: self.buffer.is_ready)
            self._record(number, self.buffer.take(), self.clock.now_s - start_s)
            # Training takes time, during which the engines generate ahead.
            self.run_until(lambda: False, self._script.training_s, is_awaited=False)
            if number > self._script.critic_warmup_steps:
                self.push_weights()
            self.saved = Saved(
                number,
                self.version,
                self.buffer.position(),
                {group.uid: group for group in self.buffer.finished()},
            )

        # Share of the slots in use, over the whole run.
        tokens = sum(self.scheduler.totals().num_tokens)
        slots = self._script.num_engines * self._script.slots
        busy = tokens * self._script.token_s / (slots * self.clock.now_s)

        return SimulatedRun(self.steps, self.clock.now_s, busy, len(self.engines.restarted))

    # ---- rollout interface used by the groups

    def requests(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0, *, first: int = 0
    ) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                index * sampling.n + place, [1], SamplingParameters(max_new_tokens=length, seed=0), uid
            )
            for index, uid in enumerate(map(str, prompts.non_tensor_batch["uid"]))
            for place, length in enumerate(self._script.lengths[_number_of(uid)])
        ]

    @property
    def runner(self) -> RequestScheduler:
        return self.scheduler

    def assemble(self, prompts: DataProto, rows: DataProto, version: int) -> DataProto:
        """Return the prompts, since scoring reads only their uids."""
        return prompts

    # ---- parts

    def run_until(
        self, is_enough: Callable[[], bool], limit_s: float = math.inf, *, is_awaited: bool = True
    ) -> None:
        """Generate until `is_enough`, or for `limit_s`.

        Args:
            is_awaited: Whether the trainer waits, so that it can sync weights to a restarted engine. If
                false, no group is begun at staleness 0.
        """
        end_s = self.clock.now_s + limit_s
        self.scheduler.may_readmit = is_awaited

        while True:
            self.buffer.score()
            if is_awaited or self.buffer.staleness.runs_ahead:
                self.buffer.begin()
            if is_enough() or self.clock.now_s >= end_s:
                return
            # Advance to the next time at which something can change.
            until_s = min(end_s, self._scoring.next_s)
            if self.scheduler.is_at_work:
                self.scheduler.poll(until_s - self.clock.now_s)
            elif (until_s := min(until_s, self.clock.next_s)) == math.inf:
                raise StalledError(
                    f"at {self.clock.now_s:g}: no engine is working, and step "
                    f"{self.buffer.staleness.next_step} waits for samples"
                )
            else:
                self.clock.pass_by(until_s - self.clock.now_s)

    def push_weights(self) -> None:
        # Draining makes the trainer wait, so its time counts as waiting.
        if self._script.on_update is OnUpdate.drain:
            start_s = self.clock.now_s
            self.run_until(lambda: not (self.scheduler.is_at_work or self.buffer.awaits_scores))
            last = self.steps[-1]
            self.steps[-1] = last._replace(waiting_s=last.waiting_s + self.clock.now_s - start_s)

        # No call may be in progress at an engine whose weights change.
        self.scheduler.pause()
        self.version += 1
        self.engines.push(self.version, self._script.push_s)
        self.clock.pass_by(self._script.push_s)

    def _record(self, number: int, taken: StepGroups, waiting_s: float) -> None:
        # Dropped groups are taken with the step, but not trained.
        trained = taken.trained
        rows = trained.rows.ragged

        self.steps.append(
            Step(
                number=number,
                uids=[str(uid) for uid in trained.prompts.non_tensor_batch["uid"]],
                versions=trained.versions,
                trained_version=self.version,
                lengths=rows["responses"].lengths.tolist(),
                start_s=self.clock.now_s,
                waiting_s=waiting_s,
                age=self.version - int(rows["token_versions"].flat().min()),
            )
        )


class _Rows:
    """Data set whose prompts are only numbers."""

    identity = RowIdentity("simulated")

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        return DataProto.from_dict({}, {"uid": list(uids)})


def _number_of(uid: str) -> int:
    return int(uid.partition("-")[2])


class _Scoring:
    """Stub for Reward. Scoring is skipped if the run does not wait for it."""

    def __init__(self, clock: VirtualClock, script: Script) -> None:
        self._clock = clock
        self._script = script
        self._under_way: list[tuple[float, str, list[float]]] = []

    scores_rounds = False

    @property
    def may_begin(self) -> bool:
        return self._script.max_without_signal is not None

    def score_round(self, groups: DataProto) -> dict[str, list[float]]:
        raise AssertionError

    @property
    def next_s(self) -> float:
        return min((end_s for end_s, *_ in self._under_way), default=math.inf)

    def begin(self, groups: DataProto) -> None:
        n = len(self._script.lengths[0])
        end_s = self._clock.now_s + self._script.scoring_s

        for uid in map(str, groups.non_tensor_batch["uid"]):
            scores = [
                0.0 if _number_of(uid) in self._script.without_signal else float(place) for place in range(n)
            ]
            self._under_way.append((end_s, uid, scores))

    def scored(self) -> dict[str, list[float]]:
        ended = [one for one in self._under_way if one[0] <= self._clock.now_s]
        self._under_way = [one for one in self._under_way if one[0] > self._clock.now_s]
        return {uid: scores for _, uid, scores in ended}
