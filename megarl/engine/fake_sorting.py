"""Sort the tokens of experts in one operation instead of two for each expert and rank.

A dry run counts what an operation allocates. Megatron-Core's function splits the tokens into a
chunk for each expert of each rank and joins them in another order: 512 operations on fake tensors per layer
with 128 ranks of two experts, most of the time of a dry run. Forward and backward allocate the joined tokens
only, as here. Both read the same numbers from the device, and refuse the same mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.machine.wording import counted


class _Sorted(torch.autograd.Function):
    """A copy, whose gradient is a copy."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        return tokens.clone()

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def install() -> None:
    """Make Megatron's dispatchers sort tokens in this way. Imports Megatron-Core."""
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.sort_chunks_by_idxs = sorting(token_dispatcher.sort_chunks_by_idxs)


def sorting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of Megatron's function `sort_chunks_by_idxs`."""

    def sort_chunks_by_idxs(
        input: Tensor,
        split_sizes: Tensor,
        sorted_idxs: Tensor,
        probs: Tensor | None = None,
        fused: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Replace Megatron's function of this name. Transformer Engine's fused one is a single operation."""
        if fused:
            return original(input, split_sizes, sorted_idxs, probs=probs, fused=fused)
        output = _sort(input, split_sizes, sorted_idxs)
        return output, None if probs is None else _sort(probs, split_sizes, sorted_idxs)

    return sort_chunks_by_idxs


def _sort(tokens: Tensor, split_sizes: Tensor, sorted_idxs: Tensor) -> Tensor:
    sizes = split_sizes.tolist()
    order = sorted_idxs.tolist()
    if sum(sizes) != tokens.shape[0] or sorted(order) != list(range(len(sizes))):
        raise ValueError(
            f"{counted(tokens.shape[0], 'token')} sorted as {counted(len(sizes), 'chunk')} of "
            f"{counted(sum(sizes), 'token')}, in an order of {counted(len(order), 'chunk')}"
        )
    return _Sorted.apply(tokens)
