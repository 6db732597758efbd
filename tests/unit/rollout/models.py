"""Tiny models in Hugging Face folders, and their weights as a trainer sends them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from megarl.config.schema import Device, DType, ModelConfig, RolloutConfig
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import RolloutEngine, RolloutEngineSpec
from megarl.weights.tensors import Manifest, TensorMeta
from tests import plain_trainer
from tests.families import example_config, is_kept, new_model
from tests.unit.weights.models import as_stored

VOCAB = 97


def random_model(
    family: str = "qwen2",
    *,
    tied: bool = False,
    seed: int = 0,
    eos_token_id: int | None = None,
    vocab_size: int = VOCAB,
    hidden_size: int = 32,
    num_layers: int = 2,
    rope_parameters: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Return a model whose logits are spread over a few units, so that temperature and truncation make a
    difference."""
    config = example_config(
        family,
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=vocab_size,
        max_position_embeddings=64,
        rope_scaling=None,
        rope_theta=1e4,
        num_experts=6,
        num_local_experts=6,
        n_routed_experts=6,
        moe_intermediate_size=16,
        tie_word_embeddings=tied,
        eos_token_id=eos_token_id,
    )
    if rope_parameters is not None:
        config.rope_parameters = rope_parameters

    model = new_model(config)
    generator = torch.Generator().manual_seed(seed)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25 + ("norm" in name))
        for buffer in _stored_buffers(model).values():
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)

    return model.eval()


def manifest_of(model: PreTrainedModel) -> Manifest:
    return {name: TensorMeta(tuple(value.shape), value.dtype) for name, value in weights_of(model).items()}


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights that a trainer has, by their names in a folder."""
    parameters = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if not is_kept(name, model.config)
    }
    return as_stored(parameters | _stored_buffers(model), model)


def _stored_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the buffers that a folder has: the selection biases of routers."""
    return {name: value for name, value in model.named_buffers() if name.endswith("correction_bias")}


def push(model: PreTrainedModel, engine: RolloutEngine, version: int = 1) -> None:
    plain_trainer.push(engine, weights_of(model), version, message_numel=5_000)


def engine_for(
    model: PreTrainedModel,
    folder: Path,
    max_concurrency: int = 64,
    dtype: torch.dtype = torch.float32,
    is_ended: Callable[[list[int]], bool] | None = None,
    fp32_lm_head: bool = False,
) -> HFEngine:
    """Return an engine without weights, from a folder without weights."""
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    policy = ModelConfig(path=str(folder), dtype=DType(str(dtype).removeprefix("torch.")))

    return HFEngine(
        RolloutEngineSpec(
            model=policy,
            rollout=RolloutConfig(max_concurrency=max_concurrency),
            device=Device.cpu,
            fp32_lm_head=fp32_lm_head,
        ),
        is_ended,
    )
