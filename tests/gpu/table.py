"""Run what needs a GPU, in pieces of at most four minutes, and print one table of it: `make gpu`.

    python -m tests.gpu.table                      # all pieces, the largest doubts first
    python -m tests.gpu.table latent delta         # some of them, or --piece latent
    python -m tests.gpu.table --list               # the pieces, their minutes, and what they need
    python -m tests.gpu.table --resume             # what has not ended yet
    python -m tests.gpu.table --show               # the table of earlier calls
    python -m tests.gpu.table --rehearse           # the same code on a CPU, with tiny shapes

Each piece runs in a process of its own, so that one that corrupts its GPU context affects no other. What
becomes of each test is written to a file as soon as it ends (record.py), so nothing is lost if a call is ended
early: a later call shows it or continues. The numbers of a test are its properties (`record_property`); those
of a benchmark are the last lines that it prints, after the last empty one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.gpu.pieces import PIECES, Piece, missing_for
from tests.gpu.record import (
    BEGAN,
    FAILED,
    PASSED,
    SKIPPED,
    Record,
    forget,
    read_records,
    write_record,
)

ROOT = Path(__file__).parents[2]
NO_GPU = "torch sees no GPU"
LIMIT_S = 240  # of a piece
REHEARSAL_LIMIT_S = 1800  # of a piece on a CPU
_NO_TESTS = 5  # pytest's exit code if all tests are deselected


def run_piece(name: str, path: Path, where: str, resumes: bool, rehearses: bool) -> None:
    """Run a piece, and record what becomes of it."""
    piece = PIECES[name]
    write_record(path, Record(name, "", BEGAN, "", [where]))
    started_s = time.monotonic()
    if piece.benchmark and not rehearses:
        said = _run_benchmark(name, piece, path)
    else:
        said = _run_tests(name, piece, path, resumes, rehearses)
    outcome = FAILED if said else PASSED
    seconds = round(time.monotonic() - started_s, 1)
    write_record(path, Record(name, "", outcome, said, [where], seconds))


def _run_tests(name: str, piece: Piece, path: Path, resumes: bool, rehearses: bool) -> str:
    """Return what went wrong apart from tests that failed."""
    files = piece.rehearsal if rehearses else [f"tests/gpu/{file}" for file in piece.files]
    options = ["-p", "tests.gpu.record", f"--record-to={path}", f"--record-piece={name}"]
    command = [sys.executable, "-m", "pytest", "-n", "0", *options, *files]
    status = _status(
        [*command, "--record-keep"] if resumes else command,
        None,
        REHEARSAL_LIMIT_S if rehearses else LIMIT_S,
        {"MEGARL_REHEARSAL": "1"} if rehearses else {},
    )
    # 1: tests have failed, each of which has a record.
    return "" if status in (0, 1, _NO_TESTS) else f"pytest ended with {status}"


def _run_benchmark(name: str, piece: Piece, path: Path) -> str:
    module, *options = piece.benchmark
    started_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        status = _status([sys.executable, "-m", module, *options], output, LIMIT_S, {})
        output.seek(0)
        printed = output.read()

    print(printed, flush=True)
    numbers = printed.strip().rpartition("\n\n")[2].splitlines()
    outcome = FAILED if status else PASSED
    said = f"ended with {status}" if status else ""
    write_record(path, Record(name, module, outcome, said, numbers, round(time.monotonic() - started_s, 1)))
    return ""


def _status(
    command: Sequence[str], output: object, limit_s: float, environment: Mapping[str, str]
) -> int | str:
    """Return the exit code, or a description if there is none."""
    print("$", " ".join(command), flush=True)
    try:
        ended = subprocess.run(  # type: ignore[call-overload]
            command,
            cwd=ROOT,
            stdout=output,
            timeout=limit_s,
            check=False,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        return f"no exit code: it was ended after {limit_s} s"
    return int(ended.returncode)


def show(records: Mapping[tuple[str, str], Record], names: Iterable[str]) -> str:
    """Return a line for each piece, followed by its numbers, its failures and what was left out."""
    width = max(len(name) for name in PIECES)
    lines = [f"{'':<{width}}  passed  failed  skipped  seconds"]
    for name in names:
        whole = records.get((name, ""))
        if whole is None:
            lines.append(f"{name:<{width}}  not run")
            continue
        tests = [record for record in records.values() if record.piece == name and record.test]
        counts = Counter(record.outcome for record in tests)
        failed = counts[FAILED] + counts[BEGAN] + (whole.outcome == FAILED)
        cells = f"{counts[PASSED]:6d}  {failed:6d}  {counts[SKIPPED]:7d}  {whole.seconds:7.0f}"
        lines.append(f"{name:<{width}}  {cells}")
        lines += [f"    {line}" for line in _details(whole, tests)]

    return "\n".join(lines)


def _details(whole: Record, tests: Sequence[Record]) -> Iterator[str]:
    yield from whole.numbers
    for test in tests:
        # The case of a test, such as its model.
        case = test.test.partition("[")[2].rstrip("]")
        yield from (f"{case}  {number}".lstrip() for number in test.numbers)
    for test in tests:
        if test.outcome == FAILED:
            yield f"FAILED {_short(test.test)}: {' '.join(test.said.split())}"
        if test.outcome == BEGAN:
            yield f"DID NOT END {_short(test.test)}"
    if whole.outcome == BEGAN:
        yield "the piece did not end: --resume continues it"
    if whole.outcome == FAILED:
        yield whole.said
    reasons = Counter(test.said for test in tests if test.outcome == SKIPPED)
    for reason, count in reasons.items():
        yield f"left out: {count} x {reason}"
    if whole.outcome == SKIPPED:
        yield f"left out: {whole.said}"


def _short(test: str) -> str:
    return test.rpartition("/")[2]


def has_failed(records: Mapping[tuple[str, str], Record], pieces: Sequence[str]) -> bool:
    """Return whether something failed or did not end in these pieces."""
    return any(record.outcome in (FAILED, BEGAN) for record in records.values() if record.piece in pieces)


def listing() -> str:
    """Return a line for each piece with its needs, and what its rehearsal leaves out."""
    lines = []
    for name, piece in PIECES.items():
        needs = [f"{piece.num_gpus} GPUs"] if piece.num_gpus > 1 else []
        needs += piece.packages
        said = f"; needs {', '.join(needs)}" if needs else ""
        lines.append(f"{name:<14} {piece.minutes:g} min  {piece.doubt}{said}")
        lines.append(f"{'':<14}        not in a rehearsal: {piece.unrehearsed}")
    return "\n".join(lines)


def parse(options: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help="the pieces to run; all of them if none")
    parser.add_argument("--piece", action="append", default=[], help="the same, as an option")
    parser.add_argument("--list", action="store_true", help="print the pieces and end")
    parser.add_argument("--show", action="store_true", help="print the table of earlier calls and end")
    parser.add_argument("--resume", action="store_true", help="leave out what earlier calls have completed")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    parser.add_argument("--record", type=Path, metavar="FILE", help="the file of records")
    given = parser.parse_args(options)
    given.pieces += given.piece
    if unknown := [name for name in given.pieces if name not in PIECES]:
        parser.error(f"no piece is named {unknown[0]!r}; the pieces are {', '.join(PIECES)}")
    given.pieces = [name for name in PIECES if name in given.pieces or not given.pieces]
    default = "rehearsal.jsonl" if given.rehearse else "table.jsonl"
    given.record = (given.record or ROOT / "build" / "gpu" / default).absolute()
    return given


def main(options: Sequence[str] | None = None) -> int:
    """Return 1 if something failed. Without a GPU everything is skipped, which is not a failure."""
    given = parse(options)
    if given.list:
        print(listing())
        return 0
    if not given.show:
        _run(given)
    records = read_records(given.record)
    print(f"\n{given.record}\n\n{show(records, PIECES)}")
    return int(has_failed(records, given.pieces))


def _run(given: argparse.Namespace) -> None:
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    where = f"a CPU, torch {torch.__version__}"
    if not given.rehearse:
        device = torch.cuda.get_device_name(0) if num_gpus else NO_GPU
        where = f"{num_gpus} x {device}, torch {torch.__version__}"
    print(where, flush=True)
    known = read_records(given.record) if given.resume else {}
    # A piece whose process failed is not complete either.
    ended = {name for name, test in known if not test and known[name, ""].outcome in (PASSED, SKIPPED)}
    pieces = [name for name in given.pieces if name not in ended]
    forget(given.record, [] if given.resume else pieces)

    for name in pieces:
        lacking = NO_GPU if not num_gpus else missing_for(PIECES[name], num_gpus)
        if lacking and not given.rehearse:
            write_record(given.record, Record(name, "", SKIPPED, lacking))
            continue
        run_piece(name, given.record, where, given.resume, given.rehearse)
        records = read_records(given.record)
        print(show(records, [name]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
