"""Gated delta net layers.

Megatron's own module requires CUDA and flash-linear-attention to be built at all, and one kernel per length
for shared prompts. This one has Megatron's parameters and calls the same kernels if they are installed and
the tokens are on a GPU. Otherwise it computes with torch, and once more in the backward pass.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.engine.delta_mixing import DeltaRows, mix
from megarl.engine.recurrent_mixer import NamedWeight, RecurrentMixer, set_mixer
from megarl.models.architecture import Architecture, DeltaNet
from megarl.models.delta_net import has_delta_net


class GatedDeltaNet(RecurrentMixer[DeltaNet]):
    """A gated delta net."""

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.out_norm = NamedWeight(self.empty(self.sizes.value_head_dim))
        self.share_out(self.conv1d.weight, self.dt_bias, self.A_log)

    def mix(self, tokens: Tensor, rows: DeltaRows) -> Tensor:
        """Map the tokens of all rows (R, F) to (R, values), for the heads of this rank."""
        # Each rank's heads contribute to the gradient of the norm, with or without sequence parallelism.
        norm = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tensor_group)
        return mix(
            tokens,
            self.of_context_rank(self.conv1d.weight, self.sizes.channels),
            self.of_context_rank(self.A_log),
            self.of_context_rank(self.dt_bias),
            norm,
            rows,
            self.sizes.over(self.context_group.size()),
            self.eps,
        )


def delta_options(architecture: Architecture) -> dict[str, Any]:
    """Return Megatron's options for gated delta nets. A list makes Megatron store each layer separately."""
    layers = range(architecture.num_hidden_layers)
    return {"linear_attention_freq": [int(has_delta_net(architecture, layer)) for layer in layers]}


def set_modules(layer: ModuleSpec, architecture: Architecture, provider: Any) -> None:
    """Give a layer a gated delta net instead of attention."""
    set_mixer(layer, GatedDeltaNet, architecture.sizes_of(DeltaNet), provider)
