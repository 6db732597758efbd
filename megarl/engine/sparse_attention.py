"""Sparse attention (DSA): an indexer selects the keys that each query attends to.

    hidden states, latent vectors of queries (detached)
        -> LightningIndexer: index queries, index keys, weights of heads
        -> select_keys: for each query, the places of its keys
        -> _SparseAttention: attention over these keys

In a micro-batch whose rows have at most `topk` tokens every key is selected, and the core is the one of dense
attention. Longer rows are attended piece by piece, and within a piece a block of queries at a time: the
selection is a mask of the piece's keys, so attention costs as much as dense attention. A piece never sees
keys of another row. Megatron's core has no shared prompts, and its function without kernels loops over single
keys; its fused kernels (TileLang, cuDNN) need queries and keys that have absorbed the up projection.

The loss of the indexers is the Kullback-Leibler divergence between the attention of all heads and the softmax
of the index scores, over the selected keys (DeepSeek-AI 2025, DeepSeek-V3.2, equation 4).

Shapes: T tokens of the rank, L queries of a block, K keys of a piece, n index heads of j numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megarl.engine import latent_attention
from megarl.engine.context import QueryPiece, whole_order
from megarl.engine.latent_attention import LatentSelfAttention, ReplicatedLinear
from megarl.engine.layers import whole_keys
from megarl.engine.moe_router import RoutedTokens, RouterStatistics
from megarl.engine.packed_rows import PackedRows
from megarl.engine.platform import to_device
from megarl.models.architecture import Architecture
from megarl.models.sparse_attention import BLOCK_QUERIES, MOST_SCORES, has_indexer, indexer_of

_NORM_EPS = 1e-6  # of the norm of index keys, in the published code and in transformers


class IndexInputs(NamedTuple):
    """The index queries, keys and weights of a rank's tokens.

    Attributes:
        queries: (T, n, j).
        keys: (T, j); after a gathering, those of all context-parallel ranks.
        weights: (T, n) float32, of the heads, with the scale of the scores.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor


class LightningIndexer(torch.nn.Module):
    """The indexer of a layer. The names of its parameters are those of Megatron's `DSAIndexer`.

    Every rank has the whole indexer and computes it for all tokens of its micro-batch, so that the selection
    and the gradients are the same on all tensor-parallel ranks.
    """

    rotary_pos_emb: Any  # that of the attention, see `set_rotation`

    def __init__(self, config: Any, architecture: Architecture, groups: Any) -> None:
        super().__init__()
        indexer = indexer_of(architecture)
        self.config = config
        self.groups = groups
        self.indexer = indexer
        self.rotated: int = config.qk_pos_emb_head_dim
        self.linear_wq_b = ReplicatedLinear(config.q_lora_rank, indexer.num_heads * indexer.head_dim, config)
        self.linear_wk = ReplicatedLinear(config.hidden_size, indexer.head_dim, config)
        self.k_norm = torch.nn.LayerNorm(indexer.head_dim, eps=_NORM_EPS, dtype=config.params_dtype)
        self.linear_weights_proj = ReplicatedLinear(config.hidden_size, indexer.num_heads, config)
        # All tokens are gathered first, so ranks have equal gradients, which must not be summed.
        for parameter in self.parameters():
            parameter.sequence_parallel = False  # pyrefly: ignore[missing-attribute]

    def forward(self, hidden: Tensor, latent: Tensor, packed: PackedRows | None) -> IndexInputs:
        """Compute index queries, keys and weights of the tokens (T) of packed rows, or (S, b) of padded ones.

        Args:
            hidden: (S, b, H), or a tensor-parallel rank's part of S.
            latent: The latent vectors of queries, (S, b, A) or (S, A).
        """
        if self.config.sequence_parallel and self.groups.tp.size() > 1:
            hidden, latent = (
                gather_from_sequence_parallel_region(
                    each, tensor_parallel_output_grad=False, group=self.groups.tp
                )
                for each in (hidden, latent)
            )
        if packed is not None:
            hidden = hidden.squeeze(1)

        queries, _ = self.linear_wq_b(latent)
        keys, _ = self.linear_wk(hidden)
        queries = queries.unflatten(-1, (self.indexer.num_heads, self.indexer.head_dim))
        keys = self.k_norm(keys).unsqueeze(-2)
        scale = self.indexer.num_heads**-0.5 * self.indexer.head_dim**-0.5
        # Weights of 16 bits would change which of two similar keys is selected.
        weights = F.linear(hidden.float(), self.linear_weights_proj.weight.float()) * scale

        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden, self.config, packed)
        angles, factor = self.rotary_pos_emb(length, packed_seq=packed is not None)
        if packed is None:
            angles = angles[: len(hidden)]
        queries, keys = (self._rotate(each, angles, factor, packed) for each in (queries, keys))
        return IndexInputs(queries, keys.squeeze(-2), weights)

    def _rotate(self, heads: Tensor, angles: Tensor, factor: float, packed: PackedRows | None) -> Tensor:
        rotated, rest = heads.split((self.rotated, heads.shape[-1] - self.rotated), dim=-1)
        rotated = apply_rotary_pos_emb(
            rotated,
            angles,
            config=self.config,
            cu_seqlens=None if packed is None else packed.cu_seqlens_q,
            mscale=factor,
            cp_group=self.groups.cp,
            mla_rotary_interleaved=self.indexer.pairs_neighbors,
        )
        return torch.cat((rotated, rest), dim=-1)


class KeyedPiece(NamedTuple):
    """Consecutive queries of a rank with the keys that they see.

    The last query sees all keys, each earlier one a key less than the next.

    Attributes:
        start: The first query among those of the rank.
        length: The number of queries.
        keys: The places of the keys among those of all ranks: slices, or indices on the device.
        num_keys: How many these are.
    """

    start: int
    length: int
    keys: tuple[slice, ...] | Tensor
    num_keys: int

    @property
    def queries(self) -> slice:
        return slice(self.start, self.start + self.length)

    def of(self, rows: Tensor) -> Tensor:
        """Return the rows (K, ...) of the piece's keys."""
        if isinstance(self.keys, Tensor):
            return rows.index_select(0, self.keys)
        parts = [rows[each] for each in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def add_to(self, total: Tensor, gradient: Tensor) -> None:
        """Add the gradient (K, ...) of the piece's keys to that of all keys."""
        if isinstance(self.keys, Tensor):
            total.index_add_(0, self.keys, gradient)
            return
        begin = 0
        for each in self.keys:
            size = each.stop - each.start
            total[each] += gradient[begin : begin + size]
            begin += size

    def blocks(self, size: int) -> Iterator[tuple[slice, slice, int]]:
        """Yield blocks of queries: within the rank, within the piece, and the keys that the last one sees."""
        for first in range(0, self.length, size):
            last = min(first + size, self.length)
            yield (
                slice(self.start + first, self.start + last),
                slice(first, last),
                self.num_keys - self.length + last,
            )


class SparseRows(NamedTuple):
    """The state that the layers of a micro-batch with packed rows share.

    Attributes:
        pieces: The pieces of the rank.
        selections: The selection (T, topk) of each layer, by its number, that others share.
    """

    pieces: list[KeyedPiece]
    selections: dict[int, Tensor]


def sparse_rows_of(packed: PackedRows) -> SparseRows:
    """Return what layers have in common, which the first one makes."""
    if packed.sparse_rows is None:
        # With context parallelism, keys are gathered in rank order.
        order = whole_order(packed.lengths, packed.place.size) if packed.place.size > 1 else None
        pieces = [_piece(each, order, packed.cu_seqlens_q.device) for each in packed.pieces]
        packed.sparse_rows = SparseRows(pieces, {})
    return packed.sparse_rows


def _piece(piece: QueryPiece, order: Tensor | None, device: torch.device) -> KeyedPiece:
    seen = [each for each in (piece.prompt, piece.own) if each]
    keys: Any = tuple(slice(each.start, each.stop) for each in seen)
    if order is not None:
        keys = to_device(torch.cat([order[each] for each in keys]), device)
    return KeyedPiece(piece.start, piece.length, keys, sum(map(len, seen)))


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return the scores (L, K) float32 of keys: the weighted sum over heads of relu(query key).

    Args:
        queries: (L, n, j).
        weights: (L, n), with the scale of the scores.
        keys: (K, j).
    """
    products = torch.matmul(queries.float(), keys.float().T)
    return torch.matmul(weights[:, None], products.relu_()).squeeze(1)


def hidden_keys(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return which keys (L, K) come after a query, the last of which is at the last key."""
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask.triu(num_keys - num_queries + 1)


@torch.no_grad()
def select_keys(inputs: IndexInputs, pieces: Sequence[KeyedPiece], topk: int) -> Tensor:
    """Return the places (T, topk) int32 of the selected keys of each query among the keys of its piece.

    A query that sees fewer keys selects all of them, and its further places are -1.
    """
    selected = torch.full((len(inputs.queries), topk), -1, dtype=torch.int32, device=inputs.keys.device)
    for piece in pieces:
        keys = piece.of(inputs.keys)
        size = max(1, MOST_SCORES // (inputs.queries.shape[1] * piece.num_keys))
        for block, _, num_keys in piece.blocks(size):
            scores = index_scores(inputs.queries[block], inputs.weights[block], keys[:num_keys])
            scores.masked_fill_(hidden_keys(len(scores), num_keys, scores.device), float("-inf"))
            best, places = scores.topk(min(topk, num_keys), dim=-1)
            places = places.int().masked_fill_(best == float("-inf"), -1)
            selected[block, : places.shape[1]] = places
    return selected


def selected_mask(selected: Tensor, num_keys: int) -> Tensor:
    """Return whether each key (L, K) is among the selected places (L, topk)."""
    # Places of -1 mark a column after the last key.
    places = selected.long().where(selected >= 0, num_keys)
    mask = torch.zeros(len(selected), num_keys + 1, dtype=torch.bool, device=selected.device)
    return mask.scatter_(1, places, True)[:, :num_keys]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attend with queries (L, heads, D) to the keys (K, heads, D) of a mask (L, K)."""
    heads = (each.transpose(0, 1)[None] for each in (query, key, value))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale)[0].transpose(0, 1)


class _SparseAttention(torch.autograd.Function):
    """Attention over selected keys, which is computed again in the backward pass.

    So it saves its inputs and the selection, not a mask of every pair.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        selected: Tensor,
        pieces: Sequence[KeyedPiece],
        scale: float | None,
    ) -> Tensor:
        mixed = value.new_empty(*query.shape[:2], value.shape[-1])
        for piece in pieces:
            keys = piece.of(key)
            values = piece.of(value)
            for block, _, seen in piece.blocks(BLOCK_QUERIES):
                mask = selected_mask(selected[block], seen)
                mixed[block] = _attend(query[block], keys[:seen], values[:seen], mask, scale)

        ctx.save_for_backward(query, key, value, selected)
        ctx.pieces = pieces
        ctx.scale = scale
        return mixed

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, selected = ctx.saved_tensors
        totals = tuple(map(torch.zeros_like, (query, key, value)))
        for piece in ctx.pieces:
            of_keys = piece.of(key).detach()
            of_values = piece.of(value).detach()
            sums = torch.zeros_like(of_keys), torch.zeros_like(of_values)
            for block, _, seen in piece.blocks(BLOCK_QUERIES):
                inputs = (query[block], of_keys[:seen], of_values[:seen])
                q, k, v = (each.detach().requires_grad_() for each in inputs)
                with torch.enable_grad():
                    mixed = _attend(q, k, v, selected_mask(selected[block], seen), ctx.scale)
                found = torch.autograd.grad(mixed, (q, k, v), gradient[block])
                totals[0][block] = found[0]
                sums[0][:seen] += found[1]
                sums[1][:seen] += found[2]
            for total, share in zip(totals[1:], sums, strict=True):
                piece.add_to(total, share)
        return *totals, None, None, None


def attend_selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    pieces: Sequence[KeyedPiece],
    scale: float | None,
) -> Tensor:
    """Attend to selected keys.

    Args:
        query: (T, heads, D).
        key: (T, heads, D); with context parallelism those of all ranks.
        value: As `key`. Values may have another size.
        selected: (T, topk), see `select_keys`.

    Returns:
        (T, heads, size of a value).
    """
    return _SparseAttention.apply(query, key, value, selected, pieces, scale)


class _IndexerLoss(torch.autograd.Function):
    """The sum over queries of the divergence of the softmax of index scores from attention.

    The attention of a query over its selected keys is summed over all heads and divided by their number. The
    gradients of index queries, weights and keys are computed in the forward pass, a block of queries at a
    time, and saved; nothing else has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        index_queries: Tensor,
        index_keys: Tensor,
        head_weights: Tensor,
        query: Tensor,
        key: Tensor,
        selected: Tensor,
        pieces: Sequence[KeyedPiece],
        scale: float,
        weights: Tensor,
        tensor_group: dist.ProcessGroup,
    ) -> Tensor:
        inputs = index_queries, head_weights, index_keys
        totals = tuple(torch.zeros_like(each, dtype=torch.float32) for each in inputs)
        loss = weights.new_zeros(())
        heads = max(index_queries.shape[1], query.shape[1])

        for piece in pieces:
            keys = piece.of(key).float()
            of_indexer = piece.of(index_keys)
            sums = torch.zeros_like(of_indexer, dtype=torch.float32)
            for block, _, seen in piece.blocks(max(1, MOST_SCORES // (heads * piece.num_keys))):
                mask = selected_mask(selected[block], seen)
                products = torch.einsum("lhd,khd->hlk", query[block].float(), keys[:seen])
                target = products.mul_(scale).masked_fill_(~mask, float("-inf")).softmax(-1).sum(0)
                # Tensor-parallel ranks have different heads.
                if tensor_group.size() > 1:
                    dist.all_reduce(target, group=tensor_group)
                target /= target.sum(-1, keepdim=True)

                leaves = [
                    each.detach().requires_grad_()
                    for each in (index_queries[block], head_weights[block], of_indexer[:seen])
                ]
                with torch.enable_grad():
                    scores = index_scores(*leaves).masked_fill(~mask, float("-inf"))
                    predicted = scores.log_softmax(-1).masked_fill(~mask, 0.0)
                    divergence = (torch.xlogy(target, target) - target * predicted).sum(-1)
                    of_block = divergence @ weights[block]
                found = torch.autograd.grad(of_block, leaves)
                loss += of_block.detach()
                totals[0][block] = found[0]
                totals[1][block] = found[1]
                sums[:seen] += found[2]
            piece.add_to(totals[2], sums)

        ctx.save_for_backward(*(total.to(each.dtype) for total, each in zip(totals, inputs, strict=True)))
        return loss

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_queries, of_weights, of_keys = (gradient * each for each in ctx.saved_tensors)
        return of_queries, of_keys, of_weights, *(None,) * 7


class SelectingCore(torch.nn.Module):
    """Extends a core of dense attention, the next class in its order, to queries that see selected keys."""

    requires_dsa_inputs = True  # Megatron then passes hidden states and latent vectors
    tokens: RoutedTokens | None = None  # those of the current forward pass

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *arguments: Any,
        architecture: Architecture,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            config,
            *arguments,
            layer_number=layer_number,
            softmax_scale=softmax_scale,
            pg_collection=pg_collection,
            **options,
        )
        indexer = indexer_of(architecture)
        self.topk = indexer.topk
        # The layer whose selection counts, and whether others share it.
        self.source = max(layer for layer in indexer.layers if layer < layer_number)
        self.is_shared = self.source + 1 < architecture.num_hidden_layers and not has_indexer(
            architecture, self.source + 1
        )
        self.scale_of_scores = softmax_scale
        self.ranks_of_rows: dist.ProcessGroup | None = (
            pg_collection.cp if config.context_parallel_size > 1 else None
        )
        self.tensor_group: dist.ProcessGroup = pg_collection.tp
        self.indexer: LightningIndexer | None = None
        if has_indexer(architecture, layer_number - 1):
            self.indexer = LightningIndexer(config, architecture, pg_collection)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *arguments: Any,
        x: Tensor,
        qr: Tensor,
        packed_seq_params: PackedRows | None = None,
        tokens: RoutedTokens | None = None,
        **options: Any,
    ) -> Tensor:
        packed = packed_seq_params
        if tokens is not None:
            self.tokens = tokens
        longest = len(query) if packed is None else packed.max_seqlen_kv
        tally = self._tally()
        is_dense = longest <= self.topk
        mixed = query.new_empty(0)
        if is_dense:
            mixed = super().forward(query, key, value, *arguments, packed_seq_params=packed, **options)
            if tally is None:
                return mixed

        # From here on, rows are one after another.
        length, width = len(query), value.shape[-1]
        pieces = _padded_pieces(query) if packed is None else sparse_rows_of(packed).pieces
        if packed is None:
            value = F.pad(value, (0, query.shape[-1] - width))
            query, key, value = (_rows_first(each) for each in (query, key, value))
        elif self.ranks_of_rows is not None:
            key, value = whole_keys(key, value, self.ranks_of_rows)

        inputs = self._index_inputs(x, qr, packed, trains=tally is not None)
        selected = self._selection(inputs, packed, pieces)
        if not is_dense:
            mixed = attend_selected(query, key, value, selected, pieces, self.scale_of_scores).flatten(1)
            if packed is None:
                by_row = mixed.view(len(query) // length, length, -1, query.shape[-1])
                mixed = by_row[..., :width].flatten(2).transpose(0, 1).contiguous()

        if tally is None or inputs is None:
            return mixed
        return self._with_loss(mixed, inputs, query, key, selected, pieces, tally)

    def _tally(self) -> RouterStatistics | None:
        """Return where the loss of the indexer is counted, if this pass computes one.

        With recomputation, a layer runs twice: the pass without gradients adds nothing.
        """
        tally = None if self.tokens is None else self.tokens.tally
        computes = tally is not None and tally.losses is not None and tally.indexer_loss
        return tally if computes and self.indexer is not None and torch.is_grad_enabled() else None

    def _index_inputs(
        self, x: Tensor, qr: Tensor, packed: PackedRows | None, *, trains: bool
    ) -> IndexInputs | None:
        """Return what the indexer computes, None without one. Only its own weights have gradients."""
        if self.indexer is None:
            return None
        with torch.set_grad_enabled(trains):
            inputs = self.indexer(x.detach(), qr.detach(), packed)
            if packed is None:
                return IndexInputs(*map(_rows_first, inputs))
            if self.ranks_of_rows is None:
                return inputs
            keys = gather_from_sequence_parallel_region(
                inputs.keys, tensor_parallel_output_grad=True, group=self.ranks_of_rows
            )
            return inputs._replace(keys=keys)

    def _selection(
        self, inputs: IndexInputs | None, packed: PackedRows | None, pieces: Sequence[KeyedPiece]
    ) -> Tensor:
        """Return the selection of this layer: its indexer's, or that of an earlier layer."""
        if inputs is None:
            assert packed is not None, "layers that share a selection need packed rows"
            return sparse_rows_of(packed).selections[self.source]
        selected = select_keys(inputs, pieces, self.topk)
        # A layer that is computed again in the backward pass needs the selection once more.
        if self.is_shared and packed is not None:
            sparse_rows_of(packed).selections[self.source] = selected
        return selected

    def _with_loss(
        self,
        mixed: Tensor,
        inputs: IndexInputs,
        query: Tensor,
        key: Tensor,
        selected: Tensor,
        pieces: Sequence[KeyedPiece],
        tally: RouterStatistics,
    ) -> Tensor:
        """Return the output, whose backward pass also has the gradient of the indexer's loss."""
        assert self.tokens is not None
        counts = self.tokens.all_counts
        if mixed.ndim == 3:
            counts = _rows_first(counts.view(mixed.shape[:2]))
        loss = _IndexerLoss.apply(
            *inputs,
            query.detach(),
            key.detach(),
            selected,
            pieces,
            self.scale_of_scores,
            tally.weights(counts),
            self.tensor_group,
        )
        # Every tensor-parallel rank has all tokens.
        tally.divergences[self.source] += loss.detach() / self.tensor_group.size()
        return MoEAuxLossAutoScaler.apply(mixed, tally.indexer_loss * loss)


def with_selection(attention: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Extend a core of dense attention to rows of which queries see a selection of the keys."""
    return type("SparseCore", (SelectingCore, attention), {})


class SparseSelfAttention(LatentSelfAttention):
    """Latent attention whose core, if only that is computed again, has the tokens of its micro-batch.

    Pipeline stages run the forward passes of further micro-batches before a backward pass.
    """

    def _checkpointed_attention_forward(
        self, *inputs: Any, core_attention_extra_kwargs: dict[str, Any], **options: Any
    ) -> Tensor:
        core: Any = self.core_attention
        extra = core_attention_extra_kwargs | {"tokens": core.tokens}
        return super()._checkpointed_attention_forward(*inputs, core_attention_extra_kwargs=extra, **options)


def set_modules(layer: ModuleSpec, architecture: Architecture, provider: Any) -> None:
    """Give a layer latent attention with a core that selects keys. For arguments see latent_attention."""
    latent_attention.set_modules(layer, architecture, provider)
    modules: Any = layer.submodules
    modules.self_attention.module = SparseSelfAttention
    attention = modules.self_attention.submodules
    attention.core_attention = ModuleSpec(
        module=with_selection(attention.core_attention), params={"architecture": architecture}
    )

    # Indexers need the normalized latent vector of queries, which Transformer Engine would not return.
    if provider is not None:
        attention.q_layernorm = provider.layer_norm(rms_norm=True, for_qk=True)
        attention.linear_q_up_proj = provider.column_parallel_linear()
        modules.sharded_state_dict_keys_map = {
            **modules.sharded_state_dict_keys_map,
            "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        }


def set_rotation(model: torch.nn.Module, architecture: Architecture, frequencies: Tensor) -> None:
    """Give attention and indexers one rotary embedding. For arguments see latent_attention."""
    latent_attention.set_rotation(model, architecture, frequencies)
    for attention in model.modules():
        if isinstance(attention, LatentSelfAttention):
            core: Any = attention.core_attention
            if core.indexer is not None:
                core.indexer.rotary_pos_emb = attention.rotary_pos_emb


def _padded_pieces(query: Tensor) -> list[KeyedPiece]:
    """Return the rows of padded queries (S, b, heads, D), one after another."""
    length, batch = query.shape[:2]
    starts = range(0, batch * length, length)
    return [KeyedPiece(start, length, (slice(start, start + length),), length) for start in starts]


def _rows_first(tokens: Tensor) -> Tensor:
    """Rearrange (S, b, ...) to (b * S, ...)."""
    return tokens.transpose(0, 1).flatten(0, 1)
