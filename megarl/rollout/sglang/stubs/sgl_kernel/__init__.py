"""Stub of sgl_kernel, whose wheels need CUDA: every name can be imported, and raises when it is called."""

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0"

# SGLang's module of Qwen3.5 looks these operators up when it is imported. A call raises NotImplementedError.
_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _LIBRARY.define(f"{_name}() -> ()")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*arguments: object, **keywords: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called: it is a CUDA kernel, and this process runs SGLang on the CPU"
        )

    kernel.__name__ = name
    return kernel
