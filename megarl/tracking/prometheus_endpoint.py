"""HTTP endpoint at which a Prometheus server reads the newest metrics of a run."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megarl.tracking.tracked_run import Logger, TrackedRun

PREFIX = "megarl_"
_RECOVERIES = "recovery/num_recoveries"  # of one step
_log = logging.getLogger(__name__)


def prometheus_name(metric: str) -> str:
    """Return the name of a metric in Prometheus: `megarl_`, then the name with `_` for other characters.

    Characters other than ASCII letters, digits and `_` are replaced. Several metrics can have one name; the
    label `metric`, which has the original name, distinguishes them.
    """
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


class RunCollector(Collector):
    """Yields the newest value of each metric, and what the run does at the moment of a scrape."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._lock = threading.Lock()  # scrapes have threads of their own
        self._values: dict[str, float] = {}
        self._step = run.resumed_after or 0
        self._num_recoveries = 0.0

    def update(self, metrics: Mapping[str, float], step: int) -> None:
        """Replace the values of these metrics. Others keep their last value."""
        with self._lock:
            self._values.update(metrics)
            self._step = step
            self._num_recoveries += metrics.get(_RECOVERIES, 0.0)

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            values = dict(self._values)
            logged_step = self._step
            num_recoveries = self._num_recoveries
        running_step, running_phase = self._run.now()
        step = GaugeMetricFamily(f"{PREFIX}step", "The running step; between steps, the last one.")
        step.add_metric((), logged_step if running_step is None else running_step)
        yield step

        phase = GaugeMetricFamily(
            f"{PREFIX}phase", "1 for the phase that the driver is in.", labels=("phase",)
        )
        if running_phase is not None:
            phase.add_metric((running_phase,), 1.0)
        yield phase

        recoveries = CounterMetricFamily(
            f"{PREFIX}recoveries", "Recoveries in the steps that this process completed."
        )
        recoveries.add_metric((), num_recoveries)
        yield recoveries

        # A family may be written only once, so metrics with the same name share it.
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in values.items():
            name = prometheus_name(metric)
            family = families.setdefault(
                name, GaugeMetricFamily(name, "See docs/tracking.md.", labels=("metric",))
            )
            family.add_metric((metric,), value)
        yield from families.values()


class PrometheusEndpoint(Logger):
    """Logger that serves the newest values until the run ends."""

    def __init__(self, run: TrackedRun) -> None:
        self._collector = RunCollector(run)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._collector)

        try:
            self._server, self._thread = start_http_server(run.prometheus_port, run.prometheus_host, registry)
        except OSError as error:
            raise OSError(
                f"cannot listen on {run.prometheus_host}:{run.prometheus_port} ({error}); change "
                f"tracking.prometheus_host or tracking.prometheus_port"
            ) from error

        self.port: int = self._server.server_port
        _log.info("Prometheus: metrics are at http://%s:%d/metrics", run.prometheus_host, self.port)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._collector.update(metrics, step)

    def close(self, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
