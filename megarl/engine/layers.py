"""The two layers Megatron has no CPU version of: RMSNorm and the attention core, for padded and for packed batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

# Sequences up to this length attend in padded groups of similar length: the cost of a call outweighs the padding.
MAX_PADDED_LENGTH = 128


class RMSNorm(torch.nn.Module):
    """Root mean square norm with Hugging Face's rounding: normalised in float32, cast, then scaled (Zhang & Sennrich 2019)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees a part of the tokens: Megatron sums the gradients of marked parameters.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return self.weight * F.rms_norm(hidden.float(), self.weight.shape, None, self.eps).to(hidden.dtype)


class AttentionCore(torch.nn.Module):
    """Causal attention on `scaled_dot_product_attention`, in the place of Megatron's `core_attention`.

    Padded: query (S, b, heads, D), key and value (S, b, groups, D) -> (S, b, heads * D); sequences start at position 0
    and are padded on the right, so the causal mask is enough. Packed: (T, heads, D) -> (T, heads * D), with the
    boundaries in `packed_seq_params`.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__()
        assert config.context_parallel_size == 1
        assert config.attention_dropout == 0.0
        self.softmax_scale = softmax_scale

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(b, heads, S, D), (b, groups, S, D) x 2 -> (b, heads, S, D)."""
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert attention_bias is None
        assert attention_mask is None
        if packed_seq_params is not None:
            return self._forward_packed(query, key, value, attention_groups(packed_seq_params))
        sequence, batch = query.shape[:2]
        mixed = self._attend(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)))
        return mixed.permute(2, 0, 1, 3).reshape(sequence, batch, -1)

    def _forward_packed(self, query: Tensor, key: Tensor, value: Tensor, groups: list[Tensor]) -> Tensor:
        tokens, heads, dim = query.shape
        if len(groups) == 1 and groups[0].numel() == tokens:  # all sequences have one length: nothing to move
            count, length = groups[0].shape
            parts = (tensor.view(count, length, -1, dim).transpose(1, 2) for tensor in (query, key, value))
            return self._attend(*parts).transpose(1, 2).reshape(tokens, heads * dim)
        # Row `tokens` is an extra row of zeros that stands for padding.
        padded = [F.pad(tensor.flatten(1), (0, 0, 0, 1)) for tensor in (query, key, value)]
        mixed, sources = [], []
        for group in groups:
            parts = (tensor.index_select(0, group.flatten()).view(*group.shape, -1, dim).transpose(1, 2) for tensor in padded)
            mixed.append(self._attend(*parts).transpose(1, 2).reshape(group.numel(), heads * dim))
            sources.append(group.flatten())
        source = torch.cat(sources)
        place = torch.empty(tokens + 1, dtype=torch.long, device=query.device)
        place[source] = torch.arange(source.numel(), device=query.device)
        return torch.cat(mixed).index_select(0, place[:tokens])


def attention_groups(packed: PackedSeqParams) -> list[Tensor]:
    """Token indices of the sequences of a packed batch, in groups (sequences, length) of similar length.

    A sequence up to MAX_PADDED_LENGTH goes with those of the same power of two, padded with the index T; a longer
    one stands alone. Computed once per micro-batch and kept on `packed`, because every layer asks.
    """
    kept = getattr(packed, "megarl_attention_groups", None)
    if kept is not None:
        return kept
    starts = packed.cu_seqlens_q.tolist()
    total, device = starts[-1], packed.cu_seqlens_q.device
    buckets: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        length = end - start
        assert length > 0, "a packed batch holds no empty sequence"
        key = (length.bit_length(), 0) if length <= MAX_PADDED_LENGTH else (length, number + 1)
        buckets.setdefault(key, []).append((start, length))
    groups = []
    for members in buckets.values():
        start, length = torch.tensor(members, device=device).T
        offset = torch.arange(int(length.max()), device=device)
        groups.append(torch.where(offset < length[:, None], start[:, None] + offset, total))
    packed.megarl_attention_groups = groups  # type: ignore[attr-defined]
    return groups
