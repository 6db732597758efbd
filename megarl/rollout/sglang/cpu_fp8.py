"""Block-scaled FP8 and adapters in SGLang without CUDA; see cpu_adaptations.py.

FP8 weights are dequantized in each product. Unlike on a GPU, activations are not quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import linear

from megarl.models.fp8 import BLOCK

_FACTORIES = ("tensor", "empty", "zeros")  # of tensors
_DTYPE = "megarl_dtype"  # attribute of a weight: the dtype of the model


def dequantize_in_products() -> None:
    """Replace the kernels of SGLang's FP8 layers, which need a GPU or a CPU with AMX."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    Fp8Config.get_supported_act_dtypes = staticmethod(lambda: [torch.bfloat16, torch.half, torch.float32])
    Fp8LinearMethod.create_weights = _remembering_dtype(Fp8LinearMethod.create_weights)
    Fp8LinearMethod.process_weights_after_loading = _leave_as_loaded
    Fp8LinearMethod.apply = _apply_linear
    Fp8MoEMethod.process_weights_after_loading = _leave_as_loaded
    Fp8MoEMethod.create_moe_runner = _keep_runner_config
    Fp8MoEMethod.apply = _apply_experts
    deepseek_weight_loader.block_quant_to_tensor_quant = _dequantized_without_scale


def dequantized(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrices that quantized values and the scales of their blocks stand for.

    Args:
        values: Shape (..., N, K).
        scales: Shape (..., N / 128, K / 128), rounded up.
        dtype: The dtype of the result.
    """
    rows, columns = values.shape[-2:]
    wide = scales.repeat_interleave(BLOCK, -2)[..., :rows, :]
    wide = wide.repeat_interleave(BLOCK, -1)[..., :columns]
    return (values.float() * wide).to(dtype)


def _remembering_dtype(create_weights: Callable[..., None]) -> Callable[..., None]:
    @wraps(create_weights)
    def create(self: Any, layer: Any, *arguments: Any, **options: Any) -> None:
        create_weights(self, layer, *arguments, **options)
        vars(layer.weight)[_DTYPE] = layer.orig_dtype

    return create


def _apply_linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return linear(x, dequantized(layer.weight, layer.weight_scale_inv, x.dtype), bias)


def _leave_as_loaded(self: Any, layer: Any) -> None:
    pass


def _keep_runner_config(self: Any, layer: Any, moe_runner_config: Any) -> None:
    self.moe_runner_config = moe_runner_config


def _apply_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    experts: Any = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=dequantized(layer.w13_weight, layer.w13_weight_scale_inv, x.dtype),
        w2_weight=dequantized(layer.w2_weight, layer.w2_weight_scale_inv, x.dtype),
    )
    output = fused_moe_native.moe_forward_native(
        experts, x, dispatch_output.topk_output, self.moe_runner_config
    )
    return StandardCombineInput(hidden_states=output)


def _dequantized_without_scale(
    x_q_block: torch.Tensor, x_s: torch.Tensor, block_size: list[int]
) -> tuple[torch.Tensor, Any]:
    """Dequantize what latent attention stores products of, as SGLang does on CUDA.

    On a CPU, SGLang would quantize it again, with a single scale.
    """
    dtype: torch.dtype = vars(x_q_block)[_DTYPE]
    return dequantized(x_q_block, x_s, dtype), None


def leave_adapters_unpinned() -> None:
    """Ignore requests for pinned memory, which needs CUDA. SGLang's LoRA layers make them everywhere."""

    def without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(make)
        def made(*arguments: Any, **options: Any) -> torch.Tensor:
            options.pop("pin_memory", None)
            return make(*arguments, **options)

        return made

    for name in _FACTORIES:
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = _itself


def _itself(*arguments: Any, **_: Any) -> Any:
    return arguments[0]
