"""Multi-head latent attention: Megatron's, adapted to local layers, tensor parallelism and packed rows.

tests/unit/engine/test_megatron_evidence.py quotes the parts of Megatron that make it necessary.

Values are narrower than keys. Megatron pads those of packed rows with zeros to the size of keys, and
`AttentionCore` those of padded batches. So attention has one head size, which every kernel supports: on CUDA
that is flash attention with heads of 192 numbers for DeepSeek-V3, where a kernel of its own for 192 and 128
would do a sixth less work.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megarl.engine.cpu_kernels import linear
from megarl.engine.layers import RMSNorm
from megarl.engine.rotary import attention_factor
from megarl.models.architecture import Architecture, LatentAttention, YarnScaling
from megarl.models.latent import megatron_sizes


class ReplicatedLinear(torch.nn.Module):
    """A linear layer whose weight every tensor-parallel rank has, like Transformer Engine's "duplicated" one.

    Megatron's local layers cut the down projections of latent attention over ranks and gather their outputs.
    The backward pass of that gathering keeps a rank's own part of a gradient, which must be summed over ranks
    first: with two ranks, the gradient of the projection of keys and values is wrong by 13 %.
    """

    def __init__(self, input_size: int, output_size: int, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank has a part of the tokens. Megatron sums the gradients of marked
        # parameters.
        self.sequence_parallel: bool = config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # pyrefly: ignore[missing-attribute]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Map (..., input) to (..., output). Like Megatron's layers, also returns a bias."""
        return linear(hidden, self.weight, None), None


class LatentSelfAttention(MLASelfAttention):
    """Megatron's latent attention with down projections whose gradients are right with any layout."""

    linear_kv_down_proj: Any
    linear_q_down_proj: Any

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        latent_size = config.kv_lora_rank + config.qk_pos_emb_head_dim

        # Transformer Engine's layers are replicated already.
        if isinstance(self.linear_kv_down_proj, ColumnParallelLinear):
            self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, latent_size, config)
            if config.q_lora_rank is not None:
                self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the modules of the specification, which are right for every case."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Project hidden states (S, b, H) to the latent vectors of queries, and of keys and values.

        The latter include the rotated key. Each rank's heads contribute to its gradient. Under sequence
        parallelism, Megatron gathers it with a sum in the backward pass.
        """
        query, key_value = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() > 1 and not self.config.sequence_parallel:
            sizes = (self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim)
            latent, rotated = key_value.split(sizes, dim=-1)
            rotated = copy_to_tensor_model_parallel_region(rotated, group=self.tp_group)
            key_value = torch.cat((latent, rotated), dim=-1)
        return query, key_value


class LatentRotation(RotaryEmbedding):
    """The rotary embedding of all layers, with the factor of cosine and sine that YaRN has."""

    def __init__(self, frequencies: Tensor, factor: float, like: RotaryEmbedding) -> None:
        super().__init__(2 * len(frequencies), rotary_percent=1.0, cp_group=like.cp_group)
        self.inv_freq: Tensor = frequencies.to(like.inv_freq.device)
        self.factor = factor

    # pyrefly: ignore[bad-override]  # Megatron's method is in a cache
    def forward(self, max_seq_len: int, *, packed_seq: bool = False) -> tuple[Tensor, float]:
        """Return the angles (S, 1, 1, D) of positions, and the factor."""
        return super().forward(max_seq_len, packed_seq=packed_seq), self.factor


def latent_options(architecture: Architecture) -> dict[str, Any]:
    """Return Megatron's options for latent attention."""
    yarn = architecture.rope_scaling if isinstance(architecture.rope_scaling, YarnScaling) else None

    return {
        **megatron_sizes(architecture),
        # The layers' embeddings are replaced by a LatentRotation, which is called like one of YaRN.
        # Megatron's fused kernels would start each sequence at position 0.
        "rope_type": "yarn",
        "apply_rope_fusion": False,
        # Megatron multiplies the softmax scale by the square of a function of these two: 1 without YaRN.
        "rotary_scaling_factor": yarn.factor if yarn else 1.0,
        "mscale_all_dim": (yarn.mscale_all_dim or 0.0) if yarn else 0.0,
    }


def set_modules(layer: ModuleSpec, architecture: Architecture, provider: Any) -> None:
    """Give a layer latent attention whose gradients are right.

    Args:
        provider: Megatron's provider of Transformer Engine's classes, None for local layers.
    """
    modules: Any = layer.submodules
    modules.self_attention.module = LatentSelfAttention
    if provider is None:
        attention = modules.self_attention.submodules
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        # Transformer Engine has the norms of latent vectors in the up projections, and that of a dense MLP in
        # its first layer. Checkpoints have the same names for both kinds of layers.
        modules.sharded_state_dict_keys_map = {
            "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }


def set_rotation(model: torch.nn.Module, architecture: Architecture, frequencies: Tensor) -> None:
    """Give all layers one rotary embedding, and the norms of latent vectors their epsilon.

    With one embedding, the angles of a micro-batch are computed once (see rotary.py).

    Args:
        frequencies: The inverse frequencies, (rotary_dim / 2,) float32.
    """
    attentions = [module for module in model.modules() if isinstance(module, LatentSelfAttention)]
    if not attentions:
        return
    factor = attention_factor(architecture.rope_scaling)
    rotation = LatentRotation(frequencies, factor, like=attentions[0].rotary_pos_emb)

    for attention in attentions:
        attention.rotary_pos_emb = rotation
        # Transformer Engine has the norms inside the up projections.
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            module: Any = getattr(attention, name, None)
            if hasattr(module, "eps"):
                module.eps = architecture.sizes_of(LatentAttention).norm_eps
