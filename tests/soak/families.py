"""Train a tiny model of each family on the quickstart's sums by GRPO: `python -m tests.soak.families
--families glm4_moe llama`.

The model is the family's example with the sizes of the quickstart's model. It starts from random weights, and
learns first from demonstrations, then by GRPO. Models with experts distribute them over two ranks and
generate with SGLang, the others generate with transformers; `--engine` names another engine. Weights are
compared bitwise after every sync, and log-probs of trainer and engine in every step. The script prints the
share of correct held-out sums before and after, and exits with status 1 if a family gains less than 20
points.

Families with gated delta nets or attention sinks, and MiniMax-M2, are missing: SGLang supports them on GPUs only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.models.families import FAMILIES
from megarl.recipes.quickstart.prepare import MODEL, prepare
from tests.families import SPARSE_FAMILIES, example_architecture
from tests.soak.learning import LEAST_GAIN, megarl


def _is_served(family: str) -> bool:
    """Return whether an engine generates with the family on a CPU."""
    architecture = example_architecture(family)
    lacks = FAMILIES[family].cpu_engine_lacks
    return not lacks and not architecture.has_sinks and not architecture.delta_layers


# Models that read images learn to count shapes in tests/soak/shapes.py.
TRAINED = [name for name, family in FAMILIES.items() if family.tower_rows is None and _is_served(name)]
# The sizes that an example takes over from the quickstart's model, if it has them.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=TRAINED, default=TRAINED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--engine", choices=("hf", "sglang"), help="default: sglang for models with experts")
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        gains = []
        for family in arguments.families:
            folder = (arguments.folder or Path(temporary)) / family
            engine = arguments.engine or ("sglang" if family in SPARSE_FAMILIES else "hf")
            gains.append(learn(folder, family, engine, arguments.seed, arguments.steps))

    return int(min(gains) < LEAST_GAIN)


def learn(folder: Path, family: str, engine: str, seed: int, steps: int) -> float:
    """Train from random weights, first on demonstrations, then by GRPO. Returns the gain of GRPO."""
    prepare(folder, seed)
    save_model(folder / "model", family, seed)
    data = folder / "data"
    seeds = (f"trainer.seed={seed}", f"data.seed={seed}")
    megarl(
        "sft",
        "configs/quickstart_sft.yaml",
        f"model.path={folder / 'model'}",
        f"data.train_files=[{data / 'sft_train.parquet'}]",
        f"data.val_files=[{data / 'sft_validation.parquet'}]",
        f"trainer.output_dir={folder / 'sft'}",
        *seeds,
    )
    megarl(
        "train",
        "configs/quickstart.yaml",
        "algorithm=grpo",
        f"model.path={folder / 'sft' / 'huggingface'}",
        f"data.train_files=[{data / 'train.parquet'}]",
        f"data.val_files=[{data / 'validation.parquet'}]",
        f"rollout.engine={engine}",
        *(layout_of_experts() if family in SPARSE_FAMILIES else ()),
        f"trainer.total_steps={steps}",
        f"trainer.output_dir={folder / 'grpo'}",
        *seeds,
    )
    summary = json.loads((folder / "grpo" / "summary.json").read_text())
    before = summary["validation"]["before"]
    after = summary["validation"]["after"]
    minutes = summary["seconds"] / 60
    print(f"{family}: {before:.1%} before, {after:.1%} after {steps} steps in {minutes:.1f} min", flush=True)

    return float(after - before)


def layout_of_experts() -> tuple[str, ...]:
    return ("actor.parallel.sequence_parallel=true", "actor.parallel.expert_parallel_size=2")


def fields_of(family: str) -> dict[str, Any]:
    """Return the `config.json` of a family's example with the sizes of the quickstart's model."""
    quickstart = json.loads((MODEL / "config.json").read_text())
    example = FAMILIES[family].example()
    sizes = {name: quickstart[name] for name in SIZES if name in quickstart}
    # The factor of YaRN is the ratio of the example's contexts.
    rope = example.get("rope_parameters") or example.get("rope_scaling") or {}
    if rope.get("rope_type") == "yarn":
        del sizes["max_position_embeddings"]
    return example | sizes


def save_model(folder: Path, family: str, seed: int) -> None:
    """Save the model with random weights next to the existing tokenizer."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**fields_of(family))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
