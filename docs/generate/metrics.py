"""Generates docs/metrics.md from the table in megarl/tracking/metric_table.py."""

from __future__ import annotations

from megarl.tracking.metric_table import METRICS

_HEAD = """# Metrics

This page lists every metric that a run logs to `metrics.jsonl` and to its [loggers](tracking.md). Metrics have the names of other
frameworks where those exist. A step logs only the metrics that apply to it: `critic/vf_*` requires a critic, and `val/*` a validation in
that step.

`{mean,max}` stands for each of these words, `<name>` for a name that depends on the run, and `[/<source>]` is optional. The unit `share`
is a fraction between 0 and 1.
"""


def metrics_page() -> str:
    sections = []
    for title, rows in METRICS.items():
        lines = [f"| `{row.pattern}` | {row.unit} | {row.meaning} |" for row in rows]
        sections.append(
            "\n".join([f"## {title}", "", "| metric | unit | description |", "|---|---|---|", *lines])
        )

    return "\n".join([_HEAD, "\n\n".join(sections), ""])
