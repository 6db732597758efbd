"""Rotary embedding of packed sequences that replaces Megatron's: one rotation for the whole batch.

It reads nothing from the device. Megatron's version loops over the sequences, whose lengths it reads from the
device twice for queries and twice for keys, in every layer. Each time the host waits until the device has
finished all its work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

_POSITIONS = "megarl_positions"  # attribute of the tensor of sequence boundaries


def install() -> None:
    """Make Megatron's layers rotate packed queries and keys with `rotary_packed`. Imports Megatron-Core."""
    from megatron.core.models.common.embeddings import rope_utils

    rope_utils._apply_rotary_pos_emb_thd = rotary_packed

    if rope_utils.fused_apply_rotary_pos_emb_thd is not None:  # Transformer Engine's
        rope_utils.fused_apply_rotary_pos_emb_thd = partial(
            _fused_or_packed, rope_utils.fused_apply_rotary_pos_emb_thd
        )


def set_positions(cu_seqlens: Tensor, positions: Tensor) -> None:
    """Set the positions of tokens that are not 0, 1, 2, ... in each sequence, or of a part of the tokens.

    Args:
        cu_seqlens: The sequence boundaries of the batch.
        positions: (T,) integers on the device.
    """
    setattr(cu_seqlens, _POSITIONS, positions)


def _fused_or_packed(
    fused: Callable[..., Tensor], t: Tensor, cu_seqlens: Tensor, freqs: Tensor, **ranks: int
) -> Tensor:
    """Use the fused kernel only for whole sequences that start at position 0, which is all it supports."""
    return (
        rotary_packed(t, cu_seqlens, freqs)
        if hasattr(cu_seqlens, _POSITIONS)
        else fused(t, cu_seqlens, freqs, **ranks)
    )


class _Rotation(torch.autograd.Function):
    """A rotation, scaled by the magnitude of cosine and sine. Its gradient is rotated back and scaled too."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(heads, cos, sin, direction=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, sin, direction=-1), None, None


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotate each pair (x_i, x_{i + R/2}) of heads (T, heads, D) by the angle of its token and i.

    The cosine and sine are (T, 1, R/2). Elements of a head from R on are passed through.
    """
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    rotary_dim = 2 * cos.shape[-1]
    first, second = heads[..., :rotary_dim].chunk(2, -1)
    turned_first, turned_second = turned[..., :rotary_dim].chunk(2, -1)
    turned[..., rotary_dim:] = heads[..., rotary_dim:]

    # Both halves are written into one output, without a temporary tensor for each product.
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin, value=direction)

    return turned


def rotary_packed(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: torch.distributed.ProcessGroup | None = None,
    multi_latent_attention: bool | None = None,
) -> Tensor:
    """Replace Megatron's `_apply_rotary_pos_emb_thd`.

    Args:
        t: (T, heads, D).
        cu_seqlens: The boundaries of the sequences.
        freqs: (longest sequence, 1, 1, R). Elements of a head from R on are not rotated.
        rotary_interleaved: Not supported.
        mla_rotary_interleaved: Not supported.
        mscale: The factor of cosine and sine.
        cp_group: The context-parallel group. If ranks share rows, positions must be set.
        multi_latent_attention: The older name of `mla_rotary_interleaved`.
    """
    assert cp_group is None or cp_group.size() == 1 or hasattr(cu_seqlens, _POSITIONS), (
        "if ranks share rows, positions must be set"
    )

    # Other variants of Megatron's function are refused, since this one would compute them wrongly.
    assert not rotary_interleaved
    assert not mla_rotary_interleaved
    assert not multi_latent_attention
    return _Rotation.apply(t, *_angles(cu_seqlens, freqs, t, mscale))


def _angles(cu_seqlens: Tensor, freqs: Tensor, like: Tensor, mscale: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, (T, 1, R/2) each, multiplied by `mscale`.

    They are computed once per micro-batch and cached on its `cu_seqlens`, because every layer needs them.
    """
    kept = getattr(cu_seqlens, "megarl_angles", None)

    # Cached angles are valid only for the frequency table and the factor that they were made from.
    if kept is None or kept[0] is not freqs or kept[1] != mscale:
        num_tokens = like.shape[0]
        positions = getattr(cu_seqlens, _POSITIONS, None)
        if positions is None:
            # With the number of tokens given, the sum of the lengths need not be read from the device.
            starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=num_tokens)
            positions = torch.arange(num_tokens, device=like.device) - starts
        angles = freqs[positions, 0, :, : freqs.shape[-1] // 2]  # Megatron repeats them for each half
        cos = (angles.cos() * mscale).to(like.dtype)
        sin = (angles.sin() * mscale).to(like.dtype)
        kept = (freqs, mscale, cos, sin)
        cu_seqlens.megarl_angles = kept  # type: ignore[attr-defined]

    return kept[2], kept[3]
