"""Tables of docs/verification.md that compare the memory plan with dry runs, one for each run in configs/."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "verification.md"
_TABLES = re.compile(
    r"(?<=<!-- tables: written by tests/soak/test_rehearsed_memory.py -->\n\n).*(?=\n<!-- end of tables -->)",
    re.DOTALL,
)


def read_tables() -> dict[str, str]:
    """Return the table of each run by the run's name."""
    found = _TABLES.search(DOCUMENT.read_text(encoding="utf-8"))
    assert found is not None, f"{DOCUMENT} has no place for the tables"
    sections = [section.partition("\n\n") for section in found[0].split("### ") if section]
    return {name: table.rstrip("\n") for name, _, table in sections}


def write_table(run: str, table: str) -> None:
    """Replace or add the table of a run. The tables are in the order of the runs' names."""
    tables = read_tables() | {run: table}
    text = "\n".join(f"### {name}\n\n{tables[name]}\n" for name in sorted(tables))
    DOCUMENT.write_text(_TABLES.sub(lambda _: text, DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
