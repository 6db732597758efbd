"""Test the endpoint for Prometheus: a real scrape, parsed by Prometheus' own client."""

from __future__ import annotations

import logging
import math
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megarl.tracking.loggers import Tracker
from megarl.tracking.prometheus_endpoint import PrometheusEndpoint, prometheus_name
from megarl.tracking.tracked_run import TrackedRun
from megarl.trainers.monitor import Position

type Samples = dict[tuple[str, str], float]  # (name, value of the only label or "") -> value


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, "".join(sample.labels.values())
            assert key not in found
            found[key] = sample.value
    return found


def test_a_scrape_has_the_newest_values_and_the_position(tmp_path: Path) -> None:
    position = Position()
    endpoint = PrometheusEndpoint(TrackedRun(output_dir=tmp_path, resumed_after=4, now=position.now))
    assert scrape(endpoint.port) == {("megarl_step", ""): 4.0, ("megarl_recoveries_total", ""): 0.0}

    position.step = 5
    position.phases += ["step", "update_actor"]
    endpoint.log({"actor/lr": 0.5, "val/gsm8k/pass@4": 0.25, "recovery/num_recoveries": 2.0}, 5)
    position.step = 6
    endpoint.log({"actor/lr": 0.125, "actor/grad_norm": math.nan, "recovery/num_recoveries": 1.0}, 6)
    found = scrape(endpoint.port)
    assert math.isnan(found.pop(("megarl_actor_grad_norm", "actor/grad_norm")))
    assert found == {
        ("megarl_step", ""): 6.0,
        ("megarl_phase", "update_actor"): 1.0,
        ("megarl_recoveries_total", ""): 3.0,
        ("megarl_recovery_num_recoveries", "recovery/num_recoveries"): 1.0,
        ("megarl_actor_lr", "actor/lr"): 0.125,
        ("megarl_val_gsm8k_pass_4", "val/gsm8k/pass@4"): 0.25,
    }

    endpoint.close(failed=False)
    with pytest.raises(urllib.error.URLError):
        scrape(endpoint.port)


def test_metrics_of_one_name_differ_in_their_label(tmp_path: Path) -> None:
    endpoint = PrometheusEndpoint(TrackedRun(output_dir=tmp_path))
    endpoint.log({"reward/a-b/mean": 1.0, "reward/a b/mean": 2.0, 'reward/"ü"\\/mean': 3.0}, 1)
    found = scrape(endpoint.port)
    endpoint.close(failed=False)
    assert found["megarl_reward_a_b_mean", "reward/a-b/mean"] == 1.0
    assert found["megarl_reward_a_b_mean", "reward/a b/mean"] == 2.0
    assert found[prometheus_name('reward/"ü"\\/mean'), 'reward/"ü"\\/mean'] == 3.0


def test_the_endpoint_is_on_loopback_unless_named(tmp_path: Path) -> None:
    endpoint = PrometheusEndpoint(TrackedRun(output_dir=tmp_path, prometheus_host="127.0.0.2"))
    with pytest.raises(urllib.error.URLError):
        scrape(endpoint.port)
    endpoint.close(failed=False)


def test_a_port_in_use_is_reported_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, caplog.at_level(logging.WARNING):
        port = server.getsockname()[1]
        tracker = Tracker(["prometheus", "jsonl"], TrackedRun(output_dir=tmp_path, prometheus_port=port))
        tracker.log({"a": 1.0}, 1)
        tracker.close()
    assert len(caplog.messages) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in caplog.messages[0]
    assert "tracking.prometheus_port" in caplog.messages[0]
    assert (tmp_path / "metrics.jsonl").exists()
