"""What a run shows and writes: timings by phase, the timeline, metrics, the progress bar. The loop only names its phases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from megarl.machine.clock import Began
from megarl.placement.dataflow import STEP
from megarl.tracking.loggers import Tracker
from megarl.tracking.progress import ProgressBar
from megarl.tracking.samples import SampleTable
from megarl.tracking.timeline import Span, Timeline
from megarl.trainers.evaluation import ValidationResult

# The phase (timing_s/<phase>) that a role's call is part of, by the role and its worker's method.
PHASES = {(phase.roles[0], call): phase.name for phase in STEP for call in phase.calls}
_DRIVER = "driver"
_TIMELINE_EVERY_STEPS = 10


@dataclass
class Position:
    """Where a run is: its step, None outside of one, and the driver's phases, the innermost last. What fails leaves it as it was."""

    step: int | None = None
    phases: list[str] = field(default_factory=list)


class Watched(Protocol):
    """Whose calls are on the timeline: a worker group, or the replicas of the rollout."""

    def drain_spans(self) -> list[Span]: ...


class Monitor:
    """Collects what the workers report about their calls. `timing_s/<phase>` runs from the first rank's start to the last one's
    end within the step, so phases that overlap add up to more than `timing_s/step`. `perf/throughput` is the step's tokens per
    second of training, validation left out, and `perf/throughput_per_device` that by all devices of the run."""

    def __init__(
        self,
        groups: Sequence[Watched],
        tracker: Tracker,
        timeline: Timeline,
        progress: ProgressBar,
        num_devices: int,
        position: Position | None = None,
    ) -> None:
        self._position = position or Position()
        self._groups = groups
        self._tracker = tracker
        self._timeline = timeline
        self._progress = progress
        self._num_devices = num_devices
        self._metrics: dict[str, float] = {}
        self._spans: list[Span] = []
        self._testing_spans: list[Span] = []
        self.validations: list[tuple[int, float]] = []  # step, mean score

    def __enter__(self) -> Monitor:
        self._progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.__exit__(kind, error, trace)
        with suppress(OSError) if kind is not None else nullcontext():  # what ended the run is to be told, not what follows from it
            self._timeline.write()
        self._tracker.close(failed=kind is not None)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Everything recorded within it is logged as one step when it ends without an error."""
        self._position.step = number
        with self.phase("step"):
            yield
        self._finish(number)
        self._position.step = None
        self._progress.advance(self._metrics)
        self._metrics = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the driver's own, or one that the workers' calls do not name."""
        began = Began()
        self._position.phases.append(name)
        yield
        self._position.phases.pop()
        self._spans.append(Span(_DRIVER, _DRIVER, 0, name, began.start_s, began.now_s()))

    @contextmanager
    def testing(self) -> Iterator[None]:
        """The phase of validation: what the workers do within it is on the timeline, and in no timing but `timing_s/testing`."""
        # Sorted by when their calls were waited for: the clocks of workers on other nodes are not the driver's.
        self._spans += self._drain()
        with self.phase("testing"):
            yield
        self._testing_spans += self._drain()

    def flush(self) -> None:
        """The metrics of all steps that have ended are in their files."""
        self._tracker.flush()

    def record(self, metrics: Mapping[str, float]) -> None:
        self._metrics |= metrics

    def record_validation(self, result: ValidationResult, step: int) -> None:
        self.record(result.metrics)
        self.validations.append((step, result.metrics["val/score/mean"]))
        self._tracker.log_generations(step, result.generations)
        if step == 0:  # before the first step: logged by itself
            self._finish(0)
            self._metrics = {}

    def record_samples(self, step: int, make: Callable[[], SampleTable], max_bytes: int) -> None:
        """See Tracker.log_samples."""
        self._tracker.log_samples(step, make, max_bytes)

    def _finish(self, step: int) -> None:
        spans, testing_spans = self._spans + self._drain(), self._testing_spans
        self._spans, self._testing_spans = [], []
        self._timeline.add(spans + testing_spans, step)
        timings = phase_timings(spans)
        self._metrics |= timings
        if "num_tokens" in self._metrics:
            training_s = timings["timing_s/step"] - timings.get("timing_s/testing", 0.0)
            throughput = self._metrics["num_tokens"] / training_s
            self._metrics |= {"perf/throughput": throughput, "perf/throughput_per_device": throughput / self._num_devices}
        self._tracker.log(self._metrics, step)
        if step % _TIMELINE_EVERY_STEPS == 0:
            self._timeline.write()

    def _drain(self) -> list[Span]:
        return [span for group in self._groups for span in group.drain_spans()]


def phase_timings(spans: Sequence[Span]) -> dict[str, float]:
    """`timing_s/<phase>` in seconds: last end minus first start of the spans of a phase. The driver's spans name their phase."""
    edges: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        name = span.name if span.pool == _DRIVER else PHASES.get((span.role, span.name))
        if name is not None:
            edges[name] += [span.start_s, span.end_s]
    return {f"timing_s/{name}": max(times) - min(times) for name, times in edges.items()}
