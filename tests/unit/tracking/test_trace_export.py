"""Test traces with a real receiver of OTLP over HTTP, which decodes what it gets."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from megarl.tracking.loggers import Tracker
from megarl.tracking.timeline import Span
from megarl.tracking.trace_export import OpenTelemetryTraces
from megarl.tracking.tracked_run import TrackedRun

STEP_4 = [
    Span("driver", "driver", 0, "gen", 100.0, 101.5),
    Span("trainer", "actor", 0, "update_actor", 102.0, 103.25),
    Span("driver", "driver", 0, "step", 100.0, 104.0),
]


class Receiver:
    """A collector: keeps the decoded requests by path."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # noqa: N802
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


def plain(attributes: list[KeyValue]) -> dict[str, str | int]:
    return {each.key: each.value.string_value or each.value.int_value for each in attributes}


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_step_is_a_span_with_a_child_for_each_phase(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    if by_variable:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    endpoint = None if by_variable else receiver.url
    tracker = Tracker(["opentelemetry"], TrackedRun(output_dir=tmp_path, name="sums", otlp_endpoint=endpoint))
    tracker.log({"actor/lr": 0.5}, 4)
    tracker.log_spans(4, STEP_4)
    tracker.log_spans(0, STEP_4[:1])  # a validation before the first step
    tracker.close()

    ((path, request),) = receiver.requests
    assert path == "/v1/traces"
    (of_resource,) = request.resource_spans
    resource = plain(list(of_resource.resource.attributes))
    assert resource["service.name"] == ("training" if by_variable else "megarl")
    spans = {span.name: span for (scope,) in [of_resource.scope_spans] for span in scope.spans}
    step = spans["step"]
    seconds = {name: (s.start_time_unix_nano / 1e9, s.end_time_unix_nano / 1e9) for name, s in spans.items()}
    assert seconds == {"gen": (100.0, 101.5), "update_actor": (102.0, 103.25), "step": (100.0, 104.0)}
    assert step.parent_span_id == b""
    assert spans["gen"].parent_span_id == spans["update_actor"].parent_span_id == step.span_id
    assert len({span.trace_id for span in spans.values()}) == 1
    roles = {"step": "driver", "gen": "driver", "update_actor": "actor"}
    for name, role in roles.items():
        assert plain(list(spans[name].attributes)) == {"run": "sums", "step": 4, "role": role}


def test_an_unreachable_collector_is_reported_once_and_slows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # nothing listens there after the block
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with caplog.at_level(logging.INFO):
        traces = OpenTelemetryTraces(
            TrackedRun(output_dir=tmp_path, otlp_endpoint=f"http://127.0.0.1:{port}")
        )
        for step in range(3):
            before = len(caplog.messages)
            traces.log_spans(step, STEP_4)
            end_s = time.monotonic() + 20
            while step == 0 and len(caplog.messages) == before and time.monotonic() < end_s:
                time.sleep(0.01)
        traces.close(failed=False)

    (message,) = [message for message in caplog.messages if "opentelemetry" in message.lower()]
    assert "OTEL_EXPORTER_OTLP_ENDPOINT or tracking.otlp_endpoint" in message
    assert len(caplog.messages) == 1


def test_a_collector_that_never_answers_holds_up_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        traces = OpenTelemetryTraces(TrackedRun(output_dir=tmp_path, otlp_endpoint=endpoint))
        traces.log_spans(1, STEP_4)
        connection, _ = server.accept()  # the export waits for an answer now
        for step in range(2, 1000):
            traces.log_spans(step, STEP_4)  # more than the queue holds
        with connection:
            traces.flush()
            connection.setblocking(False)
            assert connection.recv(16)  # still open: nothing waited for the export's end
        traces.close(failed=False)
