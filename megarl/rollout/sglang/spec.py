"""What an SGLang engine is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.config.schema import SGLangMode


@dataclass(frozen=True, kw_only=True)
class SGLangSpec:
    """path: the model's Hugging Face folder, of which no weights are read.
    dtype: of weights and cache. device: its type is what counts.
    tensor_parallel_size: its scheduler processes. max_concurrency: sequences that are generated at the same time.
    max_total_tokens: that the cache holds; None: on CUDA what the device's memory has left, on the CPU enough for
    `max_concurrency` sequences or 65,536 tokens, whichever is less.
    deterministic: on CUDA, kernels whose results do not depend on the batch; on the CPU that is always so.
    server_args: SGLang's own options by their names. with_tokenizer: needed where `min_new_tokens` is used.
    release_memory: the engine will be put to sleep. health_limit_s: without a sign of life for so long it is taken for dead.
    host: address that the server mode listens on.
    """

    path: Path
    dtype: torch.dtype
    device: torch.device
    tensor_parallel_size: int = 1
    max_concurrency: int = 256
    max_total_tokens: int | None = None
    mode: SGLangMode = SGLangMode.engine
    deterministic: bool = False
    server_args: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    with_tokenizer: bool = False
    release_memory: bool = False
    health_limit_s: float = 120.0
    host: str = "127.0.0.1"
