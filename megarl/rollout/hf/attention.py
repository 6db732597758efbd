"""What a decoding step on transformers' models costs beside its products: keys and values stay where they are, and are read once a step.

transformers' own cache is copied whole for every token, and its attention repeats keys and values for each head of a group where there
is a mask. Here a token's keys and values are written into memory that is there already, the heads of a group are queries of one
product, and so are the samples of a prompt, whose keys and values are kept once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "megarl_grouped"  # the name of `grouped_attention` in transformers
SLOTS = 16  # rows that read a prompt together
_ROOM = 64  # tokens of the first enlargement; each further one doubles


class KVCache(Cache):
    """Of every layer that asks for it; rows of equal length, which is that of the longest with its padding."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_KVLayer)

    def select(self, rows: Tensor) -> None:
        """rows: (A,) of the B, repeats allowed; they become the rows of the cache, in that order."""
        for layer in self._own():
            layer.select(rows)

    def written(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of each layer, (B, K, L, D) float32."""
        return [layer.written(layer.keys) for layer in self._own()], [layer.written(layer.values) for layer in self._own()]

    def _own(self) -> list[_KVLayer]:
        return [layer for layer in self.layers if isinstance(layer, _KVLayer)]


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

    def written(self, states: Tensor | None) -> Tensor:
        assert states is not None
        return states[:, :, : self._length].float().contiguous()

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


@dataclass(frozen=True)
class SharedPrompts:
    """What was computed of prompts, each once for up to SLOTS rows that continue it: they attend to it together, as so many more queries.

    keys, values: of each layer (G, K, P, D), float32. bias: (G, 1, 1, P), 0 or, at padding, -inf. slots: (G, N), the rows of each prompt,
    any where there are fewer. places: (A,), where a row is among the G x N slots.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    bias: Tensor
    slots: Tensor
    places: Tensor

    @classmethod
    def of(cls, cache: KVCache, mask: Tensor, owners: Sequence[int]) -> SharedPrompts:
        """cache: after a prefill of the prompts. mask: (prompts, P) bool, False at padding. owners: (A,), the prompt of each row."""
        rows_of: dict[int, list[int]] = {}
        for row, owner in enumerate(owners):
            rows_of.setdefault(owner, []).append(row)
        parts = [(owner, rows[first : first + SLOTS]) for owner, rows in rows_of.items() for first in range(0, len(rows), SLOTS)]
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)[:, None, None]
        whole = cls(*cache.written(), bias, mask.new_empty(0), mask.new_empty(0))
        return whole._arranged([owner for owner, _ in parts], [rows for _, rows in parts])

    def select(self, rows: Tensor) -> SharedPrompts:
        """rows: (A',) of the A; they become the rows. Prompts that none of them continues are let go."""
        rows_of: dict[int, list[int]] = {}
        for row, prompt in enumerate((self.places[rows] // self.slots.shape[1]).tolist()):
            rows_of.setdefault(prompt, []).append(row)
        return self._arranged(list(rows_of), list(rows_of.values()))

    def _arranged(self, prompts: list[int], rows: list[list[int]]) -> SharedPrompts:
        """prompts: (G',) of the G. rows: of each of these, N' at most."""
        num_slots, device = max(map(len, rows)), self.bias.device
        slots = [[*own, *([0] * (num_slots - len(own)))] for own in rows]
        place_of = {row: prompt * num_slots + slot for prompt, own in enumerate(rows) for slot, row in enumerate(own)}
        places = torch.tensor([place_of[row] for row in range(len(place_of))], device=device)
        keys, values, bias = self.keys, self.values, self.bias
        if prompts != list(range(len(bias))):
            chosen = torch.tensor(prompts, device=device)
            keys, values = ([each.index_select(0, chosen) for each in layers] for layers in (keys, values))
            bias = bias.index_select(0, chosen)
        return SharedPrompts(keys, values, bias, torch.tensor(slots, device=device), places)

    def scores(self, queries: Tensor, layer: int) -> Tensor:
        """(A, K, N, D) -> (A, K, N, P), -inf at padding."""
        return self._by_row(self._together(queries) @ self.keys[layer].transpose(-1, -2) + self.bias, queries.shape[2])

    def mix(self, weights: Tensor, layer: int) -> Tensor:
        """(A, K, N, P) -> (A, K, N, D): sums of the prompts' values."""
        return self._by_row(self._together(weights) @ self.values[layer], weights.shape[2])

    def _together(self, rows: Tensor) -> Tensor:
        """(A, K, N, X) -> (G, K, slots x N, X)."""
        _, heads, queries, size = rows.shape
        prompts, slots = self.slots.shape
        of_slots = rows.index_select(0, self.slots.flatten()).view(prompts, slots, heads, queries, size)
        return of_slots.transpose(1, 2).reshape(prompts, heads, slots * queries, size)

    def _by_row(self, prompts: Tensor, queries: int) -> Tensor:
        """(G, K, slots x N, X) -> (A, K, N, X)."""
        number, heads, _, size = prompts.shape
        of_slots = prompts.view(number, heads, self.slots.shape[1], queries, size).transpose(1, 2)
        return of_slots.reshape(-1, heads, queries, size).index_select(0, self.places)


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    prompts: SharedPrompts | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query (A, H, 1, D), key and value (A, K, L, D) of what rows have written themselves -> (A, 1, H, D). All
    rows are of one length, so that nothing is masked beside the padding of `prompts`. The H / K heads of a group are as many queries.

    Without `prompts`, transformers' own.
    """
    if prompts is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    rows, heads, _, size = query.shape
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries = query.view(rows, key.shape[1], heads // key.shape[1], size).float() * (size**-0.5 if scaling is None else scaling)
    scores = torch.cat([prompts.scores(queries, layer), queries @ key.float().transpose(-1, -2)], dim=-1)
    of_prompt, own = scores.softmax(dim=-1).split([prompts.bias.shape[-1], key.shape[2]], dim=-1)
    output = prompts.mix(of_prompt, layer) + own @ value.float()
    return output.to(query.dtype).view(rows, 1, heads, size), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
