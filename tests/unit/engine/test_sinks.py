"""Attention with sinks and windows, against one softmax in float64."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import example_architecture
from tests.ranks import RankPool
from tests.unit.engine.comparison import max_difference

HEADS = 4
GROUPS = 2
DIM = 8
SCALE = 0.3


def dense(tensors: list[Tensor], sees: Tensor) -> list[Tensor]:
    """Return the output (T, heads * D) and the gradients of its weighted sum."""
    *inputs, weight = tensors
    query, key, value, sinks = (tensor.double().requires_grad_() for tensor in inputs)
    mixed = []

    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        logits = (query[:, head] @ key[:, group].T * SCALE).masked_fill(~sees, float("-inf"))
        whole = torch.cat([logits, sinks[head].expand(len(logits), 1)], 1).softmax(-1)
        mixed.append(whole[:, :-1] @ value[:, group])

    output = torch.cat(mixed, -1)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), (query, key, value, sinks))]


def sees_of(lengths: list[int], prompt_of: list[int | None], window: int) -> Tensor:
    """Return (T, T): which tokens a token sees. A sequence continues its prompt's positions."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    before = torch.tensor([0 if prompt is None else lengths[prompt] for prompt in prompt_of])
    position = torch.cat([torch.arange(length) for length in lengths]) + before[sequence]
    prompts = torch.tensor([number if prompt is None else prompt for number, prompt in enumerate(prompt_of)])
    same = (sequence[:, None] == sequence) | (prompts[sequence][:, None] == sequence)
    distance = position[:, None] - position
    sees = same & (distance >= 0)
    return sees & (distance < window) if window else sees


def attended(window: int, is_padded: bool) -> float:
    """Run in a rank: return the largest difference from `dense`."""
    from megarl.config.schema import Device
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine.packed_rows import PackedRows
    from megarl.engine.sinks import SinkAttention

    lengths, prompt_of = ([6, 6], [None, None]) if is_padded else ([7, 3, 5, 1, 9], [None, 0, 0, None, None])
    generator = torch.Generator().manual_seed(window)
    tokens = sum(lengths)
    shapes = [(tokens, HEADS, DIM), (tokens, GROUPS, DIM), (tokens, GROUPS, DIM), (HEADS,)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    weight = torch.randn(tokens, HEADS * DIM, generator=generator)

    core = SinkAttention(
        SimpleNamespace(
            attention_dropout=0.0,
            context_parallel_size=1,
            num_attention_heads=HEADS,
            params_dtype=torch.float32,
        ),  # type: ignore[arg-type]
        layer_number=1,
        architecture=replace(example_architecture("gpt_oss"), windows=(window,)),
        softmax_scale=SCALE,
        pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    )
    query, key, value, sinks = inputs
    assert core.softmax_offset is not None
    core.softmax_offset.data.copy_(sinks)
    leaves: list[Any] = [tensor.clone().requires_grad_() for tensor in (query, key, value)]

    if is_padded:
        rows = (leaf.view(2, 6, -1, DIM).transpose(0, 1) for leaf in leaves)
        output = core(*rows).transpose(0, 1).reshape(tokens, -1)
    else:
        packed = PackedRows(lengths, torch.device("cpu"), prompt_of)
        output = core(*leaves, packed_seq_params=packed)

    gradients = torch.autograd.grad((output * weight).sum(), (*leaves, core.softmax_offset))
    expected = dense([*inputs, weight], sees_of(lengths, prompt_of, window))
    return max(
        max_difference(ours.double(), theirs)
        for ours, theirs in zip((output.detach(), *gradients), expected, strict=True)
    )


@pytest.mark.parametrize("is_padded", [True, False], ids=["padded", "packed, with a shared prompt"])
@pytest.mark.parametrize("window", [0, 1, 4])
def test_sinks_and_windows(rank_pool: RankPool, window: int, is_padded: bool) -> None:
    (difference,) = rank_pool.run(attended, world_size=1, window=window, is_padded=is_padded)
    assert difference <= 5e-6
