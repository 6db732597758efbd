"""Encode `timeline.json` for the page, as columns instead of one mapping per span."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

_MAX_SPANS = 60_000  # the newest ones
_UNIT_US = 100.0  # starts and durations are integer multiples of this

# Phase of the driver or method of a worker -> display name. Methods that do the same work share a name.
PHASE_NAMES = {
    # Phases of the driver.
    "step": "step",
    "gen": "wait for samples",
    "adv": "compute advantages",
    "update_actor": "train actor",
    "update_weights": "sync weights",
    "testing": "validate",
    "save_checkpoint": "save checkpoint",
    # Every worker.
    "__init__": "start",
    "visible_gpus": "list GPUs",
    "resident_memory_gb": "measure memory",
    # Models that are trained or that score samples.
    "measure_speed": "measure speed",
    "log_probs": "compute log-probs",
    "values": "compute values",
    "update": "train",
    "update_scored": "train",
    "score_conversations": "score",
    "restore_state": "onload",
    "offload_state": "offload",
    "load_checkpoint": "load checkpoint",
    "begin_save": "save checkpoint",
    "save_is_written": "check checkpoint",
    "finish_save": "commit checkpoint",
    "begin_snapshot": "begin snapshot",
    "await_snapshot": "await snapshot",
    "load_snapshot": "load snapshot",
    "wanted_tensors": "load snapshot",
    "load_resharded": "load snapshot",
    "begin_profile": "begin profile",
    "end_profile": "end profile",
    "begin_trace": "begin trace",
    "end_trace": "end trace",
    # The sending side of a weight sync.
    "weights_are_on_cuda": "plan weight sync",
    "publish_weight_address": "connect weight sync",
    "send_weights": "send weights",
    "continue_weights": "send weights",
    "write_weight_files": "write weights",
    "weight_checksums": "checksum weights",
    "forget_acknowledged_weights": "plan weight sync",
    "leave_weights": "disconnect weight sync",
    "end_weights": "disconnect weight sync",
    # Engines.
    "submit_and_poll": "generate",
    "abort": "cancel requests",
    "interrupt": "wake",
    "wake": "onload",
    "wake_cache": "onload KV cache",
    "sleep": "offload",
    "needed_slices": "plan weight sync",
    "join_weights": "connect weight sync",
    "receive_weights": "receive weights",
    "load_folder": "load weights",
    "checksums": "checksum weights",
    "weight_version": "check weight version",
    "acknowledged_version": "check weight version",
    "process_ids": "list processes",
    # Reward functions.
    "score": "score",
    "endpoint": "start judge",
    "serve": "serve judge",
    "use_judges": "connect judges",
    "begin": "start scoring",
    "scored": "collect scores",
    "forget": "drop scores",
    "finish": "collect scores",
    # Environments of agents.
    "exchange": "run environment",
}
# Also the methods that older timelines have.
_NAMES = PHASE_NAMES | {
    "reserve_weight_group": "connect weight sync",
    "join_weight_group": "connect weight sync",
    "serve_weights": "prepare weights",
}


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


def phase_name(span_name: str) -> str:
    """Return the readable name of a span. Phases that a user's own worker names keep their names."""
    return _NAMES.get(span_name, span_name)
