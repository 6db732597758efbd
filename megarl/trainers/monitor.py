"""What a run shows and writes: timings by phase, the timeline, metrics, the progress bar. The loop only names its phases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from megarl.controller.group import RoleGroup
from megarl.protocol.span import Span
from megarl.tracking.loggers import Tracker
from megarl.tracking.progress import ProgressBar
from megarl.tracking.timeline import Timeline
from megarl.trainers.evaluation import ValidationResult

# A worker's method -> the phase that it is part of (mission: timing_s/<phase>).
PHASES = {
    "generate": "gen",
    "score": "reward",
    "old_log_prob": "old_log_prob",
    "ref_log_prob": "ref",
    "values": "values",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
    "update_sft": "update_actor",
}
_DRIVER = "driver"
_TIMELINE_EVERY_STEPS = 10


class Monitor:
    """Collects what the workers report about their calls. `timing_s/<phase>` runs from the first rank's start to the last one's
    end within the step, so phases that overlap add up to more than `timing_s/step`."""

    def __init__(self, groups: Sequence[RoleGroup], tracker: Tracker, timeline: Timeline, progress: ProgressBar) -> None:
        self._groups = groups
        self._tracker = tracker
        self._timeline = timeline
        self._progress = progress
        self._metrics: dict[str, float] = {}
        self._driver_spans: list[Span] = []
        self.validations: list[tuple[int, float]] = []  # step, mean score

    def __enter__(self) -> Monitor:
        self._progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.__exit__(kind, error, trace)
        self._timeline.write()
        self._tracker.close()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Everything recorded within it is logged as one step when it ends without an error."""
        with self.phase("step"):
            yield
        self._finish(number)
        self._progress.advance(self._metrics)
        self._metrics = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the driver's own, or one that the workers' calls do not name."""
        start_s = time.time()
        yield
        self._driver_spans.append(Span(_DRIVER, _DRIVER, 0, name, start_s, time.time()))

    def record(self, metrics: Mapping[str, float]) -> None:
        self._metrics |= metrics

    def record_validation(self, result: ValidationResult, step: int) -> None:
        self.record(result.metrics)
        self.validations.append((step, result.metrics["val/score/mean"]))
        self._tracker.log_generations(step, result.generations)
        if step == 0:  # before the first step: logged by itself
            self._finish(0)
            self._metrics = {}

    def _finish(self, step: int) -> None:
        spans = self._driver_spans + [span for group in self._groups for span in group.drain_spans()]
        self._driver_spans = []
        self._timeline.add(spans, step)
        self._metrics |= phase_timings(spans)
        if "num_tokens" in self._metrics:
            self._metrics["perf/throughput"] = self._metrics["num_tokens"] / self._metrics["timing_s/step"]
        self._tracker.log(self._metrics, step)
        if step % _TIMELINE_EVERY_STEPS == 0:
            self._timeline.write()


def phase_timings(spans: Sequence[Span]) -> dict[str, float]:
    """`timing_s/<phase>` in seconds: last end minus first start of the spans of a phase. The driver's spans name their phase.

    While the driver validates, the workers' calls belong to that phase (`testing`), not to the phases of training.
    """
    testing = [span for span in spans if span.pool == _DRIVER and span.name == "testing"]
    edges: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        name = span.name if span.pool == _DRIVER else PHASES.get(span.name)
        within_testing = any(outer.start_s <= span.start_s and span.end_s <= outer.end_s for outer in testing)
        if name is None or (within_testing and span.pool != _DRIVER):
            continue
        edges[name] += [span.start_s, span.end_s]
    return {f"timing_s/{name}": max(times) - min(times) for name, times in edges.items()}
