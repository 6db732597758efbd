"""Stubs of Transformer Engine's modules for a CPU, with the same parameter names, shapes and places.

They compute bitwise the same as the local layers, so that every difference is a name or a place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.engine import engine
from megarl.engine.layers import AttentionCore, RMSNorm
from megarl.engine.rotary import rotary_packed


class StubColumn(ColumnParallelLinear):
    """Stub of TEColumnParallelLinear."""


class StubRow(RowParallelLinear):
    """Stub of TERowParallelLinear."""


class StubNorm(RMSNorm):
    """Stub of TENorm. Transformer Engine's modules have an extra state that is empty without FP8."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        pass


class StubNormColumn(ColumnParallelLinear):
    """Stub of TELayerNormColumnParallelLinear.

    The norm's weight is `layer_norm_weight`, on every rank. The fused kernel is two here.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        norm = RMSNorm(config, input_size, eps=config.layernorm_epsilon)
        self.layer_norm_weight = norm.weight
        self._norm = [norm]  # in a list, so that it is not registered as a submodule

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        (norm,) = self._norm
        norm.weight = self.layer_norm_weight
        return super().forward(norm(hidden))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the sharded state dict as in megatron.core.extensions.transformer_engine."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class StubAttention(AttentionCore):
    """Stub of TEDotProductAttention, of which nothing is stored."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        return {}


class StubProvider:
    """Stub of megatron.core.extensions.transformer_engine_spec_provider.TESpecProvider."""

    def column_parallel_linear(self) -> type:
        return StubColumn

    def row_parallel_linear(self) -> type:
        return StubRow

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return StubNormColumn

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return StubNorm

    def core_attention(self) -> type:
        return StubAttention

    def activation_func(self) -> None:
        return None

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> partial[SequentialMLP]:
        """Return experts computed one after another: no test here has any."""
        return partial(SequentialMLP, submodules=MLPSubmodules(linear_fc1=StubColumn, linear_fc2=StubRow))


def fused_rotary(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """Stub of fused_apply_rotary_pos_emb_thd, which Megatron uses on CUDA only."""
    return rotary_packed(t, cu_seqlens, freqs)


def install(active: bool) -> None:
    """Make engines in this process use the stubs, or local layers again."""
    from megarl.config.layers import LayerChoice
    from megarl.config.schema import Layers

    gpt_layer_specs.HAVE_TE = active
    rope_utils.fused_apply_rotary_pos_emb_thd = fused_rotary if active else None
    gpt_layer_specs.TESpecProvider = StubProvider
    choice = LayerChoice(Layers.transformer_engine if active else Layers.local, "for a test")
    engine.layers_for = lambda *_, **__: choice
