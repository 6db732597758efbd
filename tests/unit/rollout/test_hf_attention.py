"""Test the cache and the attention of the hf engine's decoding against transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from megarl.rollout.hf.attention import SLOTS, KVCache, SharedPrompts, grouped_attention


def states(generator: torch.Generator, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, rows, 2, tokens, 4, generator=generator)
    return keys, values


def test_the_cache_holds_what_transformers_holds_over_enlargements_and_selections() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = KVCache()
    theirs = DynamicCache()
    rows = 3

    for step in range(210):  # enlarged at 1, 65 tokens after the prompt, and so on
        for layer in range(2):
            new = states(generator, rows, 5 if step == 0 else 1)
            got = ours.append(layer, *new)
            expected = theirs.update(*new, layer)
            for mine, true in zip(got, expected, strict=True):
                assert torch.equal(mine, true)
            assert got[0].shape == (rows, 2, 5 + step, 4)
        if step in (0, 40, 150):
            chosen = {
                0: torch.tensor([0, 0, 1, 2, 2, 2]),
                40: torch.tensor([5, 1, 3]),
                150: torch.tensor([2]),
            }[step]
            ours.select(chosen)
            theirs.batch_select_indices(chosen)
            rows = len(chosen)


def test_a_tokens_keys_are_written_into_memory_that_is_there() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache()
    keys, _ = cache.append(0, *states(generator, 2, 5))
    for _ in range(60):
        later, _ = cache.append(0, *states(generator, 2, 1))
        assert later.data_ptr() == keys.data_ptr()


class Layer(Module):
    """The attributes of a model's layer that attention reads."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.is_causal = True
        self.layer_idx = 0


NUM_PROMPTS = 4
WIDTH = 7
WRITTEN = 3
SIZE = 8
LENGTHS = torch.tensor([7, 2, 5, 1])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("owners", [[0, 0, 1, 1, 2, 2, 3, 3], [3, 0, 2, 2, 2], [1] * (2 * SLOTS + 3) + [0]])
def test_prompts_that_are_kept_once_give_the_attention_of_transformers(
    groups: int, owners: list[int]
) -> None:
    """Covers rows that have been dropped, and prompts with them; padding is not read."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(WIDTH) >= WIDTH - LENGTHS[:, None]
    of_prompts = torch.randn(2, NUM_PROMPTS, 4 // groups, WIDTH, SIZE, generator=generator)
    cache = KVCache()
    cache.append(0, *of_prompts)
    prompts = SharedPrompts.of(cache, mask, owners)
    assert len(prompts.bias) == len(
        {(owner, owners[:row].count(owner) // SLOTS) for row, owner in enumerate(owners)}
    )
    rows = torch.arange(len(owners))

    for kept in (rows, torch.tensor([4, 0, 2]), torch.tensor([2, 0])):
        prompts, rows = (prompts.select(kept), rows[kept]) if len(kept) < len(owners) else (prompts, rows)
        query = torch.randn(len(rows), 4, 1, SIZE, generator=generator)
        own = torch.randn(2, len(rows), 4 // groups, WRITTEN, SIZE, generator=generator)
        got, _ = grouped_attention(Layer(groups), query, *own, prompts.bias, scaling=0.3, prompts=prompts)
        owner = torch.tensor(owners)[rows]
        keys, values = torch.cat([of_prompts[:, owner], own], dim=3)
        real = torch.cat([mask[owner], torch.ones(len(rows), WRITTEN, dtype=torch.bool)], dim=1)[
            :, None, None
        ]
        expected, _ = sdpa_attention_forward(Layer(groups), query, keys, values, real, scaling=0.3)
        assert got.shape == expected.shape == (len(rows), 1, 4, SIZE)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_without_prompts_it_is_transformers_own() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 3, 4, 6, SIZE, generator=generator)
    got, expected = (
        attend(Layer(1), query, key, value, None, scaling=0.3)[0]
        for attend in (grouped_attention, sdpa_attention_forward)
    )
    assert torch.equal(got, expected)
