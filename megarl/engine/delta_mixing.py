"""Mix the tokens of rows by the gated delta rule, with torch or with flash-linear-attention.

Shapes: R tokens of all rows, F outputs of the input projection on a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import common as megatron_delta_net
from torch import Tensor

from megarl.engine.delta_rows import DeltaRows
from megarl.engine.gated_delta_rule import causal_convolution, gated_delta_rule, normalized


class Sizes(NamedTuple):
    """The parts of the input projection of one rank, and its heads."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int

    @property
    def channels(self) -> list[int]:
        """Queries, keys and values, which the convolution sees."""
        key = self.key_heads * self.key_head_dim
        return [key, key, self.value_heads * self.value_head_dim]

    @property
    def parts(self) -> list[int]:
        """Queries, keys, values, gates, and two numbers of each value head."""
        return [*self.channels, self.channels[-1], self.value_heads, self.value_heads]

    def over(self, ranks: int) -> Sizes:
        """Return the sizes of one of several ranks among which the heads are distributed."""
        return self._replace(key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)


def use_kernels(convolution: Callable[..., Any], norm: Callable[..., Any], rule: Callable[..., Any]) -> None:
    """Replace the functions that Megatron imports from flash-linear-attention, installed or not."""
    kernels: Any = megatron_delta_net
    kernels.causal_conv1d = convolution
    kernels.l2norm = norm
    kernels.chunk_gated_delta_rule = rule
    kernels.HAVE_FLA = True


def mix(
    tokens: Tensor,
    convolution: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    rows: DeltaRows,
    sizes: Sizes,
    eps: float,
) -> Tensor:
    """Map the tokens of all rows (R, F) to the normalized and gated values of the rank's heads (R, values).

    Args:
        tokens: Queries, keys, values, gates, strengths and decays, before the convolution.
        convolution: (queries, keys and values, 1, W).
        a_log: (value heads,)
        dt_bias: (value heads,)
        norm: (value size,) the weight of the gated norm.
        sizes: The sizes of the rank's heads.
    """
    arguments = (tokens, convolution, a_log, dt_bias, norm)
    if tokens.device.type == "cuda" and megatron_delta_net.HAVE_FLA:
        return _mix_by_kernels(*arguments, rows, sizes, eps)
    mixed: Tensor = _Recomputed.apply(_mix_by_torch, (rows, sizes, eps), *arguments)
    return mixed


def _mix_by_torch(
    tokens: Tensor,
    convolution: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    rows: DeltaRows,
    sizes: Sizes,
    eps: float,
) -> Tensor:
    channels, gate, strength, decay = _split(tokens, sizes)
    channels = causal_convolution(channels, convolution, rows.chunks.offsets)
    query, key, value = _heads(channels, sizes)
    query, key = (_for_value_heads(normalized(heads), sizes) for heads in (query, key))
    mixed = gated_delta_rule(
        query, key, value, _log_decay(decay, a_log, dt_bias), strength.sigmoid(), rows.chunks
    )
    return _gated_norm(mixed, gate, norm, eps)


def _mix_by_kernels(
    tokens: Tensor,
    convolution: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    rows: DeltaRows,
    sizes: Sizes,
    eps: float,
) -> Tensor:
    """Compute the same as `_mix_by_torch` by flash-linear-attention, called as Megatron's module does."""
    kernels: Any = megatron_delta_net  # which are None in a module without flash-linear-attention

    channels, gate, strength, decay = _split(tokens, sizes)
    channels, _ = kernels.causal_conv1d(
        x=channels[None],
        weight=convolution[:, 0],
        bias=None,
        activation="silu",
        initial_state=None,
        output_final_state=False,
        cu_seqlens=rows.bounds,
    )

    query, key, value = _heads(channels[0], sizes)
    query, key = (_for_value_heads(kernels.l2norm(heads.contiguous()), sizes) for heads in (query, key))

    mixed, _ = kernels.chunk_gated_delta_rule(
        query[None],
        key[None],
        value.contiguous()[None],
        g=_log_decay(decay, a_log, dt_bias)[None],
        beta=strength.sigmoid()[None],
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=rows.bounds,
    )

    output: Tensor = _Recomputed.apply(_gated_norm, (eps,), mixed[0], gate, norm)
    return output


def _split(tokens: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """Split (R, F) into what the convolution sees, gates, and two numbers of each value head."""
    return tokens.split([sum(sizes.channels), *sizes.parts[3:]], -1)


def _heads(channels: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys (R, key heads, size), and values (R, value heads, size)."""
    query, key, value = channels.split(sizes.channels, -1)
    query, key = (part.unflatten(-1, (sizes.key_heads, -1)) for part in (query, key))
    return query, key, value.unflatten(-1, (sizes.value_heads, -1))


def _for_value_heads(heads: Tensor, sizes: Sizes) -> Tensor:
    """Give each value head the queries or keys that it shares with others."""
    return heads.repeat_interleave(sizes.value_heads // sizes.key_heads, 1)


def _log_decay(decay: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return the logarithm of each head's decay (R, value heads), in float32."""
    return -a_log.float().exp() * F.softplus(decay.float() + dt_bias)


def _gated_norm(mixed: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize each head (R, value heads, D), scale it and multiply it by SiLU of its gate: (R, values).

    It rounds like Hugging Face.
    """
    normalized = weight * F.rms_norm(mixed.float(), weight.shape, None, eps).to(mixed.dtype)
    gated = normalized * F.silu(gate.float()).view_as(mixed)
    return gated.to(mixed.dtype).flatten(1)


class _Recomputed(torch.autograd.Function):
    """Call a function of tensors and save its inputs only. The backward pass calls it again."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], rest: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.call = function, rest
        return function(*tensors, *rest)

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        function, rest = ctx.call
        inputs = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        # The forward pass saved the inputs only, so the function runs again.
        with torch.enable_grad():
            output = function(*inputs, *rest)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradient))
        return None, None, *(next(found) if tensor.requires_grad else None for tensor in inputs)
