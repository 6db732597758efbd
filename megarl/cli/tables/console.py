"""Tables and lines of all commands.

They fit a terminal. In a pipe or a log, each row is one unpadded line, for grep.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import IO, cast

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000  # columns; more than any row has


class _Unpadded:
    """A text stream that removes the trailing spaces with which rich pads tables.

    It looks up the standard stream at each write.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, text: str) -> int:
        return cast(int, getattr(sys, self._name).write(re.sub(r" +(?=\n)", "", text)))

    def __getattr__(self, attribute: str) -> object:
        return getattr(getattr(sys, self._name), attribute)


def output_console(stderr: bool = False) -> Console:
    """Return the console of a command, as wide as its terminal or as COLUMNS.

    Without either, nothing is wrapped, truncated or padded.
    """
    console = Console(stderr=stderr)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(file=cast("IO[str]", _Unpadded("stderr" if stderr else "stdout")), width=UNLIMITED)


class _Table(Table):
    """A table whose title and caption are not wrapped if the width is unlimited."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if console.width >= UNLIMITED:
            self.title, self.caption = (
                Text(part, no_wrap=True, overflow="ignore") if isinstance(part, str) else part
                for part in (self.title, self.caption)
            )
        yield from super().__rich_console__(console, options)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str | None = None,
    wraps: str | None = None,
) -> Table:
    """Return a table. Text in the column `wraps`, or in the last one, wraps to the next line."""
    drawn = _Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in columns:
        drawn.add_column(column, overflow="fold", no_wrap=column != (wraps or columns[-1]))
    for row in rows:
        drawn.add_row(*row)
    return drawn


def table_of_numbers(
    title: str, columns: Mapping[str, Sequence[str]], names: Sequence[str], caption: str | None = None
) -> Table:
    """Return a table of right-aligned numbers with one column per role or pool.

    Args:
        names: The names of the rows.
    """
    rows = zip(names, *columns.values(), strict=True)
    drawn = table(title, ("", *columns), rows, caption=caption, wraps="")
    for column in drawn.columns[1:]:
        column.justify = "right"
    return drawn


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print the text unchanged, also if it is longer than the window."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def print_lines(console: Console, lines: Iterable[str], label: str = "", style: str | None = None) -> None:
    """Print each line after a label, such as `warning: `."""
    for line in lines:
        print_line(console, f"{label}{line}", style=style)


@contextmanager
def progress_line(begin: str) -> Generator[Callable[[str], None]]:
    """Print the progress to standard error, so that the tables can be piped.

    Yields a function that shows a text with the time that has elapsed since the begin.
    """
    console = output_console(stderr=True)
    status = console.status(begin)
    begin_s = time.monotonic()

    def show(text: str) -> None:
        line = f"{text}, {time.monotonic() - begin_s:.0f} s elapsed"
        if console.is_terminal:
            status.update(line)
        else:
            print_line(console, line)

    if not console.is_terminal:
        print_line(console, begin)
    with status if console.is_terminal else nullcontext():
        yield show
