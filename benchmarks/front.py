"""Count what a newcomer meets: keys, pages, commands, options, lines of `megarl check`, and seconds of waiting.

    python -m benchmarks.front                   # this checkout
    python -m benchmarks.front BEFORE            # a git revision next to this checkout
    python -m benchmarks.front BEFORE --repeats 5

Keys, commands and options are counted in the generated pages of the reference, so a revision must have them.

Waiting is measured in processor seconds, of a command and the processes that it starts: the minimum of several
repeats, in which the trees alternate. A second table has the imports of each command, by package: the seconds of
their own modules with `-X importtime`, which adds some. With --train, the seconds from the command to the first step
are measured on the clock; the quickstart must have run in this checkout.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.history.rows import record

ROOT = Path(__file__).parent.parent
CHECKED = "configs/qwen3_32b_grpo.yaml"
# Tiny models, which do not run on a cluster.
OF_NO_CLUSTER = "quickstart"

REPEATS = 3
MOST_PACKAGES = 6
# The commands that a newcomer waits for.
WAITS = {
    "help, s": ("--help",),
    "mistyped key, s": ("check", CHECKED, "actor.optm.lr=1"),
    "mistyped key of the quickstart, s": ("check", "configs/quickstart.yaml", "actor.optm.lr=1"),
    "megarl check, s": ("check", "configs/qwen2.5_7b_grpo.yaml"),
}
FIRST_STEP = "first step of the quickstart, s"
# A tree has no run of its own to start from.
MODEL = f"model.path={ROOT}/outputs/quickstart/sft/huggingface"
DATA = f"{ROOT}/outputs/quickstart/data"

LIMITS = {
    "help, s": 0.35,
    "mistyped key, s": 1.0,
    "mistyped key of the quickstart, s": 1.0,
    "megarl check, s": 3.0,
    FIRST_STEP: 20.0,
    "keys of a cluster file, mean": 22,
    "names of keys": 300,
    "pages": 35,
    "commands": 20,
    "lines of megarl check": 25,
}


def figures(tree: Path) -> dict[str, float]:
    """Return every figure of a checkout by its name."""
    files_of_pages = [page for page in (tree / "docs").glob("**/*.md") if page.parent.name != "generate"]
    pages = [page.read_text(encoding="utf-8") for page in files_of_pages]
    reference = (tree / "docs" / "configuration.md").read_text(encoding="utf-8")
    commands = (tree / "docs" / "cli.md").read_text(encoding="utf-8")
    usages = re.findall(r"^usage: megarl \w+ .*(?:\n +.*)*", commands, re.MULTILINE)
    files = [file for file in (tree / "configs").glob("*.yaml") if not file.name.startswith(OF_NO_CLUSTER)]

    return {
        "keys of a cluster file, mean": fmean(len(list(_keys(_read(file)))) for file in files),
        "names of keys": sum(1 for _ in _documented(reference)),
        "pages": len(pages),
        "lines of pages": sum(len(page.splitlines()) for page in pages),
        "commands": len(usages),
        "options": sum(len(set(re.findall(r"\[?(--[\w-]+)", usage))) for usage in usages),
        "lines of megarl check": len(checked(tree).splitlines()),
    }


def _read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def _keys(values: Any) -> Iterator[str]:
    """Yield the keys that a file sets, without the names of the files that it is based on."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, Mapping) and value:
            yield from _keys(value)
        elif key != "defaults":
            yield key


def _documented(reference: str) -> Iterator[str]:
    """Yield the rows of the tables of keys."""
    is_of_keys = False
    for line in reference.splitlines():
        is_of_keys = line.startswith("| key | type |") or (is_of_keys and line.startswith("|"))
        if is_of_keys and line.startswith("| `"):
            yield line


def checked(tree: Path) -> str:
    """Return what `megarl check` prints for a run of 32 billion parameters."""
    environment = os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "110"}
    command = [sys.executable, "-m", "megarl", "check", str(tree / CHECKED)]
    return subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True).stdout


def _environment(tree: Path) -> dict[str, str]:
    # Without compiled files, each process would compile what it imports.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(tree)}


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def processor_s(tree: Path, arguments: Sequence[str]) -> float:
    """Return the processor seconds of a command in a checkout."""
    before_s = _used_s()
    command = [sys.executable, "-m", "megarl", *arguments]
    subprocess.run(command, env=_environment(tree), cwd=tree, capture_output=True)
    return _used_s() - before_s


def first_step_s(tree: Path) -> float:
    """Return the seconds from the command to the first step of the quickstart's reinforcement learning."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"data.train_files=[{DATA}/train.parquet]", f"data.val_files=[{DATA}/validation.parquet]"]
        changes = [MODEL, *files, "trainer.total_steps=1", f"trainer.output_dir={folder}"]
        command = [sys.executable, "-m", "megarl", "train", "configs/quickstart.yaml", *changes]
        begin_s = time.perf_counter()
        process = subprocess.Popen(
            command,
            env=_environment(tree),
            cwd=tree,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        taken_s = math.nan
        for line in process.stdout:
            if line.startswith("step 1/"):
                taken_s = time.perf_counter() - begin_s
        process.wait()
    return taken_s


def waits(trees: Mapping[str, Path], repeats: int, trains: bool) -> dict[str, dict[str, float]]:
    """Return the seconds of each wait, by tree. The trees alternate."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
    # The first round compiles, and does not count.
    for number in range(repeats + 1):
        for name, tree in trees.items():
            for wait, arguments in WAITS.items():
                seconds = processor_s(tree, arguments)
                if number:
                    found[name].setdefault(wait, []).append(seconds)
    if trains:
        for name, tree in trees.items():
            found[name][FIRST_STEP] = [first_step_s(tree)]
    return {name: {wait: min(taken) for wait, taken in of.items()} for name, of in found.items()}


def imports(tree: Path, arguments: Sequence[str]) -> dict[str, float]:
    """Return the seconds of the imported modules of each package, from the slowest package on."""
    command = [sys.executable, "-X", "importtime", "-m", "megarl", *arguments]
    printed = subprocess.run(command, env=_environment(tree), cwd=tree, capture_output=True, text=True).stderr
    packages: Counter[str] = Counter()
    for taken, module in re.findall(r"^import time: +(\d+) \| +\d+ \| +([\w.]+)$", printed, re.MULTILINE):
        packages[module.partition(".")[0]] += int(taken)
    return {name: taken / 1e6 for name, taken in packages.most_common()}


def extracted(revision: str, folder: Path) -> Path:
    """Write the tree of a git revision of this repository to a folder."""
    command = ["git", "archive", revision, "megarl", "configs", "docs"]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", nargs="?", metavar="BEFORE", help="a git revision")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of what is measured in seconds")
    parser.add_argument("--train", action="store_true", help="also measure the time to a first step")
    given = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        before = {} if given.before is None else {given.before: extracted(given.before, Path(folder))}
        trees = before | {"this checkout": ROOT}
        seconds = waits(trees, given.repeats, given.train)
        columns = {name: figures(tree) | seconds[name] for name, tree in trees.items()}

    table = Table("figure", *columns, "limit", "met")
    for name, last in columns["this checkout"].items():
        limit = LIMITS.get(name)
        digits = 2 if name in WAITS or name == FIRST_STEP else 0
        verdict = ("", "") if limit is None else (str(limit), "yes" if round(last, digits) <= limit else "no")
        table.add_row(name, *(f"{each[name]:,.{digits}f}" for each in columns.values()), *verdict)
    console = Console()
    console.print(table)

    parts = Table("command", "imports of this checkout, s")
    for wait, arguments in WAITS.items():
        taken = imports(ROOT, arguments)
        largest = [f"{name} {seconds:.2f}" for name, seconds in list(taken.items())[:MOST_PACKAGES]]
        parts.add_row(wait, f"{sum(taken.values()):.2f}: {', '.join(largest)}")
    console.print(parts)
    record("benchmarks.front", ratios=None, **columns["this checkout"])


if __name__ == "__main__":
    main()
