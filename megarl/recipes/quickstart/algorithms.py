"""Runs the quickstart with every algorithm in configs/algorithm in sequence, and prints a comparison.

    make algorithms                                       # or, in the virtual environment:
    python -m megarl.recipes.quickstart.algorithms grpo dapo    # only these
    python -m megarl.recipes.quickstart.algorithms --table      # only the table of existing runs

Each run is `megarl train configs/quickstart.yaml algorithm=NAME` from the same model, which the quickstart's
warm-up creates if it does not exist. The files are in outputs/algorithms/NAME. Complete runs are not
repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.config.shipped import CONFIGS_DIR
from megarl.recipes.quickstart.run import OUTPUT_DIR as START_DIR
from megarl.recipes.quickstart.run import run_stages

OUTPUT_DIR = Path("outputs/algorithms")
ALGORITHMS = tuple(sorted(file.stem for file in (CONFIGS_DIR / "algorithm").glob("*.yaml")))
SUMMARY = "summary.json"


def main(names: Sequence[str], only_table: bool) -> int:
    """Run the algorithms and print the table. Return the exit code of the first command that fails, or 0."""
    if not only_table and (status := run_stages(stages(names))):
        return status
    print(table(names))
    return 0


def stages(names: Sequence[str]) -> list[list[str]]:
    megarl = [sys.executable, "-m", "megarl"]
    commands = []

    # Skip stages that an earlier call has completed.
    if not (START_DIR / "sft" / "huggingface").is_dir():
        commands.append(
            [
                sys.executable,
                "-m",
                "megarl.recipes.quickstart.prepare",
                "--output-dir",
                str(START_DIR),
                "--seed",
                "0",
            ]
        )
        commands.append([*megarl, "train", "configs/quickstart_sft.yaml"])

    for name in names:
        if not (OUTPUT_DIR / name / SUMMARY).is_file():
            commands.append(
                [
                    *megarl,
                    "train",
                    "configs/quickstart.yaml",
                    f"algorithm={name}",
                    f"trainer.output_dir={OUTPUT_DIR / name}",
                ]
            )

    return commands


def table(names: Sequence[str]) -> str:
    """Return a Markdown table. Accuracy is measured with one sample per held-out prompt."""
    lines = ["| algorithm | before | after | gain | samples | minutes |", "|---|---|---|---|---|---|"]
    for name in names:
        if not (OUTPUT_DIR / name / SUMMARY).is_file():
            continue
        summary = json.loads((OUTPUT_DIR / name / SUMMARY).read_text(encoding="utf-8"))
        before = summary["validation"]["before"]
        after = summary["validation"]["after"]
        gain = f"{100 * (after - before):+.1f} points"
        lines.append(
            f"| {name} | {before:.1%} | {after:.1%} | {gain} | {summary['samples']:,} | "
            f"{summary['seconds'] / 60:.1f} |"
        )

    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run the quickstart with every algorithm.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="algorithms; the default is all of them")
    parser.add_argument("--table", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(ALGORITHMS)):
        parser.error(f"unknown algorithm {', '.join(unknown)}; available: {', '.join(ALGORITHMS)}")
    sys.exit(main(arguments.names or ALGORITHMS, arguments.table))
