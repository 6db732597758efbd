"""A rotary embedding of its own for layers with a sliding window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megarl.engine.rope_frequencies import attention_factor, inverse_frequencies
from megarl.models.architecture import Architecture


def set_local_rotation(layers: Iterable[Any], architecture: Architecture, like: RotaryEmbedding) -> None:
    """Let layers with a window rotate by `local_rope` instead of the angles that the model gives all layers.

    Args:
        layers: Megatron's layers of this rank.
        like: The rotary embedding of the other layers.
    """
    local = architecture.local_rope
    assert local is not None
    on_cpu = like.inv_freq.device.type == "cpu"
    rotation = RotaryEmbedding(
        architecture.rotary_dim, rotary_percent=1.0, use_cpu_initialization=on_cpu, cp_group=like.cp_group
    )
    frequencies = inverse_frequencies(architecture.rotary_dim, local.theta, local.scaling)
    rotation.inv_freq = frequencies.to(like.inv_freq.device)

    def with_local_angles(
        attention: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the angles, (S, 1, 1, R)."""
        packed = options["packed_seq_params"] is not None
        angles = rotation(options["rotary_pos_emb"].shape[0], packed_seq=packed)
        return inputs, options | {"rotary_pos_emb": angles}

    for layer in layers:
        if architecture.windows[layer.layer_number - 1]:
            attention = layer.self_attention
            attention._yarn_concentration_factor = attention_factor(local.scaling)
            attention.register_forward_pre_hook(with_local_angles, with_kwargs=True)
