"""Configurations of dry runs with models that only have a `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.config.schema import (
    ActorConfig,
    DataConfig,
    Device,
    DType,
    EngineConfig,
    Layers,
    MicroBatchConfig,
    ModelConfig,
    ParallelConfig,
    PlacementConfig,
    PPOConfig,
    Recompute,
    TrainerConfig,
)
from megarl.rehearse.dry_run.record import RankRequest

TINY: dict[str, Any] = {
    "vocab_size": 199,  # padded to 256
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# Llama 3 70B has ten times as many.
EIGHT_LAYERS_OF_70B: dict[str, Any] = {
    "vocab_size": 128256,  # padded to 129024 for eight tensor-parallel ranks
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
PROMPT = RESPONSE = 64
ROWS = 4  # the rows of a micro-batch
TOKENS = ROWS * (PROMPT + RESPONSE)
SMALL = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)


def save_config(folder: Path, shape: dict[str, Any]) -> str:
    folder.mkdir(parents=True)
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    }
    (folder / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": False, **shape}))

    return str(folder)


def ppo(
    model: str,
    parallel: ParallelConfig,
    *,
    prompt: int = PROMPT,
    response: int = RESPONSE,
    max_tokens: int = TOKENS,
    recompute: Recompute = Recompute.none,
    device_gb: float | None = None,
    layers: Layers = Layers.local,
) -> PPOConfig:
    return PPOConfig(
        model=ModelConfig(path=model, dtype=DType.bfloat16),
        data=DataConfig(max_prompt_length=prompt, max_response_length=response),
        actor=ActorConfig(
            parallel=parallel, micro_batch=MicroBatchConfig(max_tokens=max_tokens), recompute=recompute
        ),
        placement=PlacementConfig(device_memory_gb=device_gb),
        trainer=TrainerConfig(prompts_per_step=1024),
        engine=EngineConfig(layers=layers),
        device=Device.cuda,
    )


def requests(config: PPOConfig, ranks: list[int]) -> list[RankRequest]:
    return [
        RankRequest(config, "actor", rank, max(2, config.actor.parallel.pipeline_parallel_size))
        for rank in ranks
    ]
