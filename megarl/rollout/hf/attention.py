"""What a decoding step on transformers' models costs beside its products: keys and values stay where they are, and are read once a step.

transformers' own cache is copied whole for every token, and its attention repeats keys and values for each head of a group where there
is a mask. Here a token's keys and values are written into memory that is there already, and the heads of a group are queries of one
attention call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "megarl_grouped"  # the name of `grouped_attention` in transformers
_ROOM = 64  # tokens of the first enlargement; each further one doubles


class KVCache(Cache):
    """Of every layer that asks for it; rows of equal length, which is that of the longest with its padding."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_KVLayer)

    def select(self, rows: Tensor) -> None:
        """rows: (A,) of the B, repeats allowed; they become the rows of the cache, in that order."""
        for layer in self.layers:
            assert isinstance(layer, _KVLayer)
            layer.select(rows)


class _KVLayer(CacheLayerMixin):
    """`keys`, `values`: (B, H, capacity, D), of which the first `length` tokens are written."""

    is_sliding = False

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self._length, self._room = 0, _ROOM

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, _ = key_states.shape
        self.keys = key_states.new_empty(batch, heads, 0, key_states.shape[-1])
        self.values = value_states.new_empty(batch, heads, 0, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes (B, H, N, D) behind what is there; (B, H, L, D) of all tokens, without a copy."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        begin, end = self._length, self._length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self.keys, self.values = (self._enlarged(states, end + self._room) for states in (self.keys, self.values))
            self._room *= 2
        self.keys[:, :, begin:end], self.values[:, :, begin:end] = key_states, value_states
        self._length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _enlarged(self, states: Tensor, capacity: int) -> Tensor:
        batch, heads, _, size = states.shape
        larger = states.new_empty(batch, heads, capacity, size)
        larger[:, :, : self._length] = states[:, :, : self._length]
        return larger

    def select(self, rows: Tensor) -> None:
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = (self._selected(states, rows) for states in (self.keys, self.values))

    def _selected(self, states: Tensor, rows: Tensor) -> Tensor:
        chosen = states.new_empty(len(rows), *states.shape[1:])
        torch.index_select(states[:, :, : self._length], 0, rows, out=chosen[:, :, : self._length])
        return chosen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_cache_shape(self) -> int:
        return -1


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query (B, H, N, D), key and value (B, K, L, D), mask (B, 1, N, L) -> (B, N, H, D). For one token a row
    the H / K heads of a group are as many queries, which the mask treats alike."""
    batch, heads, num_tokens, size = query.shape
    if num_tokens > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    queries = query.view(batch, key.shape[1], heads // key.shape[1], size)
    output = scaled_dot_product_attention(queries, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, -1), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
