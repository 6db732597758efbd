"""Keys, values and attention of the decoding loop.

A step neither copies nor repeats keys and values, and reads them once.

transformers' growing cache copies all keys and values for every token, and its attention repeats them for
each query head of a group if there is a mask. Here the attention function itself appends a token's keys and
values to buffers with spare capacity. The query heads of a group become rows of one matrix product, and so do
the samples of a prompt, whose keys and values are stored once.

The cache is passed to the attention function as a keyword argument of the model's forward pass. transformers'
own cache interface is not used, because its required methods and argument names change between minor
releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "megarl_grouped"  # name of `grouped_attention` in transformers
SLOTS = 16  # rows that read a prompt together
_ROOM = 64  # tokens of the first enlargement; each further one doubles


class KVCache:
    """The keys and values of every layer for a batch of rows of equal length (padding included)."""

    def __init__(self) -> None:
        self._layers: dict[int, _LayerCache] = {}

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens to a layer.

        Args:
            layer: Index of the layer. Layers are first appended to in ascending order.
            keys: Shape (B, K, N, D).
            values: Shape (B, K, N, D).

        Returns:
            Keys and values of all L tokens so far, each (B, K, L, D), as views of the buffers.
        """
        if layer not in self._layers:
            assert layer == len(self._layers), "layers are computed in order"
            self._layers[layer] = _LayerCache(keys, values)
        return self._layers[layer].append(keys, values)

    def select(self, rows: Tensor) -> None:
        """Replace the rows of the cache with these of its B rows, (A,), in this order.

        Repeats are allowed.
        """
        for layer in self._layers.values():
            layer.select(rows)

    def written(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and the values of each layer, (B, K, L, D) float32."""
        layers = self._layers.values()
        return [layer.written(layer.keys) for layer in layers], [
            layer.written(layer.values) for layer in layers
        ]


class _LayerCache:
    """Buffers for the keys and values of one layer, (B, K, capacity, D).

    The first `_length` tokens are written.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys[:, :, :0]
        self.values = values[:, :, :0]
        self._length = 0
        self._room = _ROOM

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        begin = self._length
        end = self._length + keys.shape[2]

        # The spare capacity doubles, so that buffers are rarely copied.
        if end > self.keys.shape[2]:
            self.keys, self.values = (
                self._enlarged(buffer, end + self._room) for buffer in (self.keys, self.values)
            )
            self._room *= 2

        self.keys[:, :, begin:end] = keys
        self.values[:, :, begin:end] = values
        self._length = end

        return self.keys[:, :, :end], self.values[:, :, :end]

    def _enlarged(self, buffer: Tensor, capacity: int) -> Tensor:
        batch, heads, _, size = buffer.shape
        larger = buffer.new_empty(batch, heads, capacity, size)
        larger[:, :, : self._length] = buffer[:, :, : self._length]
        return larger

    def select(self, rows: Tensor) -> None:
        self.keys, self.values = (self._selected(buffer, rows) for buffer in (self.keys, self.values))

    def written(self, buffer: Tensor) -> Tensor:
        return buffer[:, :, : self._length].float().contiguous()

    def _selected(self, buffer: Tensor, rows: Tensor) -> Tensor:
        # Keep the capacity, but copy only what has been written.
        chosen = buffer.new_empty(len(rows), *buffer.shape[1:])
        torch.index_select(buffer[:, :, : self._length], 0, rows, out=chosen[:, :, : self._length])
        return chosen


@dataclass(frozen=True)
class SharedPrompts:
    """Keys and values of prompts, each computed once for up to SLOTS rows that continue it.

    These rows attend to it together, as additional queries.

    Attributes:
        keys: Keys of each layer, (G, K, P, D), float32.
        values: Values of each layer, (G, K, P, D), float32.
        bias: Shape (G, 1, 1, P); 0, or -inf at padding.
        slots: Rows of each prompt, (G, N); unused slots contain any row.
        places: Position of each row among the G x N slots, (A,).
        is_in_order: Whether every row is in the slot of its own number, so that no row has to be moved.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    bias: Tensor
    slots: Tensor
    places: Tensor
    is_in_order: bool

    @classmethod
    def of(cls, cache: KVCache, mask: Tensor, owners: Sequence[int]) -> SharedPrompts:
        """Build the shared prompts.

        Args:
            cache: Cache after a prefill of the prompts.
            mask: Shape (prompts, P) bool, False at padding.
            owners: The prompt of each row, (A,).
        """
        rows_of: dict[int, list[int]] = {}
        for row, owner in enumerate(owners):
            rows_of.setdefault(owner, []).append(row)
        # Split the rows of a prompt into parts of at most SLOTS, each of which reads the prompt together.
        parts = [
            (owner, rows[first : first + SLOTS])
            for owner, rows in rows_of.items()
            for first in range(0, len(rows), SLOTS)
        ]
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)[:, None, None]
        whole = cls(*cache.written(), bias, mask.new_empty(0), mask.new_empty(0), False)

        return whole._arranged([owner for owner, _ in parts], [rows for _, rows in parts])

    def select(self, rows: Tensor) -> SharedPrompts:
        """Select rows (A',) of the A rows. Prompts that no selected row continues are dropped."""
        rows_of: dict[int, list[int]] = {}
        for row, prompt in enumerate((self.places[rows] // self.slots.shape[1]).tolist()):
            rows_of.setdefault(prompt, []).append(row)
        return self._arranged(list(rows_of), list(rows_of.values()))

    def _arranged(self, prompts: list[int], rows: list[list[int]]) -> SharedPrompts:
        """Arrange rows into slots.

        Args:
            prompts: Indices (G',) of the G prompts.
            rows: Rows of each of these prompts, at most N' each.
        """
        num_slots = max(map(len, rows))
        device = self.bias.device
        # Unused slots repeat row 0, and their results are not read.
        slots = [[*own, *([0] * (num_slots - len(own)))] for own in rows]
        place_of = {
            row: prompt * num_slots + slot for prompt, own in enumerate(rows) for slot, row in enumerate(own)
        }
        place_of_rows = [place_of[row] for row in range(len(place_of))]
        keys = self.keys
        values = self.values
        bias = self.bias

        # Copy keys and values only if prompts were dropped or reordered.
        if prompts != list(range(len(bias))):
            chosen = torch.tensor(prompts, device=device)
            keys, values = ([each.index_select(0, chosen) for each in layers] for layers in (keys, values))
            bias = bias.index_select(0, chosen)

        return SharedPrompts(
            keys,
            values,
            bias,
            torch.tensor(slots, device=device),
            torch.tensor(place_of_rows, device=device),
            is_in_order=place_of_rows == list(range(len(prompts) * num_slots)),
        )

    def scores(self, queries: Tensor, layer: int) -> Tensor:
        """Return the attention scores: (A, K, N, D) -> (A, K, N, P), -inf at padding."""
        return self._by_row(
            (self._together(queries) @ self.keys[layer].transpose(-1, -2)).add_(self.bias), queries.shape[2]
        )

    def mix(self, weights: Tensor, layer: int) -> Tensor:
        """Return weighted sums of the prompts' values: (A, K, N, P) -> (A, K, N, D)."""
        return self._by_row(self._together(weights) @ self.values[layer], weights.shape[2])

    def _together(self, rows: Tensor) -> Tensor:
        """Group rows by prompt: (A, K, N, X) -> (G, K, slots x N, X)."""
        _, heads, queries, size = rows.shape
        prompts, slots = self.slots.shape
        # Rows that continue the same prompt become queries of one matrix product.
        if not self.is_in_order:
            rows = rows.index_select(0, self.slots.flatten())
        of_slots = rows.reshape(prompts, slots, heads, queries, size)
        return of_slots.transpose(1, 2).reshape(prompts, heads, slots * queries, size)

    def _by_row(self, prompts: Tensor, queries: int) -> Tensor:
        """Ungroup rows: (G, K, slots x N, X) -> (A, K, N, X)."""
        number, heads, _, size = prompts.shape
        of_slots = prompts.view(number, heads, self.slots.shape[1], queries, size).transpose(1, 2)
        of_rows = of_slots.reshape(-1, heads, queries, size)
        return of_rows if self.is_in_order else of_rows.index_select(0, self.places)


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    kv_cache: KVCache | None = None,
    prompts: SharedPrompts | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend to the tokens of each row and, in decoding steps, to the prompts that rows share.

    Has transformers' attention interface.

    Args:
        query: Shape (A, H, N, D); N is 1 if `prompts` is given.
        key: Shape (A, K, N, D), of the same tokens. The H / K query heads of a group share a key head.
        value: Shape (A, K, N, D).
        attention_mask: Passed to transformers' attention if `prompts` is None. Otherwise unused: all rows
            have the same length, so that only the padding of `prompts` and what is before a window is masked.
        sliding_window: The number of newest tokens, its own included, that a token sees; None: all.
        kv_cache: Receives the keys and values. The rows attend to everything in it.
        prompts: Prompts that the rows continue. Without them, transformers' own attention is computed.

    Returns:
        The output, (A, N, H, D), and None instead of the attention weights.
    """
    assert options.get("softcap") is None, "capped scores are not supported"
    assert options.get("s_aux") is None, "attention sinks are not supported"
    layer: int = module.layer_idx  # pyrefly: ignore[bad-assignment]
    if kv_cache is not None:
        key, value = kv_cache.append(layer, key, value)
    if prompts is None:
        # The mask has the window.
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    num_prompt = prompts.bias.shape[-1]
    # The columns of the prompts that are before the window. Prompts end in the same column.
    num_unseen = 0
    if sliding_window is not None:
        num_unseen = max(0, num_prompt + key.shape[2] - sliding_window)
        key, value = (each[:, :, -sliding_window:] for each in (key, value))

    # Group query heads by their key head, so that keys and values need not be repeated.
    rows, heads, _, size = query.shape
    queries = query.view(rows, key.shape[1], heads // key.shape[1], size).float() * (
        size**-0.5 if scaling is None else scaling
    )
    # One softmax over the prompt's tokens and the row's own; each part then weights its values.
    scores = torch.cat([prompts.scores(queries, layer), queries @ key.float().transpose(-1, -2)], dim=-1)
    if num_unseen:
        scores[..., : min(num_unseen, num_prompt)] = -torch.inf
    of_prompt, own = scores.softmax(dim=-1).split([num_prompt, key.shape[2]], dim=-1)
    output = prompts.mix(of_prompt, layer) + own @ value.float()

    # The sum has the layout of the prompts' part, whose rows need not be contiguous.
    return output.to(query.dtype).reshape(rows, 1, heads, size), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
