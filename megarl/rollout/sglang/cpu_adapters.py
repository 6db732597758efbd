"""Replacements in SGLang's LoRA support that let it run without CUDA; see cpu_adaptations.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_FACTORIES = ("tensor", "empty", "zeros")


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
