"""Makes what the quickstart trains on: a tiny Qwen2 model with random weights, its tokenizer, and sums from
reasoning-gym.

    python -m megarl.recipes.quickstart.prepare --output-dir outputs/quickstart --seed 0

The task is reasoning-gym's `basic_arithmetic`: sums of two numbers from 1 to 100 ("48 + 61"); its own
verifier scores the answers. The demonstrations for supervised fine-tuning come from three teachers who slip:
in half of them the answer is off by one or by ten. A model that imitates them slips as often as they do. Only
the verifier's rewards can teach it better, and that is what PPO shows.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import torch
from reasoning_gym import create_dataset
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megarl.config.shipped import CONFIGS_DIR

# Its config.json: so narrow a model learns faster from larger weights (initializer_range 0.06) than the usual
# 0.02.
MODEL = CONFIGS_DIR / "models" / "quickstart" / "model"
TASK = "basic_arithmetic"
TERMS = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 2,
    "operators": ["+"],
    "allow_parentheses": False,
}
NUM_DRAWS = 60_000  # some 10,000 different problems turn up
NUM_TEACHERS = 3
NUM_VALIDATION = 512
NUM_SFT_VALIDATION = 256
SLIP_SHARE = 0.5
SLIPS = (-10, -1, 1, 10)

PAD, UNKNOWN, END, USER, ASSISTANT = SPECIAL_TOKENS = ("<pad>", "<unk>", "<end>", "<user>", "<assistant>")
CHARACTERS = "0123456789+-"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<end>"
    "{% else %}{{ raise_exception('only user and assistant take part in this chat') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Prepared(NamedTuple):
    """Where `prepare` put things, as absolute paths."""

    model: Path  # a Hugging Face folder
    train: Path  # prompts with verifiable answers, for RL
    validation: Path  # held-out prompts: in none of the other files
    sft_train: Path  # demonstrations for the problems of `train`
    sft_validation: Path


def prepare(output_dir: str | Path, seed: int) -> Prepared:
    """Writes `model/` and `data/*.parquet` below `output_dir`; the same seed gives the same bytes of weights
    and data."""
    folder = Path(output_dir).absolute()
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    made = Prepared(
        folder / "model",
        *(data / f"{name}.parquet" for name in ("train", "validation", "sft_train", "sft_validation")),
    )
    _save_model(made.model, seed)
    chance = random.Random(seed)
    problems = _distinct_problems(seed)
    chance.shuffle(problems)
    # The parts are disjoint, so that the held-out scores measure generalization.
    held_out = problems[:NUM_VALIDATION]
    sft_held_out = problems[NUM_VALIDATION : NUM_VALIDATION + NUM_SFT_VALIDATION]
    train = problems[NUM_VALIDATION + NUM_SFT_VALIDATION :]
    _write(made.train, [_prompt_row(problem, "train", index) for index, problem in enumerate(train)])
    _write(
        made.validation, [_prompt_row(problem, "validation", index) for index, problem in enumerate(held_out)]
    )
    _write(
        made.sft_train, [_demonstration(problem, chance) for _ in range(NUM_TEACHERS) for problem in train]
    )
    _write(made.sft_validation, [_demonstration(problem, chance) for problem in sft_held_out])

    return made


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, blanks dropped; 17 tokens, which no tensor-parallel size divides. A prompt has
    5 to 9 tokens."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace(" ", "")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _save_model(path: Path, seed: int) -> None:
    tokenizer = make_tokenizer()
    config = Qwen2Config.from_pretrained(MODEL)
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id) == (
        len(tokenizer),
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )

    # The seed of the weights must not change the caller's random state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)

    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _distinct_problems(seed: int) -> list[dict[str, Any]]:
    """reasoning-gym draws with replacement, so the same sum comes back; each is kept once, in the order of
    its first draw."""
    # Entry i is drawn from seed + i: seeds far apart, so that two runs do not share a stretch of draws.
    draws = create_dataset(TASK, seed=seed * NUM_DRAWS, size=NUM_DRAWS, allow_negation=False, **TERMS)
    by_expression: dict[str, dict[str, Any]] = {}
    for entry in draws:
        by_expression.setdefault(entry["metadata"]["expression"], entry)

    return list(by_expression.values())


def _prompt_row(problem: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": problem["metadata"]["expression"]}],
        "data_source": TASK,
        "reward_model": {"style": "rule", "ground_truth": problem["answer"]},
        "extra_info": {"split": split, "index": index, "question": problem["question"]},
    }


def _demonstration(problem: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    answer = int(problem["answer"])
    if chance.random() < SLIP_SHARE:
        answer += chance.choice(SLIPS)
    question = {"role": "user", "content": problem["metadata"]["expression"]}
    return {"messages": [question, {"role": "assistant", "content": str(answer)}]}


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quickstart's model and data.")
    parser.add_argument("--output-dir", default="outputs/quickstart")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, path in prepare(arguments.output_dir, arguments.seed)._asdict().items():
        print(f"{name:15} {path}")


if __name__ == "__main__":
    main()
