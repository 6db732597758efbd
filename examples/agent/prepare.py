"""Create a tiny Llama model with random weights, its tokenizer, prompts, and demonstrations of three teachers.

    python -m examples.agent.prepare --output-dir outputs/agent --seed 0

A prompt names an item of two letters. Only the tool knows its price, and each prompt has its own price list,
so prices cannot be memorized. For every second prompt the first call of the tool returns "busy". One teacher
answers correctly; one writes a wrong letter of the item; one guesses, at once or as soon as the tool is busy.
A model that imitates them is right about half of the time.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.agent.tools import price, price_of
from megarl.agents.function_tool import function_schema

NUM_TRAIN = 4096
NUM_VALIDATION = 64
NUM_CONVERSATIONS = 4096
NUM_SFT_VALIDATION = 256
TEACHERS = ("right", "slips", "guesses")
LETTERS = "abcdefgh"
DIGITS = "0123456789"

PAD, UNKNOWN, END, *ROLES = SPECIAL_TOKENS = (
    "<pad>",
    "<unk>",
    "<end>",
    "<tools>",
    "<user>",
    "<assistant>",
    "<tool>",
)
# Each piece is one token, so a call in the usual JSON format has seven tokens with its end token.
PIECES = (
    "<tool_call>\n",
    '{"name": "price", "arguments": {"item": "',
    '"}}',
    "\n</tool_call>",
    "price",
    "busy",
    "error",
)
CHAT_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
    "{% if message.role == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def prepare(output_dir: str | Path, seed: int) -> None:
    """Write `model/` and `data/*.jsonl` to `output_dir`. The same seed gives the same files."""
    folder = Path(output_dir)
    save_model(folder / "model", seed)
    chance = random.Random(seed)
    _write(
        folder / "data" / "train.jsonl", (prompt_row(chance, number % 2 == 0) for number in range(NUM_TRAIN))
    )
    _write(
        folder / "data" / "validation.jsonl",
        (prompt_row(chance, number % 2 == 0) for number in range(NUM_VALIDATION)),
    )
    _write(folder / "data" / "sft_train.jsonl", (_demonstration(chance) for _ in range(NUM_CONVERSATIONS)))
    _write(
        folder / "data" / "sft_validation.jsonl", (_demonstration(chance) for _ in range(NUM_SFT_VALIDATION))
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *PIECES, *LETTERS, *DIGITS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))

    # The vocabulary has one token for every kind of tool error.
    tokenizer.normalizer = normalizers.Replace(Regex(r"tool error \([\s\S]*"), "error")
    longest_first = sorted(PIECES, key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join(map(_escaped, longest_first)) + r"|[\s\S]"), behavior="isolated"
    )
    tokenizer.decoder = decoders.Fuse()

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=ROLES,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _escaped(piece: str) -> str:
    return "".join(rf"\{character}" if character in "{}" else character for character in piece)


def save_model(path: Path, seed: int) -> None:
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.06,  # a model this narrow learns faster from larger weights than the usual 0.02
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)

    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _task(chance: random.Random, is_busy: bool) -> dict[str, Any]:
    return {"item": "".join(chance.choices(LETTERS, k=2)), "list": chance.randrange(10**9), "busy": is_busy}


def prompt_row(chance: random.Random, is_busy: bool) -> dict[str, Any]:
    task = _task(chance, is_busy)
    return {
        "prompt": [{"role": "user", "content": task["item"]}],
        "data_source": "price_list",
        "reward_model": {"style": "rule", "ground_truth": price_of(task["item"], task["list"])},
        "extra_info": task,
    }


def _demonstration(chance: random.Random) -> dict[str, Any]:
    return conversation(_task(chance, chance.random() < 0.5), chance.choice(TEACHERS), chance)


def conversation(task: dict[str, Any], teacher: str, chance: random.Random) -> dict[str, Any]:
    """Build the demonstration of one teacher of TEACHERS."""
    guess = "".join(chance.choices(DIGITS, k=2))
    item = task["item"][0] + chance.choice(LETTERS) if teacher == "slips" else task["item"]
    call: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_call(item)]}
    busy = {"role": "tool", "content": "busy"}
    told = {"role": "tool", "content": price_of(item, task["list"])}

    if teacher == "guesses" and chance.random() < 0.5:
        turns = [_answer(guess)]
    elif teacher == "guesses" and task["busy"]:
        turns = [call, busy, _answer(guess)]
    else:
        turns = [*([call, busy] if task["busy"] else []), call, told, _answer(told["content"])]

    return {
        "messages": [{"role": "user", "content": task["item"]}, *turns],
        "tools": [function_schema(price)],
    }


def _call(item: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "price", "arguments": {"item": item}}}


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _write(path: Path, rows: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the model and the data of the agent example.")
    parser.add_argument("--output-dir", default="outputs/agent")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.output_dir, arguments.seed)


if __name__ == "__main__":
    main()
