"""List, draw and judge the figures of earlier runs: learning curves, and ratios of benchmarks.

    python -m benchmarks.history show                           # the rows of this folder
    python -m benchmarks.history plot --output build/history.png
    python -m benchmarks.history check                          # the newest row of each command
    python -m benchmarks.history check --run outputs/quickstart # and a run, which becomes the newest row

`make quickstart` ends with the last command, unless it has ARGS. With MEGARL_HISTORY=benchmarks/history, it also
writes the row to that folder, as `make test` and benchmarks do. `check` returns 1 if a curve leaves its band or a
ratio misses its target, and names the commits between the last good row and the bad one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.history.rows import (
    FOLDER,
    ROOT,
    VARIABLE,
    Row,
    faults,
    read_rows,
    row_of_quickstart,
    verdicts,
    write_row,
)
from megarl.tracking.metrics_file import Points

# A panel has eight colors.
_DRAWN = 8


def show(rows: Mapping[str, Sequence[Row]]) -> None:
    """Print a table of each command, from the oldest row to the newest."""
    console = Console()
    for command, of_command in rows.items():
        table = Table("code", "date, UTC", "processor", "values", "judged", title=command)
        for row in of_command:
            table.add_row(row.code, row.date, row.processor, _values(row), "bad" if faults(row) else "good")
        console.print(table)


def _values(row: Row) -> str:
    curves = [
        f"{name} {' '.join(f'{value:.3f}' for value in curve.values())}" for name, curve in row.curves.items()
    ]
    ratios = [f"{name} {ratio['value']:g}" for name, ratio in row.ratios.items()]
    figures = [f"{name} {value:g}" for name, value in row.figures.items()]
    return "; ".join([*curves, *ratios, *figures])


def plot(rows: Mapping[str, Sequence[Row]], output: Path) -> None:
    """Draw the newest curves of each command over each other, and its ratios from row to row."""
    # Imported here, because matplotlib takes a second.
    from megarl.cli.inspect.plot import Panel, draw_panels

    panels: list[Panel] = []
    series: dict[str, Points] = {}
    for command, of_command in rows.items():
        for curve in of_command[-1].curves:
            labels: dict[str, str] = {}
            for row in of_command[-_DRAWN:]:
                name = f"{command} {curve} {row.code} {row.date}"
                labels[name] = f"{row.code}, {row.processor}"
                values = row.curves.get(curve, {})
                series[name] = Points(list(values), list(values.values()))
            panels.append(Panel(title=f"{command}: {curve}", curves=labels, sparse=frozenset(labels)))

        for ratio in of_command[-1].ratios:
            name = f"{command} {ratio}"
            values = [row.ratios[ratio]["value"] for row in of_command if ratio in row.ratios]
            series[name] = Points(list(range(1, len(values) + 1)), values)
            panels.append(
                Panel(
                    title=f"{command}: {ratio}", curves={name: ratio}, sparse=frozenset({name}), along="row"
                )
            )

    output.parent.mkdir(parents=True, exist_ok=True)
    draw_panels("History", panels, series, output)
    print(f"drawn to {output}")


def check(rows: Mapping[str, Sequence[Row]]) -> int:
    found = verdicts(rows)
    for verdict in found:
        print(f"history: {verdict}", file=sys.stderr)
    if not found:
        print(f"history: {', '.join(rows)}: curves within their bands, ratios at their targets")
    return 1 if found else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.history",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("show", "plot", "check"))
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="of the rows; the default is benchmarks/history"
    )
    parser.add_argument("--run", type=Path, metavar="RUN_DIR", help="a quickstart, as the newest row")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, metavar="DIR", help="the checkout that made the run"
    )
    parser.add_argument("--output", type=Path, default=Path("build/history.png"), help="an image, for plot")
    given = parser.parse_args(arguments)

    try:
        rows = read_rows(given.folder)
        if given.run is not None:
            row = row_of_quickstart(given.run, given.tree)
            rows = rows | {row.command: [*rows.get(row.command, []), row]}
            if VARIABLE in os.environ:
                write_row(row)
            # The other commands are not those of this run.
            rows = {row.command: rows[row.command]}
    except ValueError as error:
        print(f"history: {error}", file=sys.stderr)
        return 2

    if given.what == "check":
        return check(rows)
    if given.what == "plot":
        plot(rows, given.output)
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
