"""Rotary embedding of packed sequences, in the place of Megatron's own: one turn of the whole batch, and
nothing asked of the device.

Megatron's loops over the sequences, whose lengths it reads from the device twice for queries and twice for
keys, in every layer: each time the host waits until the device has done all it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

_POSITIONS = "megarl_positions"  # on boundaries of sequences


def install() -> None:
    """Megatron's layers turn packed queries and keys by `rotary_packed`. Imports Megatron-Core."""
    from megatron.core.models.common.embeddings import rope_utils

    rope_utils._apply_rotary_pos_emb_thd = rotary_packed

    if rope_utils.fused_apply_rotary_pos_emb_thd is not None:  # Transformer Engine's
        rope_utils.fused_apply_rotary_pos_emb_thd = partial(
            _fused_or_packed, rope_utils.fused_apply_rotary_pos_emb_thd
        )


def set_positions(cu_seqlens: Tensor, positions: Tensor) -> None:
    """The tokens of a batch with those boundaries are at other positions than 0, 1, 2, ... in each sequence,
    or are not all of them.
    positions: (T,) integers, on the device."""
    setattr(cu_seqlens, _POSITIONS, positions)


def _fused_or_packed(
    fused: Callable[..., Tensor], t: Tensor, cu_seqlens: Tensor, freqs: Tensor, **ranks: int
) -> Tensor:
    """The fused kernel begins each sequence at 0, and takes all of it."""
    return (
        rotary_packed(t, cu_seqlens, freqs)
        if hasattr(cu_seqlens, _POSITIONS)
        else fused(t, cu_seqlens, freqs, **ranks)
    )


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(heads, cos, sin, direction=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, sin, direction=-1), None, None


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """(T, heads, D): each pair (x_i, x_{i + D/2}) is rotated by the angle of its token and i, given as (T, 1,
    D/2)."""
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    (first, second), (turned_first, turned_second) = heads.chunk(2, -1), turned.chunk(2, -1)

    # Both halves are written into one output, without a temporary tensor for each product.
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin, value=direction)

    return turned


def rotary_packed(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor:
    """Megatron's `_apply_rotary_pos_emb_thd`: t (T, heads, D) with the boundaries `cu_seqlens`, freqs
    (longest sequence, 1, 1, D)."""
    assert cp_group is None or cp_group.size() == 1 or hasattr(cu_seqlens, _POSITIONS), (
        "where ranks share rows, positions must be set"
    )

    # Other variants of Megatron's function are refused, since this one would compute them wrongly.
    assert not rotary_interleaved
    assert not multi_latent_attention
    assert mscale == 1.0
    assert freqs.shape[-1] == t.shape[-1], "a partial rotation is not supported"

    return _Rotation.apply(t, *_angles(cu_seqlens, freqs, t))


def _angles(cu_seqlens: Tensor, freqs: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (T, 1, D/2), made once per micro-batch and kept on its `cu_seqlens`, because every
    layer asks."""
    kept = getattr(cu_seqlens, "megarl_angles", None)

    # The kept angles are valid only for the table of frequencies that they were made from.
    if kept is None or kept[0] is not freqs:
        num_tokens = like.shape[0]
        positions = getattr(cu_seqlens, _POSITIONS, None)
        if positions is None:
            # With the number of tokens told, the device is not asked for the sum of the lengths.
            starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=num_tokens)
            positions = torch.arange(num_tokens, device=like.device) - starts
        angles = freqs[positions, 0, :, : like.shape[-1] // 2]  # Megatron writes them twice, once per half
        kept = (freqs, angles.cos().to(like.dtype), angles.sin().to(like.dtype))
        cu_seqlens.megarl_angles = kept  # type: ignore[attr-defined]

    return kept[1], kept[2]
