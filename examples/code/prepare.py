"""Create a tiny Qwen2 model with random weights, its tokenizer, and small functions with their tests.

    python -m examples.code.prepare --output-dir outputs/code --seed 0

A task describes what a function does to its argument, step by step ("add 3, times 2"). A program of two lines
solves it:

    def f(x):
        return (x + 3) * 2

Half of the demonstrations contain a mistake: missing parentheses, or a wrong number. A model that imitates
them makes as many mistakes; only the results of its programs in the sandbox can teach it better.
"""

from __future__ import annotations

import argparse
import json
import operator
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megarl.machine.files import write_whole

NUM_TASKS = 4096
NUM_VALIDATION = 128
NUM_DEMONSTRATIONS = 3
ARGUMENTS = (2, 5, 11)  # the arguments of the test calls
SLIP_SHARE = 0.5
HEAD = "def f(x):\n    return "
SPECIAL_TOKENS = ("<pad>", "<unk>", "<end>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<user>{{ message['content'] }}"
    "{% else %}<assistant>{{ message['content'] }}<end>{% endif %}{% endfor %}{% if add_generation_prompt "
    "%}<assistant>{% endif %}"
)


class _Kind(NamedTuple):
    sign: str
    apply: Callable[[int, int], int]


KINDS = {
    "add": _Kind("+", operator.add),
    "subtract": _Kind("-", operator.sub),
    "times": _Kind("*", operator.mul),
}


class Operation(NamedTuple):
    """One step of a task.

    Attributes:
        word: A key of `KINDS`.
        number: The operand.
    """

    word: str
    number: int


Task = tuple[Operation, ...]


def question(task: Task) -> str:
    return ", ".join(f"{word} {number}" for word, number in task)


def program(task: Task, with_parentheses: bool = True) -> str:
    text = "x"
    is_sum = False

    for word, number in task:
        text = f"({text})" if with_parentheses and is_sum and word == "times" else text
        text = f"{text} {KINDS[word].sign} {number}"
        is_sum = word != "times"

    return HEAD + text


def unit_tests(task: Task) -> list[dict[str, Any]]:
    """Return the tests of a task in the format of `megarl.rewards.code`."""
    return [{"call": f"f({argument})", "returns": _value(task, argument)} for argument in ARGUMENTS]


def _value(task: Task, argument: int) -> int:
    for word, number in task:
        argument = KINDS[word].apply(argument, number)
    return argument


def demonstration(task: Task, chance: random.Random) -> str:
    """Return a demonstration: the correct program, or one with a mistake."""
    if chance.random() >= SLIP_SHARE:
        return program(task)
    if program(task) != program(task, with_parentheses=False) and chance.random() < 0.5:
        return program(task, with_parentheses=False)
    place = chance.randrange(len(task))
    number = chance.choice([number for number in range(2, 10) if number != task[place].number])

    return program((*task[:place], task[place]._replace(number=number), *task[place + 1 :]))


def make_tasks(seed: int) -> list[Task]:
    """Return distinct tasks with two or three operations."""
    chance = random.Random(seed)
    found = dict[Task, None]()

    while len(found) < NUM_TASKS:
        found[
            tuple(
                Operation(chance.choice(list(KINDS)), chance.randint(2, 9))
                for _ in range(chance.randint(2, 3))
            )
        ] = None

    tasks = list(found)

    # Tasks with two operations are few and found first. Shuffle, so that held-out tasks are distributed like
    # training tasks.
    chance.shuffle(tasks)
    return tasks


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per word, digit and sign, and one for the common start of all programs.

    The pieces are added tokens, because these are recognized with any pre-tokenizer that transformers chooses
    for a Qwen2 model.
    """
    pieces = [HEAD, "x", " ", ",", "(", ")", *"+-*", *map(str, range(10)), *KINDS]
    tokenizer = Tokenizer(
        models.WordLevel(
            {piece: index for index, piece in enumerate([*SPECIAL_TOKENS, *pieces])}, unk_token="<unk>"
        )
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.decoder = decoders.Fuse()

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_model(folder: Path, seed: int) -> None:
    """Save a model of about 400,000 parameters.

    A model this narrow learns faster from larger initial weights than the usual 0.02.
    """
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.06,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(folder)

    tokenizer.save_pretrained(folder)


def prepare(folder: Path, seed: int) -> None:
    """Write `model/` and four JSON lines files. Held-out tasks are in no training file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", seed)
    tasks = make_tasks(seed)
    chance = random.Random(seed)
    held_out = tasks[:NUM_VALIDATION]
    train = tasks[NUM_VALIDATION:]

    for name, of in (("train", train), ("validation", held_out)):
        rows = [
            {"prompt": question(task), "data_source": "functions", "tests": json.dumps(unit_tests(task))}
            for task in of
        ]
        _write(folder / f"{name}.jsonl", rows)

    for name, of in (("sft_train", NUM_DEMONSTRATIONS * train), ("sft_validation", held_out)):
        _write(
            folder / f"{name}.jsonl",
            [{"messages": _chat(question(task), demonstration(task, chance))} for task in of],
        )


def _chat(asked: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the model and the data of the code example.")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/code"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.output_dir, arguments.seed)
    print(f"{arguments.output_dir}: a model, and tasks for it")


if __name__ == "__main__":
    main()
