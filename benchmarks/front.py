"""Count what a newcomer meets: keys, pages, commands, options, and lines of `megarl check`.

    python -m benchmarks.front                   # this checkout
    python -m benchmarks.front BEFORE            # a git revision next to this checkout

Keys, commands and options are counted in the generated pages of the reference, so a revision must have them.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
CHECKED = "configs/qwen3_32b_grpo.yaml"
# Tiny models, which do not run on a cluster.
OF_NO_CLUSTER = "quickstart"

LIMITS = {
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
    before = parser.parse_args().before

    with tempfile.TemporaryDirectory() as folder:
        trees = {} if before is None else {before: extracted(before, Path(folder))}
        columns = {name: figures(tree) for name, tree in (trees | {"this checkout": ROOT}).items()}

    table = Table("figure", *columns, "limit", "met")
    for name, last in columns["this checkout"].items():
        limit = LIMITS.get(name)
        verdict = ("", "") if limit is None else (str(limit), "yes" if round(last) <= limit else "no")
        table.add_row(name, *(f"{each[name]:,.0f}" for each in columns.values()), *verdict)
    Console().print(table)


if __name__ == "__main__":
    main()
