"""Record what becomes of each test as soon as it ends, in a file that survives whatever ends the process.

    python -m pytest -p tests.gpu.record --record-piece latent --record-to FILE tests/gpu/test_engine.py

A file of records has one JSON object per line. The last line of a test tells what became of it: a test that
began and did not end was running when its process, or the machine, was lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.gpu.pieces import piece_of

BEGAN = "began"
PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
_MOST_SAID = 400  # characters of a failure


class Record(NamedTuple):
    """What became of a test or benchmark, or of a whole piece.

    Attributes:
        test: Its identifier; empty for the piece.
        said: Why it was skipped or failed.
        numbers: One line each; for a piece, the machine.
    """

    piece: str
    test: str
    outcome: str
    said: str = ""
    numbers: Sequence[str] = ()
    seconds: float = 0.0


def write_record(path: Path, record: Record) -> None:
    """Append a record, and return when it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record._asdict()) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path) -> dict[tuple[str, str], Record]:
    """Return the last record of each piece and test. A last line that was cut off is left out."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines(keepends=True)
    records = [Record(**json.loads(line)) for line in lines if line.endswith("\n")]
    return {(record.piece, record.test): record for record in records}


def forget(path: Path, pieces: Sequence[str]) -> None:
    """Remove the records of these pieces, and a line that was cut off, which no other may follow."""
    kept = [record for record in read_records(path).values() if record.piece not in pieces]
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    for record in kept:
        write_record(partial, record)
    if kept:
        partial.replace(path)
    else:
        path.unlink(missing_ok=True)


# ---- the plugin of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-to", type=Path)
    parser.addoption("--record-piece", help="run only tests of tests/gpu that belong to this piece")
    parser.addoption("--record-keep", action="store_true", help="leave out tests whose end is recorded")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(config))


class _Recorder:
    """Write the records of one run of pytest.

    Args:
        config: Its options name the file and the piece.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._path: Path = config.option.record_to
        self._piece: str = config.option.record_piece
        known = read_records(self._path) if config.option.record_keep else {}
        self._known: Mapping[str, Record] = {
            record.test: record for record in known.values() if record.piece == self._piece
        }

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = list(self._kept(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        # A test that did not end may have hung, so that the others come first.
        items[:] = sorted(kept, key=lambda item: item.nodeid in self._known)

    def _kept(self, items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
        for item in items:
            if item.nodeid.startswith("tests/gpu/") and piece_of(item.nodeid) != self._piece:
                continue
            if item.nodeid not in self._known or self._known[item.nodeid].outcome == BEGAN:
                yield item

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        write_record(self._path, Record(self._piece, nodeid, BEGAN))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome: str = report.outcome
        if report.when == "setup" and outcome == PASSED:
            return
        # What goes wrong after a test that passed counts as well.
        if report.when == "teardown" and outcome == PASSED:
            return
        numbers = [f"{name}: {value}" for name, value in report.user_properties]
        record = Record(
            self._piece, report.nodeid, outcome, _said(report), numbers, round(report.duration, 1)
        )
        write_record(self._path, record)


def _said(report: pytest.TestReport) -> str:
    """Return the reason of a skip, or the message of a failure."""
    found: Any = report.longrepr
    if report.outcome == SKIPPED:
        return str(found[2]).removeprefix("Skipped: ")
    if report.outcome == PASSED:
        return ""
    crash = getattr(found, "reprcrash", None)
    return (str(found) if crash is None else str(crash.message))[:_MOST_SAID]
