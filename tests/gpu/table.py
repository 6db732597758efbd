"""Run everything that needs a GPU, and print one table of it: `make gpu`.

    python -m tests.gpu.table               # on a GPU
    python -m tests.gpu.table --rehearse    # the part that a CPU can run, with tiny shapes

Each file of tests/gpu and each script of benchmarks/gpu runs in a separate process, so that one that corrupts
its GPU context affects no other. The numbers of a test are its properties (`record_property`); those of a
benchmark are the last lines that it prints, after the last empty one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
NO_GPU = "torch sees no GPU"
LIMIT_S = 300  # per file or script; all of them together should end in ten minutes


# The part of tests/gpu and benchmarks/gpu that a CPU can run: the same code over gloo.
REHEARSALS = (
    "engine/test_one_device.py",
    "engine/test_one_device_kernels.py",
    "weights/test_shared_device.py",
    "test_gpu_benchmarks.py",
    "test_gpu_table.py",
)


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        numbers: One line each.
        left_out: One line each.
    """

    what: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    numbers: Sequence[str] = ()
    left_out: Sequence[str] = ()


def test_files() -> list[Path]:
    return sorted((ROOT / "tests" / "gpu").glob("test_*.py"))


def benchmarks() -> list[Path]:
    return sorted((ROOT / "benchmarks" / "gpu").glob("*.py"))


def run_tests(file: Path, *options: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", str(file), f"--junit-xml={results}", *options]
        status = _status(command, None)
        return row_of(_name(file), results, status)


def row_of(what: str, results: Path, status: int | str) -> Row:
    cases = list(ElementTree.parse(results).iter("testcase")) if results.exists() else []
    if not cases:
        return Row(what, failed=1, left_out=[f"all of it: pytest ended with {status}"])
    outcomes = Counter[str]()
    reasons = Counter[str]()
    numbers = []

    for case in cases:
        kinds = {child.tag: child for child in case}
        outcome = (
            "failed" if kinds.keys() & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        )
        outcomes[outcome] += 1
        if outcome == "skipped":
            reasons[kinds["skipped"].get("message", "")] += 1
        for each in case.iter("property"):
            numbers.append(f"{each.get('name')}: {each.get('value')}")

    left_out = [f"{count} x {reason}" for reason, count in reasons.items()]
    return Row(what, outcomes["passed"], outcomes["failed"], outcomes["skipped"], numbers, left_out)


def run_benchmark(file: Path) -> Row:
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    with tempfile.TemporaryFile("w+") as output:
        status = _status([sys.executable, "-m", module], output)
        output.seek(0)
        printed = output.read()

    print(printed, flush=True)
    last = printed.strip().rpartition("\n\n")[2].splitlines()
    return Row(
        _name(file),
        passed=int(status == 0),
        failed=int(status != 0),
        numbers=last if status == 0 else [f"ended with {status}", *last],
    )


def _status(command: Sequence[str], output: object) -> int | str:
    """Return the exit code, or a description if there is none."""
    print("$", " ".join(command), flush=True)
    try:
        return subprocess.run(command, cwd=ROOT, stdout=output, timeout=LIMIT_S, check=False).returncode  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return f"timed out after {LIMIT_S} s"


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else file.name


def show(rows: Sequence[Row]) -> str:
    """Return a line for each row, followed by its numbers and what was skipped."""
    width = max(len(row.what) for row in rows)
    lines = [f"{'':<{width}}  passed  failed  skipped"]

    for row in rows:
        lines.append(f"{row.what:<{width}}  {row.passed:6d}  {row.failed:6d}  {row.skipped:7d}")
        lines += [f"    {number}" for number in row.numbers]
        lines += [f"    left out: {reason}" for reason in row.left_out]

    return "\n".join(lines)


def main(options: Sequence[str] | None = None) -> int:
    """Return 1 if something failed. Without a GPU everything is skipped, which is not a failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    rehearses = parser.parse_args(options).rehearse
    import torch

    if rehearses:
        print(f"a dry run on the CPU, torch {torch.__version__}")
        rows = [run_tests(ROOT / "tests" / "unit" / name) for name in REHEARSALS]
    elif torch.cuda.is_available():
        print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
        rows = [run_tests(file) for file in test_files()] + [run_benchmark(file) for file in benchmarks()]
    else:
        print(f"{NO_GPU}: everything is left out")
        rows = [Row(_name(file), left_out=[NO_GPU]) for file in test_files() + benchmarks()]

    print("\n" + show(rows))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
