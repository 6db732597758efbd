"""Monitoring of a run: timings by phase, timeline, metrics and progress bar.

The training loop only names its phases.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from megarl.controller.group import RoleGroup
from megarl.machine.clock import Began
from megarl.machine.errors import RunError
from megarl.plan.placement.dataflow import step_phases
from megarl.rollout.driver.rollout import Rollout
from megarl.tracking.loggers import Tracker
from megarl.tracking.progress import ProgressBar
from megarl.tracking.samples import SampleTable
from megarl.tracking.timeline import Span, Timeline

WAIT = "gen"  # phase in which the driver waits for the samples of its step
_DRIVER = "driver"
_TIMELINE_EVERY_STEPS = 10


@dataclass
class Position:
    """Position of a run: its step (None outside of steps) and the driver's phases, innermost last.

    An error leaves the position unchanged.
    """

    step: int | None = None
    phases: list[str] = field(default_factory=list)
    begun: list[Began] = field(default_factory=list)  # start of each of these phases
    spent_s: dict[str, float] = field(default_factory=dict)  # seconds in completed phases, by name

    def now(self) -> tuple[int | None, str | None]:
        """Return the step and the innermost phase. Thread-safe."""
        phases = self.phases.copy()
        return self.step, phases[-1] if phases else None

    def seconds_in(self, name: str) -> float:
        """Return the seconds spent in phases of this name, including a running one. Thread-safe."""
        going_on = (
            began.seconds()
            for phase, began in zip(self.phases.copy(), self.begun.copy(), strict=False)
            if phase == name
        )
        return self.spent_s.get(name, 0.0) + sum(going_on)


class Monitor:
    """Collects the call timings that workers report, and logs the metrics of each step.

    `timing_s/<phase>` is the time from the start of the first rank to the end of the last rank within the
    step, so overlapping phases can sum to more than `timing_s/step`. `timing_s/gen` is the time that the
    trainer waits for samples. `perf/throughput` is the tokens per second of training in the step, without
    validation; `perf/throughput_per_device` divides it by the number of devices of the run.
    `perf/trainer_idle` is the share of that time in which the trainer waits for samples.

    Args:
        groups: The sources of spans.
        tracker: The loggers.
        timeline: The timeline.
        progress: The progress bar.
        num_devices: The devices of the run.
        position: The position of the run. None: its begin.
        predict: Returns the predicted times of a step from its metrics.
        profile: Called with the number of a step; the context in which it runs.
        watch: Called with the spans of a step; returns metrics of them.
    """

    def __init__(
        self,
        groups: Sequence[RoleGroup | Rollout],
        tracker: Tracker,
        timeline: Timeline,
        progress: ProgressBar,
        num_devices: int,
        position: Position | None = None,
        predict: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda metrics: {},
        profile: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
        watch: Callable[[Sequence[Span]], Mapping[str, float]] = lambda spans: {},
    ) -> None:
        self.position = position or Position()
        self._groups = groups
        self._tracker = tracker
        self._timeline = timeline
        self._progress = progress
        self._num_devices = num_devices
        self._predict = predict
        self._profile = profile
        self._watch = watch

        self._metrics: dict[str, float] = {}
        self._spans: list[Span] = []
        self._testing_spans: list[Span] = []
        self.validations: list[tuple[int, float]] = []  # step, mean score

    def __enter__(self) -> Monitor:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

        # Report what ended the run, not the errors that follow from it.
        with suppress(RunError) if kind is not None else nullcontext():
            self._timeline.write()
        self._tracker.close(failed=kind is not None)

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        """Record a step.

        Everything recorded in the block is logged as one step if the block ends without an error.
        """
        self.position.step = number
        # Starting the profiler and writing traces is not part of the step's time.
        with self._profile(number), self.phase("step"):
            yield

        # Reached only without an error, so that no line is written for a failed step.
        self._finish(number)
        self.position.step = None
        self._progress.advance(self._metrics)
        self._metrics = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Record a phase of the driver, or one that no worker call is assigned to."""
        position = self.position
        began = Began()
        position.begun.append(began)
        position.phases.append(name)

        # No `finally`: after an error, the position must still show the phase that failed.
        yield
        position.phases.pop()
        position.begun.pop()
        end_s = began.now_s()
        position.spent_s[name] = position.spent_s.get(name, 0.0) + end_s - began.start_s
        self._spans.append(Span(_DRIVER, _DRIVER, 0, name, began.start_s, end_s))

    @property
    def depth(self) -> int:
        """The number of phases that have begun and not ended."""
        return len(self.position.phases)

    def rewind(self, depth: int) -> None:
        """Leave the phases that an error interrupted, down to `depth`, because their work is repeated."""
        del self.position.phases[depth:]
        del self.position.begun[depth:]

    @contextmanager
    def testing(self) -> Generator[None]:
        """Record a validation.

        The workers' calls in the block appear on the timeline, and count only towards `timing_s/testing`.
        """
        # Spans are assigned by when the driver collected them, since clocks of workers on other nodes may
        # differ from the driver's.
        self._spans += self._drain()
        with self.phase("testing"):
            yield

        # Everything recorded in the meantime belongs to the validation only.
        self._testing_spans += self._drain()

    def count(self, name: str, values: Mapping[str, float]) -> None:
        """Record current values on the timeline. Thread-safe."""
        self._timeline.count(name, values, time.time())

    def flush(self, services: bool = True) -> None:
        """Make the metrics of all completed steps durable; see Tracker.flush."""
        self._tracker.flush(services)

    def record(self, metrics: Mapping[str, float]) -> None:
        self._metrics |= metrics

    def record_validation(
        self, metrics: Mapping[str, float], generations: list[dict[str, Any]], step: int
    ) -> None:
        """Record the results of Evaluation.run."""
        self.record(metrics)
        self.validations.append((step, metrics["val/score/mean"]))
        self._tracker.log_generations(step, generations)
        if step == 0:  # The validation before the first step is logged by itself.
            self._finish(0)
            self._metrics = {}

    def record_samples(self, step: int, make: Callable[[], SampleTable], max_bytes: int) -> None:
        """Write the samples of a step; see Tracker.log_samples."""
        self._tracker.log_samples(step, make, max_bytes)

    def _finish(self, step: int) -> None:
        # Collect all spans of the step. Those of the validation go only to the timeline.
        spans = self._spans + self._drain()
        testing_spans = self._testing_spans
        self._spans = []
        self._testing_spans = []
        self._timeline.add(spans + testing_spans, step)
        phases = phase_spans(spans)
        timings = {f"timing_s/{phase.name}": phase.end_s - phase.start_s for phase in phases}
        self._metrics |= timings
        self._metrics |= self._watch(spans)

        # Only training steps have tokens; a validation before the first step has none.
        if "num_tokens" in self._metrics:
            training_s = timings["timing_s/step"] - timings.get("timing_s/testing", 0.0)
            throughput = self._metrics["num_tokens"] / training_s
            self._metrics |= {
                "perf/throughput": throughput,
                "perf/throughput_per_device": throughput / self._num_devices,
            }
            self._metrics |= self._predict(self._metrics)
            if (waited_s := timings.get(f"timing_s/{WAIT}")) is not None:
                self._metrics["perf/trainer_idle"] = waited_s / training_s

        self._tracker.log(self._metrics, step)
        self._tracker.log_spans(step, phases)

        # The whole file is rewritten each time, so not after every step.
        if step % _TIMELINE_EVERY_STEPS == 0:
            self._timeline.write()

    def _drain(self) -> list[Span]:
        return [span for group in self._groups for span in group.drain_spans()]


def phases_by_call(roles: Collection[str] = ()) -> dict[tuple[str, str], str]:
    """Return the phase (`timing_s/<phase>`) of each call, by role and worker method.

    Args:
        roles: See step_phases.
    """
    return {(phase.roles[0], call): phase.name for phase in step_phases(roles) for call in phase.calls}


def phase_spans(spans: Sequence[Span]) -> list[Span]:
    """Return one span for each phase: from the first start to the last end of its calls, on any rank.

    The driver's spans are named after their phase. Engine calls may belong to later steps, so `gen` is the
    time that the driver waits for samples. The role is that of the first call, or the driver.
    """
    by_phase: dict[str, list[Span]] = defaultdict(list)
    phases = phases_by_call({span.role for span in spans})
    for span in spans:
        name = span.name if span.pool == _DRIVER else phases.get((span.role, span.name))
        if name is not None and (span.pool == _DRIVER or name != WAIT):
            by_phase[name].append(span)

    return [_whole(name, of_phase) for name, of_phase in by_phase.items()]


def _whole(name: str, spans: Sequence[Span]) -> Span:
    # The driver may wait in a phase of the same name. The role that computes is more informative.
    first = next((span for span in spans if span.pool != _DRIVER), spans[0])
    return first._replace(
        rank=0,
        name=name,
        start_s=min(span.start_s for span in spans),
        end_s=max(span.end_s for span in spans),
    )
