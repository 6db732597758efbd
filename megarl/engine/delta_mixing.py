"""Mix the tokens of rows by the gated delta rule, with torch or with flash-linear-attention.

The gated delta rule (Yang et al. 2025, arXiv 2412.06464) is computed in chunks of tokens, for rows of any
lengths. A head has a state S, a matrix of a key's size times a value's. A token with query q, key k, value v,
strength b and log decay g <= 0 changes it and reads it:

    S <- exp(g) S,    S <- S + k (b (v - k^T S))^T,    o = q^T S.

Within a chunk, the changes of all tokens are the solution of a triangular system. So only the states between
chunks are computed one after another, for all rows at once.

Shapes: R tokens of all rows, F outputs of the input projection on a rank, N chunks, C tokens of a chunk, h
heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import common as megatron_delta_net
from torch import Tensor

from megarl.engine.context import whole_order
from megarl.engine.packed_rows import PackedRows
from megarl.engine.platform import to_device
from megarl.models.architecture import DeltaNet

_LARGEST_CHUNK = 64
_SMALLEST_CHUNK = 16
_EPS = 1e-6  # of the norm of queries and keys


class RowChunks(NamedTuple):
    """The chunks of rows. A row's last chunk is padded by repeating its last token, which changes no output.

    Chunks are ordered by their number in the row, then by the length of the row, longest first.

    Attributes:
        offsets: (R,) the position of each token in its row.
        places: (N, C) the token in each place of the chunks.
        inverse: (R,) the place of each token among N * C.
        num_rows: For each number of a chunk, how many rows have one with that number.
    """

    offsets: Tensor
    places: Tensor
    inverse: Tensor
    num_rows: tuple[int, ...]


def row_chunks(lengths: Sequence[int], device: torch.device) -> RowChunks:
    """Split consecutive rows into chunks. They are planned on the host."""
    size = min(_LARGEST_CHUNK, -(-max(lengths) // _SMALLEST_CHUNK) * _SMALLEST_CHUNK)
    by_length = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    num_chunks = [-(-lengths[row] // size) for row in by_length]
    num_rows = tuple(sum(count > number for count in num_chunks) for number in range(max(num_chunks)))

    # The places of all chunks with one number follow one another.
    starts = torch.tensor([0, *accumulate(lengths)])[:-1]
    sizes = torch.tensor(lengths)
    order = torch.tensor(by_length)
    places = []
    for number, count in enumerate(num_rows):
        rows = order[:count, None]
        places.append(starts[rows] + torch.minimum(number * size + torch.arange(size), sizes[rows] - 1))

    # The first chunk with each number, and the rank of each row among the longest.
    first = torch.tensor([0, *accumulate(num_rows)])
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    offsets = torch.arange(int(sizes.sum())) - torch.repeat_interleave(starts, sizes)
    chunk = first[offsets // size] + torch.repeat_interleave(rank, sizes)
    return RowChunks(
        to_device(offsets, device),
        to_device(torch.cat(places), device),
        to_device(chunk * size + offsets % size, device),
        num_rows,
    )


def causal_convolution(tokens: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve each channel over a token and those before it in its row, and apply SiLU.

    Args:
        tokens: (R, channels).
        weight: (channels, 1, W). The last number belongs to the token itself.
        offsets: (R,) the position of each token in its row.
        bias: (channels,)
    """
    taps = weight[:, 0].float().unbind(-1)
    mixed = tokens.float() * taps[-1]
    if bias is not None:
        mixed = mixed + bias.float()

    # Tokens of the row before are not part of the sum.
    for back in range(1, len(taps)):
        earlier = F.pad(tokens, (0, 0, back, 0))[: len(tokens)].float()
        mixed = mixed + earlier * taps[-1 - back] * (offsets >= back)[:, None]

    return F.silu(mixed.to(tokens.dtype))


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, chunks: RowChunks
) -> Tensor:
    """Return what each token reads, (R, h, value size), in the dtype of `value`. Computed in float32.

    Args:
        query: (R, h, key size). Queries and keys are normalized.
        key: (R, h, key size).
        value: (R, h, value size).
        decay: (R, h) the logarithm of the decay.
        strength: (R, h).
    """
    places = chunks.places.flatten()
    shape = chunks.places.shape

    def chunked(tokens: Tensor) -> Tensor:
        """Map (R, h, ...) to (N, h, C, ...)."""
        return tokens.float().index_select(0, places).unflatten(0, shape).transpose(1, 2)

    keys = chunked(key)
    queries = chunked(query) * query.shape[-1] ** -0.5
    values, strengths = chunked(value), chunked(strength)[..., None]
    total = chunked(decay).cumsum(-1)  # (N, h, C) since the beginning of the chunk

    # How much each token's change has decayed when a later token reads it, (N, h, C, C).
    later = torch.ones(shape[1], shape[1], dtype=torch.bool, device=total.device).triu(1)
    pairs = (total[..., None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()

    # Solve for the changes: those that do not depend on the state before the chunk, and those that do.
    system = (strengths * keys) @ keys.transpose(-1, -2) * pairs
    right = torch.cat((strengths * values, strengths * keys * total.exp()[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_values, read_keys = solved.split([values.shape[-1], keys.shape[-1]], -1)

    within = queries @ keys.transpose(-1, -2) * pairs
    queries = queries * total.exp()[..., None]
    keys = keys * (total[..., -1:] - total).exp()[..., None]
    decays = total[..., -1].exp()
    mixed = carry_states(queries, keys, new_values, within, decays, chunks.num_rows, read_keys)

    return mixed.transpose(1, 2).flatten(0, 1).index_select(0, chunks.inverse).to(value.dtype)


def carry_states(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    within: Tensor,
    decay: Tensor,
    num_rows: tuple[int, ...],
    read_keys: Tensor | None = None,
) -> Tensor:
    """Carry the states from chunk to chunk, and return what is read, (N, h, C, value size).

    Args:
        queries: (N, h, C, key size), decayed since the beginning of the chunk.
        keys: (N, h, C, key size), decayed until the end of the chunk.
        values: (N, h, C, value size), what is written if the state before the chunk is empty.
        within: (N, h, C, C) how much a token reads of what another one of its chunk writes.
        decay: (N, h) of the chunk.
        num_rows: For each number of a chunk, how many rows have one with that number.
        read_keys: (N, h, C, key size), by which what is written depends on the state before the chunk.
    """
    outputs = []
    read_keys = queries[:, :, :0] if read_keys is None else read_keys
    parts = (tensor.split(num_rows) for tensor in (queries, keys, values, within, decay, read_keys))
    state = None

    for query, key, value, inside, decayed, read_key in zip(*parts, strict=True):
        changes = value
        if state is not None:
            # Rows without a chunk of this number are the last ones.
            state = state[: len(query)]
            if read_key.numel():
                changes = value - read_key @ state
            outputs.append(query @ state + inside @ changes)
            state = state * decayed[..., None, None] + key.transpose(-1, -2) @ changes
        else:
            outputs.append(inside @ changes)
            state = key.transpose(-1, -2) @ changes

    return torch.cat(outputs)


def normalized(heads: Tensor) -> Tensor:
    """Scale each query or key (R, heads, size) to length one, in float32."""
    heads = heads.float()
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPS)


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
    return Recomputed.apply(_mix_by_torch, (rows, sizes, eps), *arguments)


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

    return Recomputed.apply(_gated_norm, (eps,), mixed[0], gate, norm)


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


class Recomputed(torch.autograd.Function):
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
