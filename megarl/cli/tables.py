"""Tables that are read at 80 columns, and as well in a log: no word or number is broken, so paths are lines beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def table(title: str, *columns: str, wraps: str | None = None) -> Table:
    """One column is for text that goes on in the next line: `wraps`, or the last."""
    drawn = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        drawn.add_column(column, overflow="fold", no_wrap=column != (wraps or columns[-1]))
    return drawn


def table_of_numbers(title: str, columns: Mapping[str, Sequence[str]], rows: Sequence[str]) -> Table:
    """A column for each role or pool, of which there are few; the rows have names."""
    drawn = table(title, "", *columns, wraps="")
    for column in drawn.columns[1:]:
        column.justify = "right"
    for number, name in enumerate(rows):
        drawn.add_row(name, *(cells[number] for cells in columns.values()))
    return drawn


def counted(number: int, name: str) -> str:
    """As `1 rank` and `2 ranks`."""
    plural = f"{name}es" if name.endswith("s") else f"{name}s"
    return f"{number:,} {name if number == 1 else plural}"


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """As it is, also where it is longer than the window."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)
