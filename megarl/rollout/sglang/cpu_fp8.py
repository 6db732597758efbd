"""Block-scaled FP8 in SGLang without CUDA; see cpu_adaptations.py.

Weights are dequantized in each product. Unlike on a GPU, activations are not quantized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from megarl.weights.fp8 import BLOCK


def dequantize_in_linear_layers() -> None:
    """Replace the kernels of SGLang's FP8 layers, which need a GPU or a CPU with AMX."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

    def keep(self: Any, layer: Any) -> None:
        pass

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, dequantized(layer.weight, layer.weight_scale_inv, x.dtype), bias)

    Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.bfloat16, torch.half, torch.float32])
    Fp8LinearMethod.process_weights_after_loading = keep
    Fp8LinearMethod.apply = apply


def dequantized(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix that quantized values and the scales of their blocks stand for."""
    rows, columns = values.shape
    wide = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (values.float() * wide).to(dtype)
