"""Makes what the example of code trains on: a tiny Qwen2 model with random weights, its tokenizer, and small
functions with their tests.

    python -m examples.code.prepare --output-dir outputs/code --seed 0

A task says what a function does to its argument, one thing after the other ("add 3, times 2"), and is solved
by a program of two lines:

    def f(x):
        return (x + 3) * 2

Demonstrations are of teachers who slip in half of their programs: they forget the parentheses, or write
another number. A model that imitates them slips as often; what a program returns in the sandbox is all that
can teach it better.
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
ARGUMENTS = (2, 5, 11)  # of the tests' calls
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
    """word: one of KINDS."""

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
    """As megarl.rewards.code reads them."""
    return [{"call": f"f({argument})", "returns": _value(task, argument)} for argument in ARGUMENTS]


def _value(task: Task, argument: int) -> int:
    for word, number in task:
        argument = KINDS[word].apply(argument, number)
    return argument


def demonstration(task: Task, chance: random.Random) -> str:
    """A teacher's program."""
    if chance.random() >= SLIP_SHARE:
        return program(task)
    if program(task) != program(task, with_parentheses=False) and chance.random() < 0.5:
        return program(task, with_parentheses=False)
    place = chance.randrange(len(task))
    number = chance.choice([number for number in range(2, 10) if number != task[place].number])

    return program((*task[:place], task[place]._replace(number=number), *task[place + 1 :]))


def make_tasks(seed: int) -> list[Task]:
    """Different ones, of two and three operations."""
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

    # there are few of two operations, and these are found first: held-out tasks are to be like those trained
    # on
    chance.shuffle(tasks)
    return tasks


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for a word, a digit or a sign, and one for all that every program begins with. Added tokens are
    found whatever pre-tokenizer the class of tokenizer has that Transformers takes for a Qwen2 model."""
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
    """Some 400,000 parameters; so narrow a model learns faster from larger weights than the usual 0.02."""
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
    """Writes `model/` and four files of JSON lines. No task that is held out is in another file."""
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
    parser = argparse.ArgumentParser(description="Make the model and the data of the example of code.")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/code"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.output_dir, arguments.seed)
    print(f"{arguments.output_dir}: a model, and tasks for it")


if __name__ == "__main__":
    main()
