"""Distill a tiny model on the quickstart's sums from a larger one: `python -m tests.soak.distillation`.

The teacher has twice the student's layers, in two pipeline stages. It learns by PPO from the verifier's
rewards. Two students start from supervised fine-tuning, and get only the teacher's log-probs: those of the
sampled tokens, and those of its most likely tokens. The script prints the shares of correct held-out sums,
and exits with status 1 if a student ends more than 3 points below its teacher.
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
from tests.soak.learning import Accuracy, demonstrate, read_arguments, reinforce

LARGEST_GAP = 0.03
STUDENTS: dict[str, tuple[str, ...]] = {
    "student": (),
    "top_k": ("algorithm.advantage.distillation.top_k=8",),
}


def main() -> int:
    arguments = read_arguments(__doc__)
    gaps = []

    with tempfile.TemporaryDirectory() as temporary:
        for seed in arguments.seeds:
            folder = (arguments.folder or Path(temporary)) / str(seed)
            of_teacher = train_teacher(folder, seed, arguments.steps)
            for name, more in STUDENTS.items():
                of_student = train_student(folder, name, seed, arguments.steps, more)
                gaps.append(of_teacher.after - of_student.after)

    return int(max(gaps) > LARGEST_GAP)


def distill(folder: Path, seed: int, steps: int, more: Sequence[str] = ()) -> float:
    """Train a teacher, then a student from it with `more` options.

    Returns by how much the student is less accurate.
    """
    of_teacher = train_teacher(folder, seed, steps)
    return of_teacher.after - train_student(folder, "student", seed, steps, more).after


def train_teacher(folder: Path, seed: int, steps: int) -> Accuracy:
    teacher = folder / "teacher"
    prepare(teacher, seed)
    save_teacher(teacher / "model", seed)
    demonstrate(teacher, seed)
    return reinforce(teacher, seed, steps)


def train_student(folder: Path, name: str, seed: int, steps: int, more: Sequence[str]) -> Accuracy:
    """Train a student in the folder `name` from the teacher of `train_teacher`, with `more` options."""
    student = folder / name
    prepare(student, seed)
    demonstrate(student, seed)
    options = (
        "algorithm.advantage.estimator=distillation",
        "algorithm.kl.where=none",
        f"teacher.path={folder / 'teacher' / 'rl' / 'huggingface'}",
        "teacher.parallel.pipeline_parallel_size=2",
        *more,
    )
    return reinforce(student, seed, steps, options)


def save_teacher(folder: Path, seed: int) -> None:
    """Save a model like the quickstart's with twice its layers, next to the existing tokenizer."""
    sizes = json.loads((MODEL / "config.json").read_text())
    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(**sizes | {"num_hidden_layers": 4})).float().save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
