"""The cache and the attention of the hf engine's decoding, beside transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from megarl.rollout.hf.attention import KVCache, grouped_attention


def states(generator: torch.Generator, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, rows, 2, tokens, 4, generator=generator)
    return keys, values


def test_the_cache_holds_what_transformers_holds_over_enlargements_and_selections() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = KVCache(), DynamicCache()
    rows = 3
    for step in range(210):  # enlarged at 1, 65 tokens behind the prompt, and so on
        for layer in range(2):
            new = states(generator, rows, 5 if step == 0 else 1)
            got, expected = ours.update(*new, layer), theirs.update(*new, layer)
            for mine, true in zip(got, expected, strict=True):
                assert torch.equal(mine, true)
        assert ours.get_seq_length() == theirs.get_seq_length() == 5 + step
        if step in (0, 40, 150):
            chosen = {0: torch.tensor([0, 0, 1, 2, 2, 2]), 40: torch.tensor([5, 1, 3]), 150: torch.tensor([2])}[step]
            ours.select(chosen)
            theirs.batch_select_indices(chosen)
            rows = len(chosen)


def test_a_tokens_keys_are_written_into_memory_that_is_there() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache()
    keys, _ = cache.update(*states(generator, 2, 5), 0)
    for _ in range(60):
        later, _ = cache.update(*states(generator, 2, 1), 0)
        assert later.data_ptr() == keys.data_ptr()


class Layer(Module):
    """What attention reads of a model's layer."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, True


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_is_that_of_transformers(groups: int, num_tokens: int, padded: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    length = 9 if num_tokens == 1 else num_tokens
    query = torch.randn(3, 4, num_tokens, 8, generator=generator)
    key, value = torch.randn(2, 3, 4 // groups, length, 8, generator=generator)
    mask = None
    if padded:
        mask = torch.arange(length) >= torch.tensor([0, 2, 4])[:, None]
        mask = mask[:, None, None] & torch.ones(length, length, dtype=torch.bool).tril()[-num_tokens:]
        mask |= torch.eye(length, dtype=torch.bool)[-num_tokens:]  # of padding that attends to itself, no result is read
    got, expected = (attend(Layer(groups), query, key, value, mask, scaling=0.3) for attend in (grouped_attention, sdpa_attention_forward))
    assert got[0].shape == expected[0].shape == (3, num_tokens, 4, 8)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=1e-6)
