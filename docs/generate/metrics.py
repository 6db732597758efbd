"""docs/metrics.md, from the table in megarl/tracking/metric_table.py."""

from __future__ import annotations

from megarl.tracking.metric_table import METRICS

_HEAD = """# Metrics

Every metric that a run logs to `metrics.jsonl` and to its [loggers](tracking.md). Names that other frameworks use are kept where
they exist. A step logs only what applies to it: no `critic/vf_*` without a critic, no `val/*` in a step without validation.

`{mean,max}` stands for each of these words, `<name>` for a name that depends on the run, and `[/<source>]` may be absent. A share is
between 0 and 1.
"""


def metrics_page() -> str:
    sections = []
    for title, rows in METRICS.items():
        lines = [f"| `{row.pattern}` | {row.unit} | {row.meaning} |" for row in rows]
        sections.append(
            "\n".join([f"## {title}", "", "| metric | unit | meaning |", "|---|---|---|", *lines])
        )

    return "\n".join([_HEAD, "\n\n".join(sections), ""])
