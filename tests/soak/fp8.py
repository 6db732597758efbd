"""Train a tiny Qwen3 on the quickstart's sums with an engine in FP8: `python -m tests.soak.fp8 --seeds 0`.

SGLang dequantizes its weights in each product, because CPUs have no FP8 kernels; activations are not
quantized. Rollout correction accounts for the difference from the weights that train, and checksums of the
quantized weights are compared after every sync. The script prints the share of correct held-out sums before
and after, and exits with status 1 if a seed gains less than 20 points.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megarl.recipes.quickstart.prepare import MODEL
from tests.soak.learning import run_seeds

# Whole blocks of 128 on each of SGLang's two ranks.
BLOCKS = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 256}
OPTIONS = (
    "rollout.engine=sglang",
    "rollout.dtype=fp8",
    "rollout.tensor_parallel_size=2",
    "algorithm.rollout_correction.level=token",
    "resharding.verify=always",
    "resharding.max_log_prob_difference=0.1",
)


def main() -> int:
    return run_seeds(__doc__, save_model, (), OPTIONS)


def save_model(folder: Path, seed: int) -> None:
    """Save a Qwen3 of the quickstart's depth and width next to the existing tokenizer."""
    sizes = json.loads((MODEL / "config.json").read_text())
    torch.manual_seed(seed)
    kept = {key: value for key, value in sizes.items() if key not in ("architectures", "model_type")}
    Qwen3ForCausalLM(Qwen3Config(**kept | BLOCKS)).float().save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
