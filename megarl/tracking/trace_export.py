"""OpenTelemetry traces of a run: a span for each step with a child for each phase, sent by OTLP over HTTP.

The standard variables of OpenTelemetry apply, such as OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_SERVICE_NAME.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import set_span_in_context

from megarl.tracking.timeline import Span
from megarl.tracking.tracked_run import Logger, TrackedRun

STEP = "step"
_PATH = "/v1/traces"  # appended to the address of a collector, as OTLP defines
_QUEUE = "opentelemetry.sdk._shared_internal"  # logger of the span processor's queue
_NS_PER_S = 1_000_000_000
_log = logging.getLogger(__name__)


class _ReportedOnce(SpanExporter, logging.Filter):
    """Exporter that warns once about a collector that cannot be reached.

    OpenTelemetry's own messages, several for each batch, are not shown.
    """

    def __init__(self, endpoint: str | None) -> None:
        logging.Filter.__init__(self)
        # The variable names the address of the collector, and the argument that of the traces.
        self._exporter = trace_exporter.OTLPSpanExporter(
            None if endpoint is None else endpoint.rstrip("/") + _PATH
        )

        self._messages: list[str] = []
        self._has_failed = False
        self._is_failing = False
        self._is_closing = False

        # The exporter only logs why spans were not sent. This filter reads it.
        self._loggers = [logging.getLogger(name) for name in (trace_exporter.__name__, _QUEUE)]
        for logger in self._loggers:
            logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        self._messages.append(record.getMessage())
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. This runs in the thread of the span processor."""
        if self._is_closing and self._is_failing:
            return SpanExportResult.FAILURE

        self._messages.clear()
        result = self._exporter.export(spans)
        self._is_failing = result is SpanExportResult.FAILURE

        if self._is_failing and not self._has_failed:
            self._has_failed = True
            _log.warning(
                "tracking: opentelemetry: spans cannot be sent and are dropped; the run continues. Check "
                "OTEL_EXPORTER_OTLP_ENDPOINT or tracking.otlp_endpoint: %s",
                next(iter(self._messages), "no reason was given"),
            )

        return result

    def begin_close(self) -> None:
        """Drop the remaining spans once some cannot be sent, so that the run ends without a long delay."""
        self._is_closing = True
        if self._is_failing:
            self._exporter.shutdown()  # ends the wait before a retry

    def shutdown(self) -> None:
        self._exporter.shutdown()
        for logger in self._loggers:
            logger.removeFilter(self)


class OpenTelemetryTraces(Logger):
    """Logger that sends the spans of steps in a background thread.

    It is not flushed: the SDK sends spans every few seconds by itself, and its flush would wait for the
    collector.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._run = run.name
        self._exporter = _ReportedOnce(run.otlp_endpoint)
        resource = Resource({"service.name": "megarl"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("megarl")

    def log_spans(self, step: int, phases: Sequence[Span]) -> None:
        """Queue a step and its other phases. Without a phase `step`, nothing is sent."""
        whole = next((phase for phase in phases if phase.name == STEP), None)
        if whole is None:
            return

        parent = self._tracer.start_span(
            STEP, start_time=_ns(whole.start_s), attributes=self._attributes(step, whole)
        )
        context = set_span_in_context(parent)

        for phase in phases:
            if phase is not whole:
                child = self._tracer.start_span(
                    phase.name,
                    context,
                    start_time=_ns(phase.start_s),
                    attributes=self._attributes(step, phase),
                )
                child.end(_ns(phase.end_s))

        parent.end(_ns(whole.end_s))

    def _attributes(self, step: int, phase: Span) -> Mapping[str, str | int]:
        return {"run": self._run, "step": step, "role": phase.role}

    def close(self, failed: bool) -> None:
        self._exporter.begin_close()
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return round(seconds * _NS_PER_S)
