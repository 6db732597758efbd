"""Train SmolLM2-135M-Instruct and record the run.

    python -m benchmarks.learning --task sums                     # all seeds that docs/learning_curves.md expects
    python -m benchmarks.learning --task products --seeds 0 --resume
    python -m benchmarks.learning --compare algorithms --only ppo --seeds 0 1
    python -m benchmarks.learning --task gcd --before             # only `megarl eval` before training

Each run is `megarl train`, which is printed before it starts. A seed that is recorded in
benchmarks/learning_curves is skipped. A run that was interrupted ends the command with an error; with
--resume it continues from its latest checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Sequence

from benchmarks.learning import records
from benchmarks.learning.tasks import COMPARISONS, MODEL, ROOT, RUNS, SUMS, TASKS, prepare
from benchmarks.learning.usage import measured, sessions
from megarl.machine.files import write_whole
from megarl.recipes.quickstart.run import run_stages

NUM_COMPARED_SEEDS = 5
_CHECKPOINTS = ("checkpoint.every_steps=5", "checkpoint.keep=1")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--task", choices=TASKS)
    what.add_argument("--compare", choices=COMPARISONS, help="variants of the task sums")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="of --compare; the default is all")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--resume", action="store_true", help="continue a run that was interrupted")
    parser.add_argument("--before", action="store_true", help="only evaluate the model before training")
    arguments = parser.parse_args()

    task = arguments.task or SUMS
    variants = {task: TASKS[task].overrides}
    num_seeds = TASKS[task].num_seeds
    if arguments.compare:
        variants = dict(COMPARISONS[arguments.compare].variants)
        num_seeds = NUM_COMPARED_SEEDS
    if unknown := sorted({*(arguments.only or ())} - {*variants}):
        parser.error(f"--only {', '.join(unknown)}: there are {', '.join(variants)}")
    if arguments.only:
        variants = {name: variants[name] for name in arguments.only}

    seeds = arguments.seeds if arguments.seeds is not None else range(num_seeds)
    if status := evaluate_before(task):
        return status
    if arguments.before:
        prepare(task)  # the data of an evaluation that is recorded already
        return 0
    if refusal := records.nothing_to_learn(task):
        print(refusal, file=sys.stderr)
        return 1

    # All variants have seed 0 before one has seed 1, so that an interrupted series compares equal numbers.
    for seed in seeds:
        for name, overrides in variants.items():
            if status := train(task, name, seed, overrides, resume=arguments.resume):
                return status
    return 0


def evaluate_before(task: str) -> int:
    """Evaluate the model before training, with 8 samples per prompt. Return the exit status."""
    file = records.before_file(task)
    if file.exists():
        return 0

    output = RUNS / task / "before"
    command = [
        "megarl",
        "eval",
        str(MODEL),
        "--config",
        TASKS[task].config,
        "--n",
        "8",
        "--temperature",
        "0.7",
    ]
    command += ["--output", str(output), *prepare(task), *TASKS[task].overrides]
    if not (output / "results.json").exists():
        shutil.rmtree(output, ignore_errors=True)
        if status := run_stages([[sys.executable, "-m", *command]]):
            return status

    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    about = {"command": readable(command), "commit": records.commit(), **records.surroundings()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps({**about, "results": results["results"]}, indent=1) + "\n")
    return 0


def train(task: str, name: str, seed: int, overrides: Sequence[str], *, resume: bool) -> int:
    """Run one seed, unless it is recorded, and record it. Return the exit status of the run."""
    file = records.path_of(name, seed)
    if file.exists():
        print(f"{file.relative_to(ROOT)}: recorded already")
        return 0

    folder = RUNS / name / f"seed{seed}"
    run_dir = folder / "run"
    if run_dir.exists() and not resume:
        print(
            f"{run_dir} has a run that was interrupted: continue it with --resume, or remove {folder}",
            file=sys.stderr,
        )
        return 1

    folder.mkdir(parents=True, exist_ok=True)
    command = ["megarl", "train", TASKS[task].config, *prepare(task), *overrides, *_CHECKPOINTS]
    command += [f"trainer.seed={seed}", f"data.seed={seed}", f"trainer.output_dir={run_dir}"]
    with measured(folder / "usage.json", {"commit": records.commit()}):
        status = run_stages([[sys.executable, "-m", *command]])
    if status:
        return status

    used = sessions(folder / "usage.json")
    about = {
        "name": name,
        "task": task,
        "seed": seed,
        "command": readable(command),
        "commits": list(dict.fromkeys(session["commit"] for session in used)),
        "num_sessions": len(used),
        "wall_s": round(sum(session["wall_s"] for session in used), 1),
        "processor_s": round(sum(session["processor_s"] for session in used), 1),
    }
    records.write_run(file, run_dir, about)
    print(f"{file.relative_to(ROOT)}: recorded")
    # A checkpoint has 1.6 GB, and the record does not need it.
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    return 0


def readable(command: Sequence[str]) -> str:
    """Return the command as it is typed in the checkout."""
    return shlex.join(command).replace(f"{ROOT}/", "")


if __name__ == "__main__":
    sys.exit(main())
