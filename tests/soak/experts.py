"""A tiny Qwen3-MoE learns the quickstart's sums, its experts dealt everywhere: `python -m tests.soak.experts
--seeds 0 1`.

PPO with the actor's and the reference's rows shared by two ranks (CP2 x EP2), the critic's layers by two (TP2
with sequence parallelism x EP2), and SGLang's by two (TP2 x EP2); weights are compared to the bit after every
push. Prints the share of held-out sums that are right, before and after, and ends with status 1 where a seed
gains less than 20 points. A seed takes some ten minutes on two cores.
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
    """From random weights, by demonstrations, then by PPO; what the second has gained."""
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
    """The quickstart's, with experts in the place of each layer's network, beside the tokenizer that is
    there."""
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
