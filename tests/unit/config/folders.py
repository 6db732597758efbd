"""Small versions of what a configuration names.

They are a model folder, data files and a reward file that exist, and a whole valid run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ARCHITECTURE = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 101,
}


def model_folder(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(ARCHITECTURE | changes))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()
    return folder


def ppo_values(folder: Path) -> dict[str, Any]:
    """12 prompts x 4 samples = 48 samples, 3 mini-batches of 16 rows, rows of at most 24 tokens."""
    for name in ("train.parquet", "reward.py"):
        (folder / name).touch()
    return {
        "model": {"path": str(model_folder(folder / "model")), "dtype": "bfloat16"},
        "data": {
            "train_files": [str(folder / "train.parquet")],
            "max_prompt_length": 16,
            "max_response_length": 8,
        },
        "actor": {
            "parallel": {"tensor_parallel_size": 2, "data_parallel_size": 2},
            "micro_batch": {"max_tokens": 64},
        },
        "critic": {
            "parallel": {"pipeline_parallel_size": 2},
            "micro_batch": {"sequences": 3, "max_tokens": None},
        },
        "reward": {"functions": [{"path": str(folder / "reward.py")}]},
        "rollout": {"n": 4},
        "trainer": {
            "total_steps": 10,
            "prompts_per_step": 12,
            "updates_per_step": 3,
            "epochs_per_batch": 2,
            "critic_warmup_steps": 4,
        },
    }


def sft_values(folder: Path) -> dict[str, Any]:
    (folder / "train.parquet").touch()
    return {
        "model": {"path": str(model_folder(folder / "model"))},
        "data": {"train_files": [str(folder / "train.parquet")], "max_length": 32},
        "trainer": {"total_steps": 5, "samples_per_step": 8},
    }


def pair_values(folder: Path) -> dict[str, Any]:
    (folder / "train.parquet").touch()
    return {
        "model": {"path": str(model_folder(folder / "model"))},
        "data": {"train_files": [str(folder / "train.parquet")], "max_length": 32},
        "actor": {"micro_batch": {"max_tokens": 64}},
        "trainer": {"total_steps": 5, "pairs_per_step": 3},
    }


def write_yaml(file: Path, values: dict[str, Any]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(values))
    return str(file)
