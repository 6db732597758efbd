"""Simulate the functions of flash-linear-attention that gated delta nets call, on fake tensors.

Each allocates, saves and returns what its counterpart does. A dry run uses them also where the package is
not installed: without it, a GPU would compute the same with torch, in more time and memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.rehearse.dry_run.stand_ins.te_signature import check, count_flops

_CHUNK = 64


def install() -> None:
    """Replace the functions of the package. The fake device must be active."""
    from megarl.engine.delta_mixing import use_kernels

    use_kernels(causal_conv1d, l2norm, chunk_gated_delta_rule)


def causal_conv1d(
    *,
    x: Tensor,
    weight: Tensor,
    bias: None,
    activation: str,
    initial_state: None,
    output_final_state: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, None]:
    """Convolve channels: x (1, T, channels), weight (channels, W)."""
    check(x.shape[-1] == weight.shape[0], f"{x.shape[-1]} channels, but {weight.shape[0]} filters")
    check(not output_final_state and activation == "silu", "this variant is not simulated")
    output: Tensor = _Convolution.apply(x, weight)
    return output, None


def l2norm(heads: Tensor) -> Tensor:
    """Normalize the last dimension."""
    check(heads.is_contiguous(), "the heads are not contiguous")
    output: Tensor = _Norm.apply(heads)
    return output


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, None]:
    """Apply the rule: q and k (1, T, h, K), v (1, T, h, V), g and beta (1, T, h)."""
    check(q.shape == k.shape, f"queries {tuple(q.shape)} and keys {tuple(k.shape)} differ")
    check(q.shape[:3] == v.shape[:3] == g.shape == beta.shape, "tokens or heads differ")
    check(q.dtype == k.dtype == v.dtype and g.dtype == torch.float32, "wrong dtypes")
    check(not (output_final_state or use_qk_l2norm_in_kernel), "this variant is not simulated")
    output: Tensor = _Rule.apply(q, k, v, g, beta)
    return output, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return torch.empty(tokens.shape, dtype=tokens.dtype, device=tokens.device)

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        tokens, weight = ctx.saved_tensors
        return torch.empty_like(gradient), torch.empty_like(weight)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor) -> Tensor:
        output = torch.empty_like(heads)
        ctx.save_for_backward(output, heads.new_empty(heads.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient)


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        _count(query, value)
        total = torch.empty_like(decay)
        pairs = query.new_empty((*decay.shape, _CHUNK))

        # The changes of the states, those that depend on the state before the chunk, and the states.
        read = torch.empty_like(key)
        change = torch.empty_like(value)
        states = _states(query, value)
        new_change = torch.empty_like(value)
        output = torch.empty_like(value)

        # The kernels free these when they return, so they count in the peak only.
        del read, change, states, new_change

        ctx.save_for_backward(query, key, value, total, beta, pairs)
        return output

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, total, beta, pairs = ctx.saved_tensors
        _count(query, value)
        _count(query, value)
        again = [torch.empty_like(part) for part in (key, value, value)]
        states = [_states(query, value), _states(query, value)]
        of_changes = [torch.empty_like(part) for part in (value, value, key)]
        gradients = [torch.empty_like(part) for part in (query, key, value, total, beta)]
        second = [torch.empty_like(part) for part in (key, value, total)]
        del again, states, of_changes, second
        return tuple(gradients)


def _states(query: Tensor, value: Tensor) -> Tensor:
    """Return the states of all chunks, taking the rows to be one."""
    _, tokens, heads, key_size = query.shape
    return query.new_empty(1, -(-tokens // _CHUNK), heads, key_size, value.shape[-1])


def _count(query: Tensor, value: Tensor) -> None:
    """Count the operations of the recurrence, whose products are three per token and head."""
    count_flops(2 * 3 * query.numel() * value.shape[-1])
