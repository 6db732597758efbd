"""Train a tiny Qwen3-MoE on the quickstart's sums, with its experts distributed everywhere: `python -m
tests.soak.experts --seeds 0 1`.

The run is PPO with the rows of actor and reference split over two ranks (CP2 x EP2), the critic's layers over
two (TP2 with sequence parallelism x EP2), and SGLang's over two (TP2 x EP2). Weights are compared bitwise
after every sync. The script prints the share of correct held-out sums before and after, and exits with status
1 if a seed gains less than 20 points. A seed takes about ten minutes on two cores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megarl.recipes.quickstart.prepare import MODEL
from tests.soak.learning import run_seeds

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "head_dim": 32,
}
LAYOUT = (
    "actor.parallel.tensor_parallel_size=1",
    "actor.parallel.context_parallel_size=2",
    "actor.parallel.expert_parallel_size=2",
    "critic.parallel.tensor_parallel_size=2",
    "critic.parallel.sequence_parallel=true",
    "critic.parallel.expert_parallel_size=2",
    "rollout.engine=sglang",
    "rollout.tensor_parallel_size=2",
    "rollout.expert_parallel_size=2",
    "resharding.verify=always",
)


def main() -> int:
    return run_seeds(__doc__, save_model, ("actor.parallel.expert_parallel_size=2",), LAYOUT)


def save_model(folder: Path, seed: int) -> None:
    """Save the quickstart's model with experts instead of each layer's MLP, next to the existing
    tokenizer."""
    sizes = json.loads((MODEL / "config.json").read_text())
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **{key: value for key, value in sizes.items() if key not in ("architectures", "model_type")},
        **EXPERTS,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
