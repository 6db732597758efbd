"""Distill a tiny model on the quickstart's sums from a larger one: `python -m tests.soak.distillation`.

The teacher has twice the student's layers, in two pipeline stages. It learns by PPO from the verifier's
rewards. The student starts from supervised fine-tuning, and gets only the teacher's log-probs. The script
prints the shares of correct held-out sums, and exits with status 1 if a student ends more than 3 points below
its teacher.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megarl.recipes.quickstart.prepare import MODEL, prepare
from tests.soak.learning import demonstrate, read_arguments, reinforce

LARGEST_GAP = 0.03


def main() -> int:
    arguments = read_arguments(__doc__)
    gaps = []

    with tempfile.TemporaryDirectory() as temporary:
        for seed in arguments.seeds:
            folder = (arguments.folder or Path(temporary)) / str(seed)
            gaps.append(distill(folder, seed, arguments.steps))

    return int(max(gaps) > LARGEST_GAP)


def distill(folder: Path, seed: int, steps: int, more: Sequence[str] = ()) -> float:
    """Train a teacher, then a student from it with `more` options.

    Returns by how much the student is less accurate.
    """
    teacher = folder / "teacher"
    prepare(teacher, seed)
    save_teacher(teacher / "model", seed)
    demonstrate(teacher, seed)
    of_teacher = reinforce(teacher, seed, steps)

    student = folder / "student"
    prepare(student, seed)
    demonstrate(student, seed)
    options = (
        "algorithm.advantage.estimator=distillation",
        "algorithm.kl.where=none",
        f"teacher.path={teacher / 'rl' / 'huggingface'}",
        "teacher.parallel.pipeline_parallel_size=2",
        *more,
    )
    of_student = reinforce(student, seed, steps, options)

    return of_teacher.after - of_student.after


def save_teacher(folder: Path, seed: int) -> None:
    """Save a model like the quickstart's with twice its layers, next to the existing tokenizer."""
    sizes = json.loads((MODEL / "config.json").read_text())
    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(**sizes | {"num_hidden_layers": 4})).float().save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
