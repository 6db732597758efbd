"""Attention with sliding windows, and with a sink in each head: a logit in the softmax that has no value.

A sink divides the softmax by a larger sum. A kernel computes attention without it and returns the log-sum-exp
of its logits; the result is scaled by the share of that sum in the whole. Its backward pass recomputes the
softmax weights from a log-sum-exp: given that of the whole, it returns the gradients of attention with sinks.

Shapes: T tokens of the batch, heads of queries, groups of keys and values, D numbers in each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.engine.layers import whole_keys
from megarl.engine.packed_rows import PackedRows
from megarl.engine.shared_prompts import Sequences, kernel_for
from megarl.models.architecture import Architecture
from megarl.models.layers import window_of


class SinkAttention(torch.nn.Module):
    """Causal attention with windows and sinks that replaces Megatron's and Transformer Engine's.

    The shapes are those of `AttentionCore`. It supports padded and packed rows, shared prompts and context
    parallelism; on CUDA, 16-bit dtypes only. The keys of a shared prompt are copied for each response.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *unused_arguments: Any,
        architecture: Architecture,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert config.attention_dropout == 0.0
        self.softmax_scale = softmax_scale
        self.window = window_of(architecture, layer_number - 1)
        self.context: dist.ProcessGroup | None = (
            pg_collection.cp if config.context_parallel_size > 1 else None
        )
        self.tensor_group = pg_collection.tp
        self.softmax_offset: torch.nn.Parameter | None = None

        if architecture.has_sinks:
            heads = config.num_attention_heads // self.tensor_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> Tensor:
        assert attention_bias is None
        assert attention_mask is None
        if query.device.type == "cuda" and query.dtype == torch.float32:
            raise ValueError(
                "attention with sinks or windows has no float32 kernel on CUDA; set model.dtype=bfloat16"
            )

        if packed_seq_params is None:
            length, batch = query.shape[:2]
            query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
            mixed = self._attend(query, key, value, _equal_sequences(batch, length, query.device))
            return mixed.view(batch, length, -1).transpose(0, 1).contiguous()

        packed = packed_seq_params
        if self.context is not None:
            key, value = whole_keys(key, value, self.context)

        # Each piece has its own copy of the keys that it sees, in the order of their positions.
        places, sequences = packed.key_places
        if self.context is not None or packed.shares_prompts:
            key, value = (tensor.index_select(0, places) for tensor in (key, value))
        return self._attend(query, key, value, sequences)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        sinks = self.softmax_offset
        mixed: Tensor = _Attention.apply(query, key, value, sinks, sequences, self.softmax_scale, self.window)
        return mixed.flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Describe the sinks for Megatron's checkpoints. Megatron's own attention has the same name."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def set_modules(layer: ModuleSpec, architecture: Architecture, provider: Any) -> None:
    """Replace the core of attention: no other one has sinks and windows for shared prompts."""
    modules: Any = layer.submodules
    modules.self_attention.submodules.core_attention = partial(SinkAttention, architecture=architecture)


def _equal_sequences(count: int, length: int, device: torch.device) -> Sequences:
    bounds = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device)
    return Sequences([length] * count, [length] * count, bounds, bounds)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        sequences: Sequences,
        scale: float | None,
        window: int,
    ) -> Tensor:
        query, key, value = (tensor.contiguous() for tensor in (query, key, value))
        output, log_sum, state = kernel_for(query).forward(query, key, value, sequences, True, scale, window)

        # The sink takes its share of the softmax's sum, and has no value.
        if sinks is not None:
            whole = torch.logaddexp(log_sum, sinks.float())
            output = (output.float() * (log_sum - whole).exp_()[..., None]).to(output.dtype)
            log_sum = whole

        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        ctx.rest = sequences, scale, window, state
        return output

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        sequences, scale, window, state = ctx.rest
        gradient = gradient.contiguous()
        whole = output, log_sum, state
        gradients = kernel_for(query).backward(
            gradient, query, key, value, whole, sequences, True, scale, window
        )

        # The gradient of a logit is its weight, times the gradient of its value minus the mean of all values.
        of_sinks = None
        if sinks is not None:
            mean = (gradient.float() * output.float()).sum(-1)
            of_sinks = -((sinks.float() - log_sum).exp_() * mean).sum(0).to(sinks.dtype)

        return *gradients, of_sinks, None, None, None
