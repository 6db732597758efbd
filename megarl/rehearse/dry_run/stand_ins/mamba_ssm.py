"""Simulate the function of mamba-ssm that Mamba-2 mixers call, on fake tensors.

It allocates, saves and returns what its counterpart does. A dry run uses it also where the package is not
installed: without it, a GPU would compute the same with torch, in more time and memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.rehearse.dry_run.stand_ins.te_signature import check, count_flops


def install() -> None:
    """Replace the function of the package. The fake device must be active."""
    from megarl.engine.mamba import use_kernels

    use_kernels(mamba_split_conv1d_scan_combined)


def mamba_split_conv1d_scan_combined(
    tokens: Tensor,
    convolution: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    decay: Tensor,
    skip: Tensor,
    chunk_size: int,
    *,
    seq_idx: Tensor,
    activation: str,
    rmsnorm_weight: Tensor,
    rmsnorm_eps: float,
    headdim: int,
    ngroups: int,
    norm_before_gate: bool,
) -> Tensor:
    """Mix tokens (1, T, gates, inputs, both vectors and time steps): (1, T, heads * head size)."""
    heads = len(decay)
    value = heads * headdim
    channels = len(convolution)
    check(tokens.shape[-1] == value + channels + heads, f"{tokens.shape[-1]} inputs do not fit the sizes")
    check(len(conv_bias) == channels and len(rmsnorm_weight) == value, "vectors of wrong sizes")
    check(len(dt_bias) == len(skip) == heads and heads % ngroups == 0, "numbers of heads differ")
    check(decay.dtype == dt_bias.dtype == torch.float32, "decays and time steps are not in float32")
    check(seq_idx.shape == tokens.shape[:2] and seq_idx.dtype == torch.int32, "wrong numbers of rows")
    check(activation == "silu" and not norm_before_gate, "this variant is not simulated")
    state = (channels - value) // (2 * ngroups)
    sizes = (chunk_size, headdim, ngroups, state)
    parameters = (convolution, conv_bias, dt_bias, decay, skip, rmsnorm_weight)
    output: Tensor = _Scan.apply(tokens, *parameters, sizes)
    return output


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *rest: Any) -> Tensor:
        *parameters, sizes = rest
        head_dim, num_groups = sizes[1:3]
        temporaries = _temporaries(tokens, parameters, sizes)
        count_flops(_flops(tokens, parameters, sizes))
        mixed = tokens.new_empty((*tokens.shape[:2], len(parameters[3]) * head_dim))
        scale = tokens.new_empty((*tokens.shape[:2], num_groups), dtype=torch.float32)
        output = torch.empty_like(mixed)

        # The kernel frees these when it returns, so they count in the peak only.
        del temporaries

        ctx.save_for_backward(tokens, *parameters, mixed, scale)
        ctx.sizes = sizes
        return output

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tokens, *parameters, mixed, _ = ctx.saved_tensors
        again = _temporaries(tokens, parameters, ctx.sizes)
        count_flops(2 * _flops(tokens, parameters, ctx.sizes))
        of_mixed = torch.empty_like(mixed)
        of_states = _states(tokens, parameters, ctx.sizes)
        gradients = [torch.empty_like(part) for part in (tokens, *parameters)]
        del again, of_mixed, of_states
        return (*gradients, None)


def _temporaries(tokens: Tensor, parameters: list[Tensor], sizes: tuple[int, ...]) -> list[Tensor]:
    """Return what the kernel computes in both passes: channels, time steps, decays, products and states."""
    chunk_size, _, num_groups, _ = sizes
    count = tokens.shape[1]
    numbers = tokens.new_empty((2, count, len(parameters[3])), dtype=torch.float32)
    pairs = tokens.new_empty((count, num_groups, chunk_size), dtype=torch.float32)
    return [
        tokens.new_empty((count, len(parameters[0]))),
        numbers,
        pairs,
        _states(tokens, parameters, sizes),
    ]


def _states(tokens: Tensor, parameters: list[Tensor], sizes: tuple[int, ...]) -> Tensor:
    """Return the states of all chunks, taking the rows to be one."""
    chunk_size, head_dim, _, state = sizes
    chunks = -(-tokens.shape[1] // chunk_size)
    return tokens.new_empty((chunks, len(parameters[3]), head_dim, state), dtype=torch.float32)


def _flops(tokens: Tensor, parameters: list[Tensor], sizes: tuple[int, ...]) -> int:
    """Return the operations of the recurrence, whose products are two per token and head."""
    _, head_dim, _, state = sizes
    return 2 * 2 * tokens.shape[1] * len(parameters[3]) * head_dim * state
