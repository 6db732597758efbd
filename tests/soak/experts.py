"""Train a tiny Qwen3-MoE on the quickstart's sums, with its experts distributed everywhere: `python -m
tests.soak.experts --seeds 0 1`.

The run is PPO with the rows of actor and reference split over two ranks (CP2 x EP2), the critic's layers over
two (TP2 with sequence parallelism x EP2), and SGLang's over two (TP2 x EP2). Weights are compared bitwise
after every sync. The script prints the share of correct held-out sums before and after, and exits with status
1 if a seed gains less than 20 points. A seed takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megarl.recipes.quickstart.prepare import MODEL, prepare
from tests.docs.pages import ROOT

LEAST_GAIN = 0.2
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        gains = [
            learn((arguments.folder or Path(temporary)) / str(seed), seed, arguments.steps)
            for seed in arguments.seeds
        ]

    return int(min(gains) < LEAST_GAIN)


def learn(folder: Path, seed: int, steps: int) -> float:
    """Train from random weights, first on demonstrations, then by PPO. Returns the gain of PPO."""
    prepare(folder, seed)
    save_model(folder / "model", seed)
    data = folder / "data"
    seeds = (f"trainer.seed={seed}", f"data.seed={seed}")
    megarl(
        "sft",
        "configs/quickstart_sft.yaml",
        f"model.path={folder / 'model'}",
        f"data.train_files=[{data / 'sft_train.parquet'}]",
        f"data.val_files=[{data / 'sft_validation.parquet'}]",
        "actor.parallel.expert_parallel_size=2",
        f"trainer.output_dir={folder / 'sft'}",
        *seeds,
    )
    megarl(
        "train",
        "configs/quickstart.yaml",
        f"model.path={folder / 'sft' / 'huggingface'}",
        f"data.train_files=[{data / 'train.parquet'}]",
        f"data.val_files=[{data / 'validation.parquet'}]",
        *LAYOUT,
        f"trainer.total_steps={steps}",
        f"trainer.output_dir={folder / 'ppo'}",
        *seeds,
    )
    summary = json.loads((folder / "ppo" / "summary.json").read_text())
    before = summary["validation"]["before"]
    after = summary["validation"]["after"]
    print(
        f"seed {seed}: {before:.1%} before, {after:.1%} after {steps} steps in "
        f"{summary['seconds'] / 60:.1f} minutes",
        flush=True,
    )

    return float(after - before)


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


def megarl(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "megarl", *arguments], cwd=ROOT, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
