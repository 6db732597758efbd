"""Creates the quickstart's inputs.

They are a tiny Qwen2 model with random weights, its tokenizer, and sums from reasoning-gym.

    python -m megarl.recipes.quickstart.prepare --output-dir outputs/quickstart --seed 0

The task is reasoning-gym's `basic_arithmetic`: sums of two numbers from 1 to 100 ("48 + 61"), scored by its
own verifier. The demonstrations for supervised fine-tuning come from three teachers who make mistakes: half
of the answers are off by one or by ten. A model that imitates them makes as many mistakes. Only the
verifier's rewards can improve it, which PPO demonstrates.
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
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megarl.config.shipped import CONFIGS_DIR

# The model's config.json. Such a narrow model learns faster from larger initial weights (initializer_range
# 0.06) than from the usual 0.02.
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
NUM_DRAWS = 60_000  # results in about 10,000 distinct problems
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
    """The absolute paths of the files that `prepare` wrote."""

    model: Path  # a Hugging Face folder
    train: Path  # prompts with verifiable answers, for RL
    validation: Path  # held-out prompts that are in no other file
    sft_train: Path  # demonstrations for the problems of `train`
    sft_validation: Path
    pairs_train: Path  # a right and a wrong answer to the problems of `train`, for DPO and a reward model
    pairs_validation: Path


def prepare(output_dir: str | Path, seed: int) -> Prepared:
    """Write `model/` and `data/*.parquet` to `output_dir`.

    The same seed gives identical bytes of weights and data.
    """
    folder = Path(output_dir).absolute()
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    made = Prepared(
        folder / "model",
        *(data / f"{name}.parquet" for name in Prepared._fields[1:]),
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
    _write(made.pairs_train, [_pair(problem, chance) for problem in train])
    _write(made.pairs_validation, [_pair(problem, chance) for problem in sft_held_out])

    return made


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character and without spaces.

    Its 17 tokens are not divisible by any tensor-parallel size. A prompt has 5 to 9 tokens.
    """
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
    """Return each distinct problem once, in the order of its first draw.

    reasoning-gym draws with replacement.
    """
    from reasoning_gym import create_dataset  # imports matplotlib, which takes a second

    # Entry i is drawn with seed + i, so the seeds of two runs are far apart to avoid overlapping draws.
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


def _pair(problem: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a pair of the right answer and a wrong one, which is a slip in half of the pairs.

    The other wrong answers are any sums, which are easier to distinguish: a reward model learns them first.
    """
    answer = int(problem["answer"])
    wrong = answer + chance.choice(SLIPS)
    if chance.random() >= SLIP_SHARE:
        wrong = chance.choice([each for each in range(2, 199) if each != answer])
    return {"prompt": problem["metadata"]["expression"], "chosen": str(answer), "rejected": str(wrong)}


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the quickstart's model and data.")
    parser.add_argument("--output-dir", default="outputs/quickstart")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, path in prepare(arguments.output_dir, arguments.seed)._asdict().items():
        print(f"{name:16} {path}")


if __name__ == "__main__":
    main()
