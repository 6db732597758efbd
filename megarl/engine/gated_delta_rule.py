"""The gated delta rule in chunks of tokens (Yang et al. 2025, arXiv 2412.06464), for rows of any lengths.

A head has a state S, a matrix of a key's size times a value's. A token with query q, key k, value v, strength
b and log decay g <= 0 changes it and reads it:

    S <- exp(g) S,    S <- S + k (b (v - k^T S))^T,    o = q^T S.

Within a chunk, the changes of all tokens are the solution of a triangular system. So only the states between
chunks are computed one after another, for all rows at once.

Shapes: R tokens of all rows, N chunks, C tokens of a chunk, h heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.engine.platform import to_device

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
        offset = number * size + torch.arange(size)
        places.append(starts[rows] + torch.minimum(offset, sizes[rows] - 1))

    # The first chunk with each number, and the rank of each row among the longest.
    first = torch.tensor([0, *accumulate(num_rows)])
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    offsets = torch.arange(int(sizes.sum())) - torch.repeat_interleave(starts, sizes)
    chunk = first[offsets // size] + torch.repeat_interleave(rank, sizes)
    inverse = chunk * size + offsets % size

    return RowChunks(
        to_device(offsets, device),
        to_device(torch.cat(places), device),
        to_device(inverse, device),
        num_rows,
    )


def causal_convolution(tokens: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Convolve each channel over a token and those before it in its row, and apply SiLU.

    Args:
        tokens: (R, channels).
        weight: (channels, 1, W). The last number belongs to the token itself.
        offsets: (R,) the position of each token in its row.
    """
    taps = weight[:, 0].float().unbind(-1)
    mixed = tokens.float() * taps[-1]

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
    mixed = _states(queries, keys, new_values, read_keys, within, total[..., -1].exp(), chunks.num_rows)

    return mixed.transpose(1, 2).flatten(0, 1).index_select(0, chunks.inverse).to(value.dtype)


def _states(
    queries: Tensor,
    keys: Tensor,
    new_values: Tensor,
    read_keys: Tensor,
    within: Tensor,
    decay: Tensor,
    num_rows: tuple[int, ...],
) -> Tensor:
    """Carry the states from chunk to chunk, and return what is read, (N, h, C, value size)."""
    outputs = []
    parts = (tensor.split(num_rows) for tensor in (queries, keys, new_values, read_keys, within, decay))
    state = None

    for query, key, new_value, read_key, inside, decayed in zip(*parts, strict=True):
        changes = new_value
        if state is not None:
            # Rows without a chunk of this number are the last ones.
            state = state[: len(query)]
            changes = new_value - read_key @ state
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
