"""The kernels that make Megatron fast on a CPU: matrix products of linear layers by oneDNN, and rotary embedding of packed rows at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# ---- linear layers
#
# torch multiplies float32 matrices on a CPU with MKL, which leaves half of an AMD processor unused (measured on Zen 5: 100
# against oneDNN's 220 GFLOP/s per core; both round alike, in float32). oneDNN is in torch already, as the operator that
# torch.compile emits for linear layers.

# Multiplications of a product from which oneDNN, whose calls cost 15 microseconds more, is the faster one.
MIN_ONEDNN_SIZE = 2**20
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left (M, K), right (N, K), bias (N,) -> left @ right.T + bias (M, N). Either matrix may be transposed in memory. Has no gradient."""
    large = left.shape[0] * right.numel() >= MIN_ONEDNN_SIZE
    if large and _HAS_ONEDNN and left.device.type == "cpu" and left.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return F.linear(left, right, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return product(hidden.flatten(0, -2), weight, bias).view(*hidden.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2).contiguous()
        return (
            product(rows, weight.t()).view_as(hidden) if need_hidden else None,
            product(rows.t(), hidden.flatten(0, -2).t()) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """hidden (..., K), weight (N, K), bias (N,) -> (..., N): `torch.nn.functional.linear` on `product`."""
    return _Linear.apply(hidden, weight, bias)


# ---- rotary position embedding of packed sequences: one turn of the whole batch, not a loop over sequences


class _Turn(torch.autograd.Function):
    """The gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(heads, cos, sin, direction=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _turn(gradient, *ctx.saved_tensors, direction=-1), None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """(T, heads, D): each pair (x_i, x_{i + D/2}) is turned by the angle of its token and i, given as (T, 1, D/2)."""
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    (first, second), (turned_first, turned_second) = heads.chunk(2, -1), turned.chunk(2, -1)
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
    """Megatron's `_apply_rotary_pos_emb_thd`: t (T, heads, D) with the boundaries `cu_seqlens`, freqs (longest sequence, 1, 1, D).

    Megatron slices and joins once per sequence, in each layer, for queries and keys: on short sequences that is most of
    the time.
    """
    assert cp_group is None or cp_group.size() == 1, "context parallelism is not supported yet"
    assert not rotary_interleaved
    assert not multi_latent_attention
    assert mscale == 1.0
    assert freqs.shape[-1] == t.shape[-1], "a partial rotation is not supported"
    return _Turn.apply(t, *_angles(cu_seqlens, freqs, t))


def _angles(cu_seqlens: Tensor, freqs: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (T, 1, D/2), made once per micro-batch and kept on its `cu_seqlens`, because every layer asks."""
    kept = getattr(cu_seqlens, "megarl_angles", None)
    if kept is None or kept[0] is not freqs:
        lengths = cu_seqlens.diff()
        positions = torch.arange(like.shape[0], device=like.device) - torch.repeat_interleave(cu_seqlens[:-1], lengths)
        angles = freqs[positions, 0, :, : like.shape[-1] // 2]  # Megatron writes them twice, once per half
        kept = (freqs, angles.cos().to(like.dtype), angles.sin().to(like.dtype))
        cu_seqlens.megarl_angles = kept  # type: ignore[attr-defined]
    return kept[1], kept[2]
