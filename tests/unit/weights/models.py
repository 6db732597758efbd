"""Tiny Hugging Face models of each family, and their Megatron shards made by slow loops that share no code with the tables."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from megarl.config.architecture import Architecture

NUM_LAYERS, HIDDEN, HEADS, KV_HEADS, VOCAB, FFN = 4, 32, 8, 4, 199, 20
PADDED_VOCAB = 208  # a multiple of 8: divisible by TP 1, 2, 4; with TP 4 the last rank has 9 padded rows


def config_of(family: str, *, tied: bool = False, num_layers: int = NUM_LAYERS) -> PretrainedConfig:
    shared = dict(
        num_hidden_layers=num_layers,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    if family == "qwen2":
        return Qwen2Config(**shared)
    if family == "qwen3":
        return Qwen3Config(**shared, head_dim=6)
    return LlamaConfig(**shared)


def architecture_of(family: str, *, tied: bool = False, num_layers: int = NUM_LAYERS, num_key_value_heads: int = KV_HEADS) -> Architecture:
    return Architecture(
        model_type=family,
        num_hidden_layers=num_layers,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=num_key_value_heads,
        head_dim=6 if family == "qwen3" else HIDDEN // HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def random_model(family: str, *, tied: bool = False, seed: int = 0, num_layers: int = NUM_LAYERS) -> PreTrainedModel:
    """Norms and biases are random too, so that a swapped or forgotten one shows."""
    model = AutoModelForCausalLM.from_config(config_of(family, tied=tied, num_layers=num_layers), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + ("norm" in name))
    return model


def save(model: PreTrainedModel, folder: Path, max_shard_size: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def slow_shards(
    state: dict[str, torch.Tensor],
    architecture: Architecture,
    *,
    tensor_parallel_size: int,
    rank: int,
    layers: tuple[int, ...],
    holds_embedding: bool,
    holds_output: bool,
) -> dict[str, torch.Tensor]:
    """The rank's Megatron parameters, row by row, as Megatron-Core lays them out."""
    shards: dict[str, torch.Tensor] = {}
    if holds_embedding:
        shards["embedding.word_embeddings.weight"] = _vocabulary(state["model.embed_tokens.weight"], tensor_parallel_size, rank)
    for layer in layers:
        hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        shards[megatron + "input_layernorm.weight"] = state[hf + "input_layernorm.weight"]
        shards[megatron + "pre_mlp_layernorm.weight"] = state[hf + "post_attention_layernorm.weight"]
        for kind in ("weight", "bias") if architecture.qkv_bias else ("weight",):
            q, k, v = (state[f"{hf}self_attn.{letter}_proj.{kind}"] for letter in "qkv")
            shards[f"{megatron}self_attention.linear_qkv.{kind}"] = _qkv(q, k, v, architecture, tensor_parallel_size, rank)
        if architecture.qk_norm:
            shards[megatron + "self_attention.q_layernorm.weight"] = state[hf + "self_attn.q_norm.weight"]
            shards[megatron + "self_attention.k_layernorm.weight"] = state[hf + "self_attn.k_norm.weight"]
        shards[megatron + "self_attention.linear_proj.weight"] = _columns(state[hf + "self_attn.o_proj.weight"], tensor_parallel_size, rank)
        ffn = architecture.intermediate_size // tensor_parallel_size
        rows = [state[f"{hf}mlp.{part}_proj.weight"][rank * ffn + row] for part in ("gate", "up") for row in range(ffn)]
        shards[megatron + "mlp.linear_fc1.weight"] = torch.stack(rows)
        shards[megatron + "mlp.linear_fc2.weight"] = _columns(state[hf + "mlp.down_proj.weight"], tensor_parallel_size, rank)
    if holds_output:
        shards["decoder.final_layernorm.weight"] = state["model.norm.weight"]
        if not architecture.tie_word_embeddings:
            shards["output_layer.weight"] = _vocabulary(state["lm_head.weight"], tensor_parallel_size, rank)
        elif not holds_embedding:
            shards["output_layer.weight"] = _vocabulary(state["model.embed_tokens.weight"], tensor_parallel_size, rank)
    return shards


def _vocabulary(matrix: torch.Tensor, tensor_parallel_size: int, rank: int) -> torch.Tensor:
    rows = [matrix[row] if row < VOCAB else torch.zeros(HIDDEN) for row in range(PADDED_VOCAB)]
    count = PADDED_VOCAB // tensor_parallel_size
    return torch.stack(rows[rank * count : (rank + 1) * count])


def _qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, architecture: Architecture, tensor_parallel_size: int, rank: int
) -> torch.Tensor:
    groups, dim = architecture.num_key_value_heads, architecture.head_dim
    heads_per_group = architecture.num_attention_heads // groups
    rows = []
    for group in range(groups):
        if group // (groups // tensor_parallel_size) != rank:
            continue
        for head in range(group * heads_per_group, (group + 1) * heads_per_group):
            rows += [q[head * dim + index] for index in range(dim)]
        rows += [k[group * dim + index] for index in range(dim)]
        rows += [v[group * dim + index] for index in range(dim)]
    return torch.stack(rows)


def _columns(matrix: torch.Tensor, tensor_parallel_size: int, rank: int) -> torch.Tensor:
    count = matrix.shape[1] // tensor_parallel_size
    return torch.stack([matrix[:, column] for column in range(rank * count, (rank + 1) * count)], dim=1)
