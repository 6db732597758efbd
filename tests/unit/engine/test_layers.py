"""The layers that stand in for Megatron's: attention and RMSNorm, and the rotary frequencies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from megarl.config.architecture import Architecture, read_architecture
from megarl.config.schema import Device
from tests.ranks import RankPool
from tests.unit.engine.comparison import max_difference

HEADS, GROUPS, DIM = 4, 2, 8


class Attended(NamedTuple):
    """Outputs (T, heads * D) and the gradients of their weighted sum."""

    mixed: Tensor
    query_grad: Tensor
    key_grad: Tensor
    value_grad: Tensor


class Heads(NamedTuple):
    query: Tensor  # (T, heads, D)
    key: Tensor  # (T, groups, D)
    value: Tensor
    weight: Tensor  # (T, heads * D), of the sum


def make_heads(tokens: int) -> Heads:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, HEADS, DIM), (tokens, GROUPS, DIM), (tokens, GROUPS, DIM), (tokens, HEADS * DIM))
    return Heads(*(torch.randn(shape, generator=generator) for shape in shapes))


def dense_attention(heads: Heads, lengths: list[int], scale: float) -> Attended:
    """float64, one (T, T) mask over all sequences: a token sees those of its own sequence up to itself."""
    query, key, value = (tensor.double().requires_grad_() for tensor in heads[:3])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    token = torch.arange(len(sequence))
    sees = (sequence[:, None] == sequence) & (token[:, None] >= token)
    mixed = []
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        logits = (query[:, head] @ key[:, group].T * scale).masked_fill(~sees, float("-inf"))
        mixed.append(logits.softmax(-1) @ value[:, group])
    result = torch.cat(mixed, -1)
    (result * heads.weight).sum().backward()
    return Attended(result.detach(), query.grad, key.grad, value.grad)


def attend(heads: Heads, lengths: list[int], scale: float, packing: bool) -> Attended:
    """In a rank. Padded: sequences of one length only, as a batch (S, b, ...)."""
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megatron.core.packed_seq_params import PackedSeqParams

    from megarl.engine.layers import AttentionCore

    core = AttentionCore(SimpleNamespace(context_parallel_size=1, attention_dropout=0.0), softmax_scale=scale)
    query, key, value = (tensor.clone().requires_grad_() for tensor in heads[:3])
    if packing:
        boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        longest = max(lengths)
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        mixed = core(query, key, value, packed_seq_params=packed)
    else:
        count, length = len(lengths), lengths[0]
        as_batch = (tensor.view(count, length, -1, DIM).transpose(0, 1) for tensor in (query, key, value))
        mixed = core(*as_batch).transpose(0, 1).flatten(0, 1)
    (mixed * heads.weight).sum().backward()
    return Attended(mixed.detach(), query.grad, key.grad, value.grad)


@pytest.mark.parametrize(
    ("lengths", "packing"),
    [
        ([5, 1, 9, 130, 2, 200, 8, 64], True),  # short ones in groups, long ones alone
        ([1], True),
        ([1, 1, 1], True),
        ([7, 7, 7], True),
        ([150, 150], True),
        ([3, 140], True),
        ([7, 7, 7], False),
    ],
)
def test_attention_stays_inside_its_sequence(lengths: list[int], packing: bool, rank_pool: RankPool) -> None:
    heads, scale = make_heads(sum(lengths)), 0.3
    (got,) = rank_pool.run(attend, world_size=1, heads=heads, lengths=lengths, scale=scale, packing=packing)
    for key, value in dense_attention(heads, lengths, scale)._asdict().items():
        assert max_difference(getattr(got, key), value) < 1e-5, key


def norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine.layers import RMSNorm

    layer = RMSNorm(SimpleNamespace(params_dtype=hidden.dtype, sequence_parallel=True), hidden.shape[-1], eps=eps)
    assert layer.weight.sequence_parallel is True  # Megatron sums such gradients over the ranks that share the tokens
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer(hidden).detach()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.0)])
def test_rms_norm_rounds_as_hugging_face_does(dtype: torch.dtype, tolerance: float, rank_pool: RankPool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(50, 64, generator=generator) * 3).to(dtype)
    hidden[0] *= 1e-3  # where eps matters
    reference = Qwen2RMSNorm(64, eps=1e-5).to(dtype)
    with torch.no_grad():
        reference.weight.copy_(torch.randn(64, generator=generator))
        want = reference(hidden)
    (got,) = rank_pool.run(norm, world_size=1, hidden=hidden, weight=reference.weight.detach(), eps=1e-5)
    assert got.dtype == dtype
    assert max_difference(got, want) <= tolerance


def frequencies(architecture: Architecture) -> Tensor:
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine.model import inverse_frequencies

    return inverse_frequencies(architecture)


def test_rope_scaling_with_the_numbers_of_llama_3_1(rank_pool: RankPool, tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling},
    )
    config.save_pretrained(tmp_path)
    architecture = read_architecture(str(tmp_path))
    (got,) = rank_pool.run(frequencies, world_size=1, architecture=architecture)
    torch.testing.assert_close(got, LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0.0)
    (plain,) = rank_pool.run(frequencies, world_size=1, architecture=replace(architecture, rope_scaling=None))
    kept, slowed = int((got == plain).sum()), int(torch.isclose(got, plain / 8).sum())
    assert kept > 20
    assert slowed > 20
    assert kept + slowed < 64  # a band between is blended
