"""Compare the speed of the hf engine with transformers' `generate` on the same work, alternating in one process.

    python benchmarks/generation.py              # 32 prompts x 8 samples, about 60 prompt and 62 response tokens, 6.3M parameters
    python benchmarks/generation.py --threads 2

The output is tokens per second of processor time, which depends less on other load. Both generate the same
number of tokens at temperature 1. The limit is a ratio of 2.5 on one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from megarl.rollout.hf.attention import GROUPED
from megarl.rollout.hf.decoding import decode
from megarl.rollout.interface import SamplingParameters

PROMPTS = 32
SAMPLES = 8
PROMPT_TOKENS = (50, 70)
RESPONSE_TOKENS = 62
REPEATS = 3
LEAST_RATIO = 2.5


def model_config(**tokens: Any) -> Qwen2Config:
    """Return the configuration of a model with 6.3M parameters.

    Args:
        tokens: The ids of special tokens, if there is a tokenizer.
    """
    return Qwen2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        **tokens,
    )


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(model_config()).float().eval().requires_grad_(False)


def make_prompts() -> list[list[int]]:
    """Return the prompts, with the samples of a prompt next to each other."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(*PROMPT_TOKENS, (PROMPTS,), generator=generator).tolist()
    return [
        prompt
        for length in lengths
        for prompt in [torch.randint(4, 1000, (length,), generator=generator).tolist()] * SAMPLES
    ]


def ours(model: PreTrainedModel, prompts: list[list[int]]) -> int:
    model.set_attn_implementation(GROUPED)
    sampling = SamplingParameters(max_new_tokens=RESPONSE_TOKENS, seed=0)
    _, _, lengths, _ = decode(
        model, prompts, sampling, torch.tensor([], dtype=torch.int64), range(len(prompts))
    )
    return int(lengths.sum())


def transformers_own(model: PreTrainedModel, prompts: list[list[int]]) -> int:
    model.set_attn_implementation("sdpa")
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = (torch.arange(width) >= torch.tensor([width - len(prompt) for prompt in prompts])[:, None]).long()
    config = GenerationConfig(
        max_new_tokens=RESPONSE_TOKENS,
        min_new_tokens=RESPONSE_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
    )
    written = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)  # pyrefly: ignore[not-callable]  # a method of a mixin

    return int(written[:, width:].numel())


def tokens_per_cpu_s(
    write: Callable[[PreTrainedModel, list[list[int]]], int], model: PreTrainedModel, prompts: list[list[int]]
) -> float:
    begin = time.process_time()
    return write(model, prompts) / (time.process_time() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    model = make_model()
    prompts = make_prompts()
    rates: dict[str, list[float]] = {"megarl, hf engine": [], "transformers, generate": []}
    for write in (ours, transformers_own):  # the first call of each is slower
        write(model, prompts[: 2 * SAMPLES])

    for _ in range(REPEATS):
        for name, write in zip(rates, (ours, transformers_own), strict=True):
            rates[name].append(tokens_per_cpu_s(write, model, prompts))

    table = Table(
        "",
        "tokens / CPU s",
        title=f"{PROMPTS} x {SAMPLES} samples of {RESPONSE_TOKENS} tokens, best of {REPEATS}",
    )
    for name, values in rates.items():
        table.add_row(name, f"{max(values):,.0f}")
    mine, theirs = (max(values) for values in rates.values())
    console = Console()
    console.print(table)
    console.print(f"ratio {mine / theirs:.2f}, limit {LEAST_RATIO}")

    return 0 if mine / theirs >= LEAST_RATIO else 1


if __name__ == "__main__":
    raise SystemExit(main())
