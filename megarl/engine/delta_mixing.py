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

from megarl.engine.context import whole_order
from megarl.engine.gated_delta_rule import (
    RowChunks,
    causal_convolution,
    gated_delta_rule,
    normalized,
    row_chunks,
)
from megarl.engine.packed_rows import PackedRows
from megarl.engine.platform import to_device
from megarl.models.architecture import DeltaNet


class DeltaRows(NamedTuple):
    """The rows of a batch, each with all tokens that its state depends on.

    Attributes:
        tokens: (R,) the tokens of all rows among those of the batch in rank order. None: the batch in order.
        own: For each token of the batch in rank order, its index among R. None: the batch in order.
        bounds: (rows + 1,) int64, the boundaries of the rows among R.
    """

    tokens: Tensor | None
    own: Tensor | None
    bounds: Tensor
    chunks: RowChunks


def delta_rows(packed: PackedRows) -> DeltaRows:
    """Return the rows of a packed batch. They are determined once per micro-batch and cached."""
    if packed.delta_rows is None:
        packed.delta_rows = _rows_with_prompts(packed)
    return packed.delta_rows


def _rows_with_prompts(packed: PackedRows) -> DeltaRows:
    device = packed.cu_seqlens_q.device
    starts = [sum(packed.lengths[:number]) for number in range(len(packed.lengths))]
    in_order = packed.place.size == 1 and not packed.shares_prompts

    # Positions in the batch of each row's prompt and of its own tokens.
    lengths = []
    positions = []
    own = []
    total = 0
    for start, length, prompt in zip(starts, packed.lengths, packed.prompts, strict=True):
        total += len(prompt)
        positions += [torch.arange(prompt.start, prompt.stop), torch.arange(start, start + length)]
        own.append(torch.arange(total, total + length))
        lengths.append(len(prompt) + length)
        total += length

    bounds = torch.tensor(lengths).cumsum(0)
    bounds = to_device(torch.cat((bounds.new_zeros(1), bounds)), device)
    chunks = row_chunks(lengths, device)
    if in_order:
        return DeltaRows(None, None, bounds, chunks)

    # Ranks exchange their tokens in rank order.
    order = whole_order(packed.lengths, packed.place.size)
    tokens = order[torch.cat(positions)]
    own_in_rank_order = torch.empty_like(order)
    own_in_rank_order[order] = torch.cat(own)
    return DeltaRows(to_device(tokens, device), to_device(own_in_rank_order, device), bounds, chunks)


def equal_rows(count: int, length: int, device: torch.device) -> DeltaRows:
    """Return the rows of a padded batch, one after another."""
    bounds = torch.arange(0, count * length + 1, length, device=device)
    return DeltaRows(None, None, bounds, row_chunks([length] * count, device))


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
    sizes: DeltaNet,
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
    sizes: DeltaNet,
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
    sizes: DeltaNet,
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


def _split(tokens: Tensor, sizes: DeltaNet) -> tuple[Tensor, ...]:
    """Split (R, F) into what the convolution sees, gates, and two numbers of each value head."""
    return tokens.split([sum(sizes.channels), *sizes.parts[3:]], -1)


def _heads(channels: Tensor, sizes: DeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys (R, key heads, size), and values (R, value heads, size)."""
    query, key, value = channels.split(sizes.channels, -1)
    query, key = (part.unflatten(-1, (sizes.num_key_heads, -1)) for part in (query, key))
    return query, key, value.unflatten(-1, (sizes.num_value_heads, -1))


def _for_value_heads(heads: Tensor, sizes: DeltaNet) -> Tensor:
    """Give each value head the queries or keys that it shares with others."""
    return heads.repeat_interleave(sizes.num_value_heads // sizes.num_key_heads, 1)


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
