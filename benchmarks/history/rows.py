"""Rows of the history: what a command measured, with the commit, the date and the processor.

A command ends with `record`, which appends a row to the folder in MEGARL_HISTORY, and without that variable
writes nothing. `faults` judges a row, and `verdicts` compares the newest row of each command with earlier ones:

    measured -> record -> FOLDER/<command>.jsonl -> read_rows -> verdicts -> `python -m benchmarks.history check`

Only curves and ratios are judged. Seconds depend on the machine and its load, and are kept as figures.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from megarl.machine.files import parse_json
from megarl.tracking.metrics_file import read_metrics
from megarl.tracking.run_files import METRICS_FILE

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
VARIABLE = "MEGARL_HISTORY"
QUICKSTART = "make quickstart"
SCORE = "held-out score"
_SCORE_METRIC = "val/score/mean"

# The lowest and highest value of a curve by step. The rows of the quickstart are bitwise equal on one kind of
# processor. The band is three standard errors of 512 sums around them, and wider by the difference between two
# kinds: two points before training, and four points after it.
BANDS: Mapping[str, Mapping[str, Mapping[int, tuple[float, float]]]] = {
    QUICKSTART: {
        SCORE: {0: (0.45, 0.63), 20: (0.75, 0.92), 40: (0.83, 0.99), 60: (0.87, 1.0), 70: (0.88, 1.0)}
    }
}
AT_LEAST = "at_least"
AT_MOST = "at_most"

Ratio = Mapping[str, float]  # `value`, and its target: `at_least` or `at_most`


class Row(NamedTuple):
    """A row, which is a line of JSON in the history.

    Attributes:
        commit: The commit of the checkout; None without git.
        has_changes: Whether files of the checkout differed from the commit.
        date: The end of the run, in UTC.
        processor: Its kind and the number of cores. Runs are bitwise repeatable on one kind.
        curves: Values by step, by the name of the curve.
        figures: What is only shown, such as seconds and numbers of tests.
    """

    command: str
    commit: str | None
    has_changes: bool
    date: str
    processor: str
    curves: Mapping[str, Mapping[int, float]]
    ratios: Mapping[str, Ratio]
    figures: Mapping[str, float]

    @property
    def code(self) -> str:
        """The commit in short, and whether the code differed from it."""
        if self.commit is None:
            return "code without git"
        return self.commit[:8] + (" with changes" if self.has_changes else "")


def at_least(value: float, target: float) -> Ratio:
    return {"value": round(value, 4), AT_LEAST: target}


def at_most(value: float, target: float) -> Ratio:
    return {"value": round(value, 4), AT_MOST: target}


def record(command: str, *, ratios: Mapping[str, Ratio] | None = None, **figures: float) -> None:
    """Append a row of this checkout to the folder in MEGARL_HISTORY, if it is set."""
    if VARIABLE in os.environ:
        write_row(_row(command, ROOT, datetime.now(UTC), {}, ratios or {}, figures))


def row_of_quickstart(run_dir: Path, tree: Path = ROOT) -> Row:
    """Return the row of a quickstart that a checkout has run.

    Raises:
        MetricsFileError: The run has no metrics.
    """
    points = read_metrics(run_dir / METRICS_FILE).get(_SCORE_METRIC)
    curve = {} if points is None else dict(zip(points.steps, points.values, strict=True))
    ended = datetime.fromtimestamp((run_dir / METRICS_FILE).stat().st_mtime, UTC)
    return _row(QUICKSTART, tree, ended, {SCORE: curve}, {}, {})


def _row(
    command: str,
    tree: Path,
    date: datetime,
    curves: Mapping[str, Mapping[int, float]],
    ratios: Mapping[str, Ratio],
    figures: Mapping[str, float],
) -> Row:
    commit, has_changes = _state(tree)
    when = date.isoformat(sep=" ", timespec="minutes").removesuffix("+00:00")
    processor = f"{processor_kind()} x {len(os.sched_getaffinity(0))}"
    return Row(command, commit, has_changes, when, processor, curves, ratios, figures)


def _state(tree: Path) -> tuple[str | None, bool]:
    """Return the commit of a checkout, and whether tracked files differ from it."""
    try:
        top = _git(tree, "rev-parse", "--show-toplevel")
        # A folder without git of its own may lie in another repository.
        if Path(top).resolve() != tree.resolve():
            return None, False
        return _git(tree, "rev-parse", "HEAD"), bool(_git(tree, "status", "--porcelain", "-uno"))
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None, False


def _git(tree: Path, *arguments: str) -> str:
    command = ["git", "-C", str(tree), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def processor_kind() -> str:
    """Return the vendor, family and model of the processor, by which matrix libraries select their kernels."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())

    named = [facts[name] for name in ("vendor_id", "cpu family", "model") if name in facts]
    return "-".join(named or [platform.machine()])


def write_row(row: Row) -> None:
    """Append a row to the file of its command in the folder that MEGARL_HISTORY names."""
    folder = Path(os.environ[VARIABLE])
    folder.mkdir(parents=True, exist_ok=True)
    # `make quickstart` is in quickstart.jsonl, and `benchmarks.engine` in engine.jsonl.
    name = row.command.split()[-1].rpartition(".")[2]
    with (folder / f"{name}.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row._asdict()) + "\n")


def read_rows(folder: Path = FOLDER) -> dict[str, list[Row]]:
    """Return the rows of each command, in the order in which they were written.

    Raises:
        ValueError: A line is not a row.
    """
    rows: dict[str, list[Row]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                row = Row(**parse_json(line))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{file}, line {number}: not a row of the history ({error}); fix or delete it"
                ) from error
            # JSON has no integers as keys.
            curves = {
                name: {int(step): value for step, value in dict[Any, float](curve).items()}
                for name, curve in row.curves.items()
            }
            rows.setdefault(row.command, []).append(row._replace(curves=curves))
    return rows


def faults(row: Row) -> list[str]:
    """Return what is wrong with a row: a curve outside its band, or a ratio that misses its target."""
    found = []
    for name, band in BANDS.get(row.command, {}).items():
        curve = row.curves.get(name, {})
        for step, (lowest, highest) in band.items():
            if step not in curve:
                found.append(f"{name} has no value at step {step}")
            elif not lowest <= curve[step] <= highest:
                found.append(
                    f"{name} at step {step} is {curve[step]:.3f}, outside its band of {lowest:g} to {highest:g}"
                )

    for name, ratio in row.ratios.items():
        value = ratio["value"]
        if AT_LEAST in ratio and not value >= ratio[AT_LEAST]:
            found.append(f"{name} is {value:g}, below its target of {ratio[AT_LEAST]:g}")
        if AT_MOST in ratio and not value <= ratio[AT_MOST]:
            found.append(f"{name} is {value:g}, above its limit of {ratio[AT_MOST]:g}")
    return found


def verdicts(rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return a text for each command whose newest row has faults, with the commits that may have caused them."""
    return [
        f"{command}, {of_command[-1].code}: {'; '.join(found)}\n  {_cause(of_command)}"
        for command, of_command in rows.items()
        if (found := faults(of_command[-1]))
    ]


def _cause(rows: Sequence[Row]) -> str:
    """Name the commits between the last good row and the first bad row after it."""
    good = [number for number, row in enumerate(rows) if not faults(row)]
    if not good:
        return "no earlier row is good"
    last, first = rows[good[-1]], rows[good[-1] + 1]
    if last.commit is None or first.commit is None:
        return f"the last good row is of {last.date} ({last.code}), the first bad one of {first.date} ({first.code})"
    if last.commit == first.commit:
        return f"{last.code} is good: see the changes since then, `git diff {last.commit[:8]}`"
    changed = f", and the changes of {first.code}" if first.has_changes else ""
    return (
        f"the last good row is of {last.code}, the first bad one of {first.code}: "
        f"`git log {last.commit[:8]}..{first.commit[:8]}`{changed}"
    )
