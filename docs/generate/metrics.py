"""Generate the tables of metrics in docs/tracking.md from docs/generate/metric_table.py."""

from __future__ import annotations

from docs.generate.metric_table import METRICS


def metric_tables() -> str:
    sections = []
    for title, rows in METRICS.items():
        lines = [f"| `{row.pattern}` | {row.unit} | {row.meaning} |" for row in rows]
        # A title may be that of a section of the written part.
        sections.append(
            "\n".join(
                [f"### Metrics: {title}", "", "| metric | unit | description |", "|---|---|---|", *lines]
            )
        )

    return "\n\n".join(sections)
