"""Tables and lines of every command: they fit a terminal, and a pipe or a log gets each row on one line,
unpadded, for grep."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import IO, cast

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000  # columns; more than any row has


class _Unpadded:
    """A text stream without the blanks at the ends of lines, with which rich fills tables. Finds the standard
    stream at each write."""

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, text: str) -> int:
        return cast(int, getattr(sys, self._name).write(re.sub(r" +(?=\n)", "", text)))

    def __getattr__(self, attribute: str) -> object:
        return getattr(getattr(sys, self._name), attribute)


def output_console(stderr: bool = False) -> Console:
    """The console of a command: as wide as its terminal, or as COLUMNS says; without either nothing is
    wrapped, cut or padded."""
    console = Console(stderr=stderr)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(file=cast("IO[str]", _Unpadded("stderr" if stderr else "stdout")), width=UNLIMITED)


class _Table(Table):
    """A table whose title and caption are lines of their own width where that is not limited."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if console.width >= UNLIMITED:
            self.title, self.caption = (
                Text(part, no_wrap=True, overflow="ignore") if isinstance(part, str) else part
                for part in (self.title, self.caption)
            )
        yield from super().__rich_console__(console, options)


def table(title: str, *columns: str, wraps: str | None = None) -> Table:
    """One column is for text that continues in the next line: `wraps`, or the last."""
    drawn = _Table(
        title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
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


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """As it is, also where it is longer than the window."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)
