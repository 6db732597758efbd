"""Run the tutorial (`make tutorial`): model, data, GRPO, the score before and after it, and the curves.

It takes 10 to 20 minutes on two cores. Arguments are overrides of examples/tutorial/smollm2.yaml. Each stage
is a separate command, which is printed before it runs. If you start it again, finished stages are skipped and
an interrupted run is resumed.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path("outputs/tutorial")
CONFIG = "examples/tutorial/smollm2.yaml"


def stages(overrides: Sequence[str], run_dir: Path) -> list[list[str]]:
    """Return the commands. Evaluations whose results exist are left out."""
    megarl = ["-m", "megarl"]
    before = FOLDER / "before"
    after = run_dir / "evaluations" / "after"
    evaluate = ["--config", CONFIG, "--temperature", "0.7", "--n", "8"]
    found = [
        ["-m", "examples.tutorial.model", str(FOLDER / "model")],
        ["-m", "examples.tutorial.data", str(FOLDER)],
        ["-m", "examples.tutorial.reward"],
        [*megarl, "eval", str(FOLDER / "model"), *evaluate, "--output", str(before)],
        [*megarl, "train", CONFIG, *overrides],
        [*megarl, "eval", str(run_dir), *evaluate, "--against", str(before), "--output", str(after)],
        [*megarl, "generate", str(run_dir), "What is 7 + 11?"],
        [*megarl, "report", str(run_dir), "--png"],
    ]
    done = [str(folder) for folder in (before, after) if (folder / "results.json").exists()]

    return [stage for stage in found if not ("eval" in stage and stage[-1] in done)]


def main() -> int:
    """Run all stages. Return the exit status of the first stage that fails, or 0."""
    overrides = sys.argv[1:]
    given = [
        override.partition("=")[2] for override in overrides if override.startswith("trainer.output_dir=")
    ]

    for stage in stages(overrides, Path(given[-1]) if given else FOLDER / "run"):
        print("$ " + shlex.join(["python", *stage]), flush=True)
        status = subprocess.run([sys.executable, *stage], check=False).returncode
        if status:
            return status

    return 0


if __name__ == "__main__":
    raise SystemExit(main())
