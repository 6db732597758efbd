"""Encode `timeline.json` for the page, as columns instead of one mapping per span."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from megarl.tracking.report.phase_names import phase_name

_MAX_SPANS = 60_000  # the newest ones
_UNIT_US = 100.0  # starts and durations are integer multiples of this


def timeline_part(path: Path) -> dict[str, Any]:
    """Read the timeline of a run.

    Returns:
        `rows`, the rows of the drawing, sorted by pool, and `names`, the readable names of spans. Spans are
        sorted by start; each has a place in the lists `row`, `name` (index into `names`), `step`, `length`,
        and `gap` (the time since the start of the previous span). `length` and `gap` are in units of 0.1 ms.
        If the file is damaged, `problem` gives the reason.
    """
    try:
        return _columns(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = next(iter(str(error).splitlines()), type(error).__name__)
        return {"rows": [], "names": [], "row": [], "problem": f"{path}: cannot be read ({problem})"}


def _columns(events: list[dict[str, Any]]) -> dict[str, Any]:
    pools = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    # Keep the rows of a pool together.
    order = sorted(threads, key=lambda place: (pools[place[0]], threads[place]))
    row_of = {place: number for number, place in enumerate(order)}
    # A long run has more spans than a page can draw; keep the latest.
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])[
        -_MAX_SPANS:
    ]
    span_names = [phase_name(span["name"]) for span in spans]
    names = sorted(set(span_names))
    name_of = {name: number for number, name in enumerate(names)}
    # Round the starts before taking differences, so that rounding errors do not accumulate.
    starts = [round(span["ts"] / _UNIT_US) for span in spans]

    return {
        "rows": [{"pool": pools[place[0]], "label": threads[place]} for place in order],
        "names": names,
        "row": [row_of[span["pid"], span["tid"]] for span in spans],
        "name": [name_of[name] for name in span_names],
        "step": [int(span["args"]["step"]) for span in spans],
        "gap": [start - before for before, start in pairwise([*starts[:1], *starts])],
        "length": [round(span["dur"] / _UNIT_US) for span in spans],
    }
