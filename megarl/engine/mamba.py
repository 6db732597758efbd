"""Mamba-2 mixers, with torch or with the kernels of mamba-ssm and causal-conv1d.

Megatron's own module requires both packages to be built at all. This one has Megatron's parameters and calls
the same kernels if they are installed and the tokens are on a GPU. Otherwise it computes with torch, and once
more in the backward pass.

A head has a state S, a matrix of a state vector's size times the head's (Dao & Gu 2024, arXiv 2405.21060). A
token with input x, time step t, and the vectors b and c of its group changes it and reads it:

    S <- exp(-t exp(A_log)) S + t b x^T,    y = S^T c + D x.

Shapes: R tokens of all rows, F outputs of the input projection on a rank, h heads, g groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer as megatron_mamba
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.engine.delta_mixing import DeltaRows, Recomputed, RowChunks, carry_states, causal_convolution
from megarl.engine.recurrent_mixer import NamedWeight, RecurrentMixer, set_mixer
from megarl.models.architecture import Architecture, Mamba

_KERNEL_CHUNK = 128  # tokens that the kernels process at a time


class Mamba2Mixer(RecurrentMixer[Mamba]):
    """A Mamba-2 mixer."""

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.conv1d.bias = torch.nn.Parameter(self.empty(sum(self.sizes.channels)))
        self.D = torch.nn.Parameter(self.empty(self.sizes.num_heads))
        self.norm = NamedWeight(self.empty(self.sizes.value_dim))
        self.share_out(*(parameter for name, parameter in self.named_parameters() if "_proj." not in name))

    def mix(self, tokens: Tensor, rows: DeltaRows) -> Tensor:
        """Map the tokens of all rows (R, F) to (R, values), for the heads of this rank."""
        channels = self.sizes.channels
        convolution: Any = self.conv1d
        arguments = (
            tokens,
            self.of_context_rank(convolution.weight, channels),
            self.of_context_rank(convolution.bias, channels),
            self.of_context_rank(self.A_log),
            self.of_context_rank(self.dt_bias),
            self.of_context_rank(self.D),
            self.of_context_rank(self.norm.weight),
        )
        sizes = self.sizes.over(self.context_group.size())
        if tokens.device.type == "cuda" and _has_kernels():
            return _mix_by_kernels(*arguments, rows, sizes, self.eps)
        return Recomputed.apply(_mix_by_torch, (rows, sizes, self.eps), *arguments)


def _has_kernels() -> bool:
    return megatron_mamba.HAVE_MAMBA_SSM and megatron_mamba.causal_conv1d_fn is not None


def use_kernels(mix: Callable[..., Any]) -> None:
    """Replace the function that Megatron imports from mamba-ssm, installed or not."""
    kernels: Any = megatron_mamba
    kernels.mamba_split_conv1d_scan_combined = mix
    kernels.causal_conv1d_fn = mix  # which is called inside
    kernels.HAVE_MAMBA_SSM = True


def _mix_by_torch(
    tokens: Tensor,
    convolution: Tensor,
    conv_bias: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    norm: Tensor,
    rows: DeltaRows,
    sizes: Mamba,
    eps: float,
) -> Tensor:
    """Map the tokens of all rows (R, F) to the gated and normalized outputs of the rank's heads (R, values).

    Args:
        tokens: Gates, inputs, both vectors of each group, and time steps, before the convolution.
        convolution: (inputs and vectors, 1, W).
        conv_bias: (inputs and vectors,)
        a_log: (h,)
        dt_bias: (h,)
        skip: (h,) what each head adds of its input to its output.
        norm: (values,) the weight of the gated norm.
    """
    gate, channels, step = tokens.split([sizes.value_dim, sum(sizes.channels), sizes.num_heads], -1)
    channels = causal_convolution(channels, convolution, rows.chunks.offsets, conv_bias)
    inputs, written, read = channels.split(sizes.channels, -1)
    inputs = inputs.unflatten(-1, (sizes.num_heads, -1))
    written, read = (part.unflatten(-1, (sizes.num_groups, -1)) for part in (written, read))

    steps = F.softplus(step.float() + dt_bias)
    mixed = state_space(inputs, written, read, steps, -a_log.float().exp() * steps, rows.chunks)
    mixed = mixed + inputs.float() * skip.float()[:, None]
    return _gated_norm(mixed.to(tokens.dtype).flatten(1), gate, norm, sizes.num_groups, eps)


def state_space(
    inputs: Tensor, written: Tensor, read: Tensor, steps: Tensor, decay: Tensor, chunks: RowChunks
) -> Tensor:
    """Return what each token reads, (R, h, head size) float32.

    Args:
        inputs: (R, h, head size).
        written: (R, g, state size) the vector b of each group.
        read: (R, g, state size) the vector c of each group.
        steps: (R, h) time steps.
        decay: (R, h) the logarithm of the decay.
    """
    places = chunks.places.flatten()
    shape = chunks.places.shape
    heads_of_group = inputs.shape[1] // written.shape[1]

    def chunked(tokens: Tensor) -> Tensor:
        """Map (R, h, ...) to (N, h, C, ...)."""
        return tokens.float().index_select(0, places).unflatten(0, shape).transpose(1, 2)

    keys, queries = (chunked(part).repeat_interleave(heads_of_group, 1) for part in (written, read))
    values = chunked(inputs) * chunked(steps)[..., None]
    total = chunked(decay).cumsum(-1)  # (N, h, C) since the beginning of the chunk

    # How much what a token has written has decayed when a later token reads it, (N, h, C, C).
    later = torch.ones(shape[1], shape[1], dtype=torch.bool, device=total.device).triu(1)
    pairs = (total[..., None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()

    within = queries @ keys.transpose(-1, -2) * pairs
    queries = queries * total.exp()[..., None]
    keys = keys * (total[..., -1:] - total).exp()[..., None]
    mixed = carry_states(queries, keys, values, within, total[..., -1].exp(), chunks.num_rows)
    return mixed.transpose(1, 2).flatten(0, 1).index_select(0, chunks.inverse)


def _mix_by_kernels(
    tokens: Tensor,
    convolution: Tensor,
    conv_bias: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    norm: Tensor,
    rows: DeltaRows,
    sizes: Mamba,
    eps: float,
) -> Tensor:
    """Compute the same as `_mix_by_torch` by the kernels that Megatron's module calls."""
    kernels: Any = megatron_mamba
    mixed = kernels.mamba_split_conv1d_scan_combined(
        tokens[None],
        convolution[:, 0],
        conv_bias,
        dt_bias.float(),
        -a_log.float().exp(),
        skip,
        _KERNEL_CHUNK,
        seq_idx=row_numbers(rows, len(tokens)),
        activation="silu",
        rmsnorm_weight=norm,
        rmsnorm_eps=eps,
        headdim=sizes.head_dim,
        ngroups=sizes.num_groups,
        norm_before_gate=False,
    )
    return mixed[0]


def row_numbers(rows: DeltaRows, num_tokens: int) -> Tensor:
    """Return the number of the row of each token, (1, R) int32."""
    places = torch.arange(num_tokens, device=rows.bounds.device)
    return torch.bucketize(places, rows.bounds[1:], right=True).to(torch.int32)[None]


def _gated_norm(mixed: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    """Multiply outputs (R, values) by SiLU of their gates, and normalize the heads of each group together."""
    gated = mixed.float() * F.silu(gate.float())
    of_groups = gated.unflatten(-1, (num_groups, -1))
    normalized = F.rms_norm(of_groups, of_groups.shape[-1:], None, eps).flatten(1)
    return weight * normalized.to(mixed.dtype)


def set_modules(layer: ModuleSpec, architecture: Architecture, provider: Any) -> None:
    """Give a layer a Mamba-2 mixer instead of attention."""
    set_mixer(layer, Mamba2Mixer, architecture.sizes_of(Mamba), provider)
