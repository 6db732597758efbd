"""Sorting the tokens of experts in one operation: what it relies on in Megatron-Core, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from megarl.engine.fake_cuda import sorting
from tests.unit.engine.test_cpu_adaptations import megatron_source


def test_megatron_splits_and_joins_the_tokens() -> None:
    source = megatron_source("transformer.moe.moe_utils", "sort_chunks_by_idxs")
    assert "input = torch.split(input, split_sizes.tolist(), dim=0)" in source
    assert "output = torch.cat([input[i] for i in sorted_idxs.tolist()], dim=0)" in source


def test_shapes_and_gradients_are_those_of_the_tokens() -> None:
    tokens = torch.ones(6, 2, requires_grad=True)
    output, probs = sorting(_never)(tokens, torch.tensor([1, 5]), torch.tensor([1, 0]), probs=torch.ones(6))
    assert output.shape == (6, 2)
    assert probs.shape == (6,)
    (gradient,) = torch.autograd.grad(output.sum(), tokens)
    assert gradient.shape == (6, 2)


@pytest.mark.parametrize(("sizes", "order"), [([1, 4], [1, 0]), ([1, 5], [1, 1]), ([1, 5], [0])])
def test_chunks_that_are_not_those_of_the_tokens_are_refused(sizes: list[int], order: list[int]) -> None:
    with pytest.raises(ValueError, match="6 tokens sorted as 2 chunks"):
        sorting(_never)(torch.ones(6, 2), torch.tensor(sizes), torch.tensor(order))


def _never(*arguments: object, **options: object) -> None:
    raise AssertionError("the fused function is not used")
