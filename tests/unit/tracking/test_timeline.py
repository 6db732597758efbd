"""Test the Chrome trace: pools are processes, ranks are threads, and the file is complete whenever it is
read."""

from __future__ import annotations

import json

from megarl.tracking.report.run_folder import timeline_part
from megarl.tracking.timeline import Span, Timeline


def _read(path):
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event["ph"] == "X"], [
        event for event in events if event["ph"] == "M"
    ]


def test_spans_become_events_in_microseconds_on_named_rows(tmp_path):
    trace = Timeline(tmp_path)
    trace.add(
        [
            Span("train", "actor", 0, "update_actor", 10.0, 12.5),
            Span("train", "actor", 1, "update_actor", 10.25, 12.5),
        ],
        step=3,
    )
    trace.add([Span("rollout", "rollout", 0, "generate", 12.5, 13.0)], step=4)
    trace.write()
    spans, names = _read(tmp_path / "timeline.json")
    assert [(span["name"], span["ts"], span["dur"], span["args"]["step"]) for span in spans] == [
        ("update_actor", 10.0e6, 2.5e6, 3),
        ("update_actor", 10.25e6, 2.25e6, 3),
        ("generate", 12.5e6, 0.5e6, 4),
    ]
    processes = {name["pid"]: name["args"]["name"] for name in names if name["name"] == "process_name"}
    threads = {
        (name["pid"], name["tid"]): name["args"]["name"] for name in names if name["name"] == "thread_name"
    }
    assert [processes[span["pid"]] for span in spans] == ["pool train", "pool train", "pool rollout"]
    assert [threads[span["pid"], span["tid"]] for span in spans] == [
        "actor rank 0",
        "actor rank 1",
        "rollout rank 0",
    ]


def test_counts_become_curves_of_a_row_of_their_own(tmp_path):
    trace = Timeline(tmp_path)
    trace.count("prompts", {"waiting": 3, "generating": 1.5}, 2.0)
    trace.add([Span("train", "actor", 0, "update_actor", 10.0, 12.5)], step=3)
    trace.write()
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    (count,) = [event for event in events if event["ph"] == "C"]
    assert (count["name"], count["ts"], count["args"]) == (
        "prompts",
        2.0e6,
        {"waiting": 3, "generating": 1.5},
    )
    assert count["pid"] not in {event["pid"] for event in events if event["ph"] == "X"}

    # of the report page
    assert [row["label"] for row in timeline_part(tmp_path / "timeline.json")["rows"]] == ["actor rank 0"]


def test_roles_that_share_a_pool_and_rank_have_rows_of_their_own(tmp_path):
    trace = Timeline(tmp_path)
    trace.add(
        [Span("critic", "critic", 0, "values", 0.0, 2.0), Span("critic", "reward", 0, "score", 1.0, 3.0)],
        step=1,
    )
    trace.write()
    spans, _ = _read(tmp_path / "timeline.json")
    assert spans[0]["pid"] == spans[1]["pid"]

    # overlapping spans on one row would be drawn as nested
    assert spans[0]["tid"] != spans[1]["tid"]


def test_every_write_leaves_a_whole_file_and_nothing_else(tmp_path):
    trace = Timeline(tmp_path)
    trace.write()
    assert _read(tmp_path / "timeline.json") == ([], [])

    for step in range(1, 4):
        trace.add([Span("driver", "driver", 0, "step", float(step), step + 0.5)], step)
        trace.write()
        assert len(_read(tmp_path / "timeline.json")[0]) == step

    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]


def test_a_long_run_keeps_its_latest_events(tmp_path):
    trace = Timeline(tmp_path, max_events=2)
    for step in range(1, 6):
        trace.add([Span("driver", "driver", 0, "step", float(step), step + 0.5)], step)
    trace.write()
    assert [span["args"]["step"] for span in _read(tmp_path / "timeline.json")[0]] == [4, 5]
