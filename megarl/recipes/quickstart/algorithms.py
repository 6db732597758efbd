"""Runs the quickstart with every algorithm in configs/algorithm, one after the other, and prints what each
has learnt.

    make algorithms                                       # or, in the virtual environment:
    python -m megarl.recipes.quickstart.algorithms grpo dapo    # these alone
    python -m megarl.recipes.quickstart.algorithms --table      # only the table, of the runs that are there

Each run is `megarl train configs/quickstart.yaml algorithm=NAME` from the same start, which the quickstart's
warm-up makes if it is not there. Its files are in outputs/algorithms/NAME; one that is complete is not made
again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.config.shipped import CONFIGS_DIR
from megarl.recipes.quickstart.run import OUTPUT_DIR as START_DIR
from megarl.recipes.quickstart.stages import run_stages

OUTPUT_DIR = Path("outputs/algorithms")
ALGORITHMS = tuple(sorted(file.stem for file in (CONFIGS_DIR / "algorithm").glob("*.yaml")))
SUMMARY = "summary.json"


def main(names: Sequence[str], only_table: bool) -> int:
    """The status of the first command that fails, and 0 where none does."""
    if not only_table and (status := run_stages(stages(names))):
        return status
    print(table(names))
    return 0


def stages(names: Sequence[str]) -> list[list[str]]:
    megarl = [sys.executable, "-m", "megarl"]
    commands = []

    # Stages that an earlier call has completed are skipped.
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
        commands.append([*megarl, "sft", "configs/quickstart_sft.yaml"])

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
    """Markdown. Accuracy is that of one sample for each held-out prompt."""
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
    parser.add_argument("names", nargs="*", metavar="NAME", help="algorithms; all where none is given")
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(ALGORITHMS)):
        parser.error(f"there is no algorithm {', '.join(unknown)}; there are {', '.join(ALGORITHMS)}")
    sys.exit(main(arguments.names or ALGORITHMS, arguments.table))
