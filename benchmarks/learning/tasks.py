"""The tasks of the learning curves: their prompts, configurations, and the variants that are compared on them.

A task trains SmolLM2-135M-Instruct, which examples/tutorial/model.py converts. `sums` is the tutorial. The
questions and the verifiers of most others are those of reasoning-gym; in `guess` an environment answers the
model, so an episode has several turns. `gsm8k` has the first problems of GSM8K, with its license in the same folder.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.tutorial import data as tutorial
from megarl.machine.files import write_whole

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "outputs" / "tutorial" / "model"
RUNS = ROOT / "outputs" / "learning"  # folders of runs, and their data

SUMS = "sums"
GUESS = "guess"
GSM8K = "gsm8k"
_ROOM = "benchmarks/learning"
_PROBLEMS = Path(__file__).parent / "gsm8k"
_NUM_HELD_OUT = 40
_NUM_TRAIN = 400
_NUM_DRAWS = 3000
_WIDTH_OF_RANGE = 7  # three guesses suffice if each halves the range
_NUM_RANGES = 90

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """A task, and how a run learns it.

    Attributes:
        about: What the task is, for the page.
        example: A prompt of it.
        settings: Of the reasoning-gym data set with the name of the task; None if it is not one.
        overrides: More keys of the run than those of its configuration.
        num_seeds: Runs that the page expects.
    """

    about: str
    example: str
    config: str
    settings: Mapping[str, Any] | None = None
    overrides: tuple[str, ...] = ()
    num_seeds: int = 3


_TWO_SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
_REASONING = f"{_ROOM}/reasoning.yaml"

TASKS: dict[str, Task] = {
    SUMS: Task(
        "Sums of two numbers up to 12, the task of the tutorial.",
        "What is 7 + 4?",
        "examples/tutorial/smollm2.yaml",
        num_seeds=5,
    ),
    "products": Task(
        "Products of two digits, `products` of reasoning-gym.",
        "Solve the following multiplication: 6 * 2. Give only the result as your final answer.",
        _REASONING,
        _TWO_SMALL,
    ),
    "chain_sum": Task(
        "Sums and differences of two digits, `chain_sum` of reasoning-gym.",
        "State the final answer to the following arithmetic problem: 4 - 1 =",
        _REASONING,
        _TWO_SMALL,
    ),
    "gcd": Task(
        "The greatest common divisor of two numbers up to 20, `gcd` of reasoning-gym.",
        "Find the Greatest Common Divisor (GCD) of these numbers: 4, 16. Give only the GCD as your final answer.",
        _REASONING,
        {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 20},
        ("data.max_response_length=24",),
    ),
    "letter_counting": Task(
        "How often a letter occurs in a word, `letter_counting` of reasoning-gym.",
        'How many times does the letter "h" appear in the text: "hundred"?',
        _REASONING,
        {"min_words": 1, "max_words": 1},
        ("data.max_response_length=24",),
    ),
    GUESS: Task(
        "An agent task: the model guesses a number among seven, and an environment answers `higher` or `lower`. "
        "The chat template of SmolLM2 has no tools, so the agent has an environment.",
        "I think of a number from 12 to 18. Guess it. Reply with one number.",
        f"{_ROOM}/guess.yaml",
    ),
    GSM8K: Task(
        "The first 40 test problems of [GSM8K](https://github.com/openai/grade-school-math) (MIT license).",
        "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
        f"{_ROOM}/gsm8k.yaml",
    ),
}


@dataclass(frozen=True)
class Comparison:
    """Variants of the runs of `sums`.

    Attributes:
        base: The variant that the others are compared with.
        variants: The overrides of each variant, by its name. The variant `sums` is the task itself.
    """

    about: str
    base: str
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _preset(name: str, *more: str) -> tuple[str, ...]:
    return (f"algorithm={name}", "algorithm.kl.where=none", *more)


_GRPO = _preset("grpo")

COMPARISONS: dict[str, Comparison] = {
    "algorithms": Comparison(
        "Each preset of `configs/algorithm` without its KL penalty, from the same model and with the same number of "
        "samples. No preset is tuned: all have the learning rate of the tutorial.",
        "grpo",
        {
            "grpo": _GRPO,
            "ppo": _preset("ppo", "critic.optim.lr=2e-5"),
            "rloo": _preset("rloo"),
            "reinforce_pp": _preset("reinforce_pp"),
            "dapo": _preset("dapo"),
            "gspo": _preset("gspo"),
            "cispo": _preset("cispo"),
            "dr_grpo": _preset("dr_grpo"),
        },
    ),
    "staleness": Comparison(
        "Asynchronous generation, with importance weights, at most 1, 2 and 4 versions ahead of training.",
        "grpo",
        {
            "grpo": _GRPO,
            **{
                f"staleness_{versions}": _preset("async_grpo", f"rollout.max_staleness={versions}")
                for versions in (1, 2, 4)
            },
        },
    ),
    "lora": Comparison(
        "Adapters of rank 32 on every projection, with ten times the learning rate, against all weights.",
        SUMS,
        {SUMS: (), "lora": ("actor.lora=lora", "actor.optim.lr=2e-4")},
    ),
}


def prepare(name: str) -> list[str]:
    """Write the model and the data of a task unless they exist. Return the overrides that name the data."""
    if not MODEL.exists():
        from examples.tutorial.model import convert  # imports transformers, which takes seconds and memory

        convert(MODEL)
    folder = RUNS / "data" / name
    folder.mkdir(parents=True, exist_ok=True)

    files = [folder / "train.jsonl", folder / "test.jsonl"]
    for file, rows in zip(files, make_rows(name), strict=True):
        write_whole(file, "".join(json.dumps(row) + "\n" for row in rows))

    if name == GSM8K:
        write_whole(folder / "solutions.jsonl", "".join(json.dumps(row) + "\n" for row in _solutions()))

    return [f"data.train_files=[{files[0]}]", f"data.val_files=[{files[1]}]", f"model.path={MODEL}"]


def make_rows(name: str) -> tuple[Rows, Rows]:
    """Return the training rows and the held-out rows, which are the same each time."""
    if name == SUMS:
        train, held_out = tutorial.make_rows()
        return [*train], [*held_out]
    if name == GUESS:
        return _ranges()
    if name == GSM8K:
        return _problems("train"), _problems("test")

    return _of_reasoning_gym(name, TASKS[name].settings or {})


def _of_reasoning_gym(name: str, settings: Mapping[str, Any]) -> tuple[Rows, Rows]:
    """Draw distinct questions. Questions about the same numbers and words are all held out, or none is."""
    from reasoning_gym import create_dataset  # imports matplotlib, which takes a second

    by_subject: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for entry in create_dataset(name, seed=0, size=_NUM_DRAWS, **settings):
        question = entry["question"]
        row = {
            "prompt": question,
            "data_source": name,
            "ground_truth": entry["answer"],
            "extra_info": {"question": question},
        }
        by_subject.setdefault(_subject(question), {})[question] = row

    subjects = sorted(by_subject)
    random.Random(0).shuffle(subjects)
    held_out: Rows = []
    train: Rows = []
    for subject in subjects:
        rows = held_out if len(held_out) < _NUM_HELD_OUT else train
        rows.extend(by_subject[subject].values())

    return train[:_NUM_TRAIN], held_out


def _problems(split: str) -> Rows:
    """Read problems of GSM8K. The last line of a published answer is "#### 1,080"."""
    rows = []
    for line in (_PROBLEMS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        answer = problem["answer"].rpartition("#### ")[2].replace(",", "")
        rows.append({"prompt": problem["question"], "data_source": GSM8K, "ground_truth": answer})
    return rows


def _solutions() -> Rows:
    """Return the training problems with their published solutions, without the marks of a calculator."""
    rows = []
    for line in (_PROBLEMS / "train.jsonl").read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        solution = re.sub(r"<<.*?>>", "", problem["answer"])
        question = {"role": "user", "content": problem["question"]}
        rows.append({"messages": [question, {"role": "assistant", "content": solution}]})
    return rows


def _subject(question: str) -> tuple[str, ...]:
    """Return the numbers and the quoted words of a question, in any order."""
    return tuple(sorted(re.findall(r'\d+|"\w{2,}"', question)))


def _ranges() -> tuple[Rows, Rows]:
    """Return prompts of the game. The ranges of the held-out ones are in no training prompt."""
    starts = list(range(1, _NUM_RANGES + 1))
    random.Random(0).shuffle(starts)
    num_held_out = _NUM_HELD_OUT // _WIDTH_OF_RANGE
    held_out = [row for start in starts[:num_held_out] for row in _games(start)]
    train = [row for start in starts[num_held_out:] for row in _games(start)]

    return train, held_out


def _games(start: int) -> Sequence[dict[str, Any]]:
    end = start + _WIDTH_OF_RANGE - 1
    prompt = f"I think of a number from {start} to {end}. Guess it. Reply with one number."
    return [
        {"prompt": prompt, "data_source": GUESS, "ground_truth": str(secret)}
        for secret in range(start, end + 1)
    ]
