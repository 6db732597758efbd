"""What a Hugging Face `config.json` says about a model, as one frozen value that every layer reads. No torch.

The families differ in a handful of switches (`qkv_bias`, `qk_norm`, rope scaling, experts), so one dataclass holds
them all. A field of the JSON that would change the maths and is not handled here is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Field names are Hugging Face's. `tie_word_embeddings`: the output layer is the input embedding."""

    model_type: str  # qwen2, qwen3, llama
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
