"""Rotary embedding of packed sequences that replaces Megatron's: one rotation for the whole batch.

The rotation reads nothing from the device. Megatron's version loops over the sequences, whose lengths it
reads from the device twice for queries and twice for keys, in every layer. Each time the host waits until the
device has finished all its work. Frequencies, and the factor of cosine and sine, are computed as in
transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.models.architecture import Architecture, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from megarl.models.layers import window_of

_POSITIONS = "megarl_positions"  # attributes of the tensor of sequence boundaries
_AXES = "megarl_position_axes"
_TABLE = "megarl_longest_table"  # an attribute of rotary embeddings


def install() -> None:
    """Replace Megatron's rotation of packed rows, and its tables of angles. Imports Megatron-Core."""
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding

    # pyrefly: ignore[bad-assignment]  # Megatron's method is in a cache
    rotary_pos_embedding.RotaryEmbedding.forward = angles_up_to
    rope_utils._apply_rotary_pos_emb_thd = rotary_packed

    if rope_utils.fused_apply_rotary_pos_emb_thd is not None:  # Transformer Engine's
        rope_utils.fused_apply_rotary_pos_emb_thd = partial(
            _fused_or_packed, rope_utils.fused_apply_rotary_pos_emb_thd
        )


def angles_up_to(
    self: Any,
    max_seq_len: int,
    offset: int = 0,
    packed_seq: bool = False,
    cp_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor:
    """Return the angles (max_seq_len, 1, 1, R) of positions. Replaces Megatron's `RotaryEmbedding.forward`.

    Megatron keeps a table for each of the last 32 lengths, 64 MiB each at 128k tokens. This keeps the longest
    one, of which the others are a part.
    """
    group = cp_group or self.cp_group
    assert offset == 0
    assert packed_seq or group is None or group.size() == 1, "context-parallel ranks share packed rows only"

    frequencies, table = getattr(self, _TABLE, (None, torch.empty(0)))
    if frequencies is not self.inv_freq or len(table) < max_seq_len:
        table = self.get_emb(max_seq_len)
        setattr(self, _TABLE, (self.inv_freq, table))

    return table[:max_seq_len]


def set_positions(cu_seqlens: Tensor, positions: Tensor, axes: Tensor | None = None) -> None:
    """Set the positions of tokens that are not 0, 1, 2, ... in each sequence, or of a part of the tokens.

    Args:
        cu_seqlens: The sequence boundaries of the batch.
        positions: (T,) integers on the device, or (3, T) with axes.
        axes: (R/2,) for each frequency, which of three positions it rotates by.
    """
    setattr(cu_seqlens, _POSITIONS, positions)
    setattr(cu_seqlens, _AXES, axes)


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
    """A rotation of the pairs (x_i, x_{i + R/2}) of heads (T, heads, D) by the angle of their token and i.

    If `interleaved`, pairs are (x_{2i}, x_{2i + 1}), and the rotated ones are stored as (i, i + R/2): queries
    and keys are reordered in the same way, so their products are the same. Elements of a head from R on are
    passed through. The cosine and sine are (T, 1, R/2), and may have a magnitude. The gradient is rotated
    back and scaled too.
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
        rotated = 2 * cos.shape[-1]
        # Interleaved pairs become halves. Queries and keys are permuted equally, which does not change their
        # products.
        _rotate(_pairs(heads, rotated, interleaved), _pairs(turned, rotated), cos, sin, direction=1)
        turned[..., rotated:] = heads[..., rotated:]
        return turned

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        turned = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        rotated = 2 * cos.shape[-1]
        _rotate(_pairs(gradient, rotated), _pairs(turned, rotated, ctx.interleaved), cos, sin, direction=-1)
        turned[..., rotated:] = gradient[..., rotated:]
        return turned, None, None, None


# The first and the second number of each pair of a tensor, as views (T, heads, R/2).
_Pairs = Sequence[Tensor]


def _pairs(heads: Tensor, rotated: int, interleaved: bool = False) -> _Pairs:
    if interleaved:
        return heads[..., 0:rotated:2], heads[..., 1:rotated:2]
    return heads[..., :rotated].chunk(2, -1)


def _rotate(pairs: _Pairs, turned: _Pairs, cos: Tensor, sin: Tensor, direction: int) -> None:
    """Write the rotated `pairs` into `turned`, without a temporary tensor for each product."""
    first, second = pairs
    first_turned, second_turned = turned
    torch.mul(first, cos, out=first_turned).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=second_turned).addcmul_(first, sin, value=direction)


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
        mla_rotary_interleaved: Whether pairs are neighbors, as in latent attention.
        mscale: The factor of cosine and sine.
        cp_group: The context-parallel group. If ranks share rows, positions must be set.
        multi_latent_attention: The older name of `mla_rotary_interleaved`.
    """
    assert cp_group is None or cp_group.size() == 1 or hasattr(cu_seqlens, _POSITIONS), (
        "if ranks share rows, positions must be set"
    )

    # Other variants of Megatron's function are refused, since this one would compute them wrongly.
    assert not rotary_interleaved
    assert not multi_latent_attention
    return _Rotation.apply(t, *_angles(cu_seqlens, freqs, t, mscale), mla_rotary_interleaved)


def _angles(cu_seqlens: Tensor, freqs: Tensor, like: Tensor, mscale: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, (T, 1, R/2) each, multiplied by `mscale`.

    They are computed once per micro-batch and cached on its `cu_seqlens`, because every layer needs them.
    Layers may have different tables.
    """
    cached = getattr(cu_seqlens, "megarl_angles", ())
    # Latent attention takes the beginning of the table again in each layer.
    table = freqs if freqs._base is None else freqs._base

    # Cached angles are valid only for the frequency table and the factor that they were made from.
    kept = next((entry for entry in cached if entry[0] is table and entry[1] == mscale), None)
    if kept is None:
        num_tokens = like.shape[0]
        positions = getattr(cu_seqlens, _POSITIONS, None)
        if positions is None:
            # With the number of tokens given, the sum of the lengths need not be read from the device.
            starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=num_tokens)
            positions = torch.arange(num_tokens, device=like.device) - starts
        axes = getattr(cu_seqlens, _AXES, None)
        if axes is None:
            angles = freqs[positions, 0, :, : freqs.shape[-1] // 2]  # Megatron repeats them for each half
        else:
            angles = freqs[:, 0, 0, : len(axes)].gather(0, positions[axes].T)[:, None]
        cos = (angles.cos() * mscale).to(like.dtype)
        sin = (angles.sin() * mscale).to(like.dtype)
        kept = (table, mscale, cos, sin)
        cu_seqlens.megarl_angles = (*cached, kept)  # pyrefly: ignore[missing-attribute]

    return kept[2], kept[3]


def set_local_rotation(layers: Iterable[Any], architecture: Architecture, like: Any) -> None:
    """Let layers with a window rotate by `local_rope` instead of the angles that the model gives all layers.

    Args:
        layers: Megatron's layers of this rank.
        like: The rotary embedding of the other layers.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    assert architecture.local_rope is not None
    theta, scaling = architecture.local_rope
    on_cpu = like.inv_freq.device.type == "cpu"
    rotation = RotaryEmbedding(
        architecture.rotary_dim, rotary_percent=1.0, use_cpu_initialization=on_cpu, cp_group=like.cp_group
    )
    rotation.inv_freq = inverse_frequencies(architecture.rotary_dim, theta, scaling).to(like.inv_freq.device)

    def with_local_angles(
        attention: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the angles, (S, 1, 1, R)."""
        packed = options["packed_seq_params"] is not None
        angles = rotation(options["rotary_pos_emb"].shape[0], packed_seq=packed)
        return inputs, options | {"rotary_pos_emb": angles}

    for layer in layers:
        if window_of(architecture, layer.layer_number - 1):
            attention = layer.self_attention
            attention._yarn_concentration_factor = attention_factor(scaling)
            attention.register_forward_pre_hook(with_local_angles, with_kwargs=True)


def inverse_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the rotary inverse frequencies, (rotary_dim / 2,) float32.

    Args:
        rotary_dim: The number of rotated elements of a head.
        theta: The base frequency.
        scaling: The scaling of a model whose context was extended.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / (theta**exponent)

    match scaling:
        case None:
            return frequencies
        case LinearScaling():
            return frequencies / scaling.factor
        case Llama3Scaling():
            return _llama3(frequencies, scaling)
        case YarnScaling():
            return _yarn(frequencies, theta, scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return the factor of cosine and sine. The products of queries and keys have its square."""
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow long wavelengths by `factor`, keep short ones, and blend those between.

    A wavelength is long or short by how often it fits into the original context length.
    """
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / frequencies
    # From 0 for the longest wavelengths that are blended to 1 for the shortest.
    smooth = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(
        wavelength > original / scaling.low_freq_factor, frequencies / scaling.factor, blended
    )

    return torch.where(wavelength < original / scaling.high_freq_factor, frequencies, scaled)


def _yarn(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Keep dimensions that rotate often, slow those that rotate rarely, with a linear ramp between them."""
    rotary_dim = 2 * len(frequencies)
    original = scaling.original_max_position_embeddings

    def dimension(rotations: float) -> float:
        """Return the dimension that rotates that many times within the original context length."""
        # Solves original / (2 pi theta ** (2 d / rotary_dim)) = rotations for d.
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.beta_fast)
    high = dimension(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)

    # The bounds may coincide in a tiny model.
    low = max(low, 0)
    high = min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0, 1)

    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
