"""Selects the kernels of torch's operators of flash attention on CUDA: FlashAttention 2, 3 or 4.

torch contains FlashAttention 2. Once another implementation is activated, the whole process uses it. The
operators, and so all callers (`varlen_attn`, `shared_prompts`), stay the same.
"""

from __future__ import annotations

from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from megarl.config.layers import missing_flash_attention
from megarl.config.schema import FlashAttention


def activate(asked: FlashAttention) -> None:
    """Activate kernels in this process. A second call may request others.

    Raises:
        ValueError: Their package is not installed.
    """
    if asked is FlashAttention.fa2:
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
        return

    # torch would only report the module that it cannot import.
    if (missing := missing_flash_attention(asked)) is not None:
        package, hint = missing
        raise ValueError(
            f"engine.flash_attention={asked.value}, but the package {package} is not installed: {hint}"
        )

    if current_flash_attention_impl() != (name := asked.value.upper()):
        activate_flash_attention_impl(name)
