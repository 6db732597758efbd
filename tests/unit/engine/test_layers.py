"""The layers that replace Megatron's: attention and RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from megarl.config.schema import Device
from tests.ranks import RankPool
from tests.unit.engine.comparison import max_difference

HEADS = 4
GROUPS = 2
DIM = 8


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
    weight: Tensor  # (T, heads * D), weights of the sum


def make_heads(tokens: int, num_heads: int) -> Heads:
    generator = torch.Generator().manual_seed(tokens)
    shapes = (
        (tokens, num_heads, DIM),
        (tokens, GROUPS, DIM),
        (tokens, GROUPS, DIM),
        (tokens, num_heads * DIM),
    )
    return Heads(*(torch.randn(shape, generator=generator) for shape in shapes))


def dense_attention(
    heads: Heads, lengths: list[int], scale: float, prompt_of: Sequence[int | None] = ()
) -> Attended:
    """Attend in float64 with one (T, T) mask over all sequences.

    A token sees its own sequence up to itself, and all of the sequence that it continues.
    """
    query, key, value = (tensor.double().requires_grad_() for tensor in heads[:3])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    token = torch.arange(len(sequence))
    sees = (sequence[:, None] == sequence) & (token[:, None] >= token)
    for number, prompt in enumerate(prompt_of):
        sees |= (sequence[:, None] == number) & (sequence == (-1 if prompt is None else prompt))
    mixed = []
    num_heads = query.shape[1]

    for head in range(num_heads):
        group = head // (num_heads // GROUPS)
        logits = (query[:, head] @ key[:, group].T * scale).masked_fill(~sees, float("-inf"))
        mixed.append(logits.softmax(-1) @ value[:, group])

    result = torch.cat(mixed, -1)
    (result * heads.weight).sum().backward()
    return Attended(result.detach(), query.grad, key.grad, value.grad)


def slow_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Replace torch's `varlen_attn`, which has no CPU kernel, one sequence at a time.

    Refuses what the kernel would.
    """
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert type(max_q) is type(max_k) is int
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    assert window_size == (-1, 0)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    lengths = (cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist())
    mixed = []

    for queries, keys, values in zip(
        query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True
    ):
        # The causal mask is aligned to the lower right.
        mask = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
        sequence = (tensor.transpose(0, 1)[None] for tensor in (queries, keys, values))
        mixed.append(
            F.scaled_dot_product_attention(*sequence, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)[
                0
            ].transpose(0, 1)
        )

    return torch.cat(mixed)


def attend(heads: Heads, lengths: list[int], scale: float, way: str) -> Attended:
    """Run in a rank: attend.

    `padded`: sequences of equal length as a batch (S, b, ...). `varlen`: as on CUDA, except for the kernel.
    """
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine.layers import AttentionCore
    from megarl.engine.packed_rows import PackedRows

    core = AttentionCore(SimpleNamespace(context_parallel_size=1, attention_dropout=0.0), softmax_scale=scale)
    query, key, value = (tensor.clone().requires_grad_() for tensor in heads[:3])
    packed = PackedRows(lengths, torch.device("cpu"))

    if way == "packed":
        mixed = core(query, key, value, packed_seq_params=packed)
    elif way == "varlen":
        with mock.patch.object(varlen, "varlen_attn", slow_varlen_attn):
            mixed = core.attend_varlen(query, key, value, packed)
    else:
        count = len(lengths)
        length = lengths[0]
        as_batch = (tensor.view(count, length, -1, DIM).transpose(0, 1) for tensor in (query, key, value))
        mixed = core(*as_batch).transpose(0, 1).flatten(0, 1)

    (mixed * heads.weight).sum().backward()
    return Attended(mixed.detach(), query.grad, key.grad, value.grad)


UNEVEN = [5, 1, 9, 130, 2, 200, 8, 64]


@pytest.mark.parametrize(
    ("lengths", "way"),
    [
        (UNEVEN, "packed"),  # short ones in groups, long ones separately
        ([1], "packed"),
        ([1, 1, 1], "packed"),
        ([7, 7, 7], "packed"),
        ([150, 150], "packed"),
        ([3, 140], "packed"),
        ([7, 7, 7], "padded"),
        (UNEVEN, "varlen"),
        ([1, 1, 1], "varlen"),
        ([150, 150, 3], "varlen"),  # the last is padding
    ],
)
@pytest.mark.parametrize("num_heads", [HEADS, GROUPS])
def test_attention_stays_inside_its_sequence(
    lengths: list[int], way: str, num_heads: int, rank_pool: RankPool
) -> None:
    heads = make_heads(sum(lengths), num_heads)
    scale = 0.3
    (got,) = rank_pool.run(attend, world_size=1, heads=heads, lengths=lengths, scale=scale, way=way)
    for key, value in dense_attention(heads, lengths, scale)._asdict().items():
        assert max_difference(getattr(got, key), value) < 1e-5, key


class SlowFlashOperators:
    """Replaces torch's operators of flash attention, which have no CPU kernel, one sequence at a time.

    As in flash attention, the backward pass recomputes the weights from a given log-sum-exp and knows nothing
    else of the forward pass.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float, **window: int
    ) -> Any:
        *bounds, dropout, causal, debug = rest
        self._check(dropout, causal, window)
        assert debug is False
        output = torch.empty_like(query)
        log_sum = torch.empty(query.shape[1], query.shape[0])
        for queries, _, scores, values in self._sequences(query, key, value, *bounds, causal, scale):
            output[queries] = (scores.softmax(-1) @ values).transpose(0, 1)
            log_sum[:, queries] = scores.logsumexp(-1)
        return output, log_sum, torch.tensor(7), torch.tensor(0), torch.tensor(0)

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        *rest: Any,
        scale: float,
        **window: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        *bounds, dropout, causal, state, unused = rest
        self._check(dropout, causal, window)
        assert int(state) == 7
        assert unused.numel() == 0
        totals = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

        for queries, keys, scores, values in self._sequences(query, key, value, *bounds, causal, scale):
            weights = (scores - log_sum[:, queries, None]).exp()
            grad = gradient[queries].transpose(0, 1)
            inner = (
                weights
                * (grad @ values.transpose(1, 2) - (gradient * output).sum(-1)[queries].t()[..., None])
                * scale
            )
            repeats = query.shape[1] // key.shape[1]
            totals[0][queries] = (inner @ key[keys].transpose(0, 1).repeat_interleave(repeats, 0)).transpose(
                0, 1
            )
            of_keys = inner.transpose(1, 2) @ query[queries].transpose(0, 1)
            for total, part in zip(totals[1:], (of_keys, weights.transpose(1, 2) @ grad), strict=True):
                total[keys] = part.unflatten(0, (-1, repeats)).sum(1).transpose(0, 1)

        return totals

    @staticmethod
    def _check(dropout: float, causal: bool, window: dict[str, int]) -> None:
        assert dropout == 0.0
        assert window == {"window_size_left": -1, "window_size_right": 0 if causal else -1}

    @staticmethod
    def _sequences(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        scale: float,
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yield queries, keys, their causal scores (heads, q, k) aligned to the lower right, and values (heads, k, D)."""
        assert (cu_q.dtype, cu_k.dtype, max_q, max_k) == (
            torch.int32,
            torch.int32,
            int(cu_q.diff().max()),
            int(cu_k.diff().max()),
        )
        repeats = query.shape[1] // key.shape[1]

        for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
            heads = [
                tensor.transpose(0, 1).repeat_interleave(repeats, 0) for tensor in (key[k0:k1], value[k0:k1])
            ]
            scores = query[q0:q1].transpose(0, 1) @ heads[0].transpose(1, 2) * scale
            if causal:
                scores = scores.masked_fill(
                    ~torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - q1 + q0), float("-inf")
                )
            yield slice(q0, q1), slice(k0, k1), scores, heads[1]


@contextmanager
def slow_flash_attention() -> Iterator[None]:
    operators = SlowFlashOperators()
    with (
        mock.patch.object(torch.ops.aten, "_flash_attention_forward", operators.forward),
        mock.patch.object(torch.ops.aten, "_flash_attention_backward", operators.backward),
    ):
        yield


def attend_sharing(
    heads: Heads, lengths: list[int], prompt_of: list[int | None], scale: float, way: str
) -> Attended:
    """Run in a rank: attend with shared prompts.

    `varlen`, `mask`: as on CUDA in bfloat16 and float32, except for the kernels.
    """
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine import layers, shared_prompts
    from megarl.engine.layers import AttentionCore
    from megarl.engine.packed_rows import PackedRows

    core = AttentionCore(SimpleNamespace(context_parallel_size=1, attention_dropout=0.0), softmax_scale=scale)
    query, key, value = (tensor.clone().requires_grad_() for tensor in heads[:3])
    packed = PackedRows(lengths, torch.device("cpu"), prompt_of)

    if way == "cpu":
        packed.max_seqlen_kv = max(packed.max_seqlen_kv, layers.KEY_BLOCK + 1)  # as if one sequence were long
        mixed = core(query, key, value, packed_seq_params=packed)
        (mixed * heads.weight).sum().backward()
    elif way == "mask":
        mixed = core.attend_packed(query, key, value, packed.attention_plan)
        (mixed * heads.weight).sum().backward()
    else:
        with (
            slow_flash_attention(),
            mock.patch.object(shared_prompts, "kernel_for", return_value=shared_prompts.VarlenKernel),
        ):
            mixed = shared_prompts.attend(query, key, value, packed.shared, scale)
            (mixed * heads.weight).sum().backward()

    return Attended(mixed.detach(), query.grad, key.grad, value.grad)


def attend_among_ranks(
    heads: Heads, lengths: list[int], prompt_of: list[int | None], scale: float, way: str
) -> Attended:
    """Run in one process: return what each of three context-parallel ranks computes for its own queries.

    `varlen`: as on CUDA, except for the kernels.
    """
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine import layers, shared_prompts
    from megarl.engine.context import RankSlice, own_tokens
    from megarl.engine.layers import AttentionCore, attend_pieces
    from megarl.engine.packed_rows import PackedRows

    core = AttentionCore(SimpleNamespace(context_parallel_size=1, attention_dropout=0.0), softmax_scale=scale)
    ranks = [PackedRows(lengths, torch.device("cpu"), prompt_of, RankSlice(3, rank)) for rank in range(3)]
    padded = ranks[0].lengths
    owned = [own_tokens(padded, packed.place) for packed in ranks]
    starts = torch.tensor([0, *padded]).cumsum(0).tolist()
    real = torch.cat(
        [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    )
    given = [tensor.clone().requires_grad_() for tensor in heads[:3]]
    query, key, value = (
        torch.randn(sum(padded), *tensor.shape[1:]).index_copy(0, real, tensor) for tensor in given
    )
    key, value = (tensor[torch.cat(owned)] for tensor in (key, value))
    whole = torch.zeros(sum(padded), heads.weight.shape[1])

    core.context = "ranks"  # type: ignore[assignment]
    kernel = shared_prompts.VarlenKernel if way == "varlen" else shared_prompts.kernel_for(query)

    with (
        mock.patch.object(varlen, "varlen_attn", slow_varlen_attn),
        slow_flash_attention(),
        mock.patch.object(shared_prompts, "kernel_for", return_value=kernel),
        mock.patch.object(layers, "whole_keys", lambda key, value, context: (key, value)),
    ):
        for packed, own in zip(ranks, owned, strict=True):
            if way == "cpu":
                packed.max_seqlen_kv = max(packed.max_seqlen_kv, layers.KEY_BLOCK + 1)
                mixed = core(query[own], key, value, packed_seq_params=packed)
            elif way == "mask":
                mixed = core.attend_packed(query[own], key, value, packed.attention_plan)
            elif packed.shared is None:
                mixed = attend_pieces(query[own], key, value, packed, scale)
            else:
                mixed = shared_prompts.attend(query[own], key, value, packed.shared, scale)
            whole = whole.index_copy(0, own, mixed)
        (whole[real] * heads.weight).sum().backward()

    return Attended(whole[real].detach(), *(tensor.grad for tensor in given))


SHARING: list[tuple[list[int], list[int | None]]] = [
    # The last is padding.
    ([5, 9, 1, 30, 7, 64, 2, 3, 8, 6], [None, 0, 0, 0, None, None, 5, 5, 5, None]),
    ([1, 1, 1], [None, 0, 0]),
    ([130, 200], [None, 0]),
]


@pytest.mark.parametrize(("lengths", "prompt_of"), SHARING)
@pytest.mark.parametrize("way", ["cpu", "mask", "varlen"])
@pytest.mark.parametrize("num_heads", [HEADS, GROUPS])
def test_responses_attend_to_the_prompt_they_share(
    lengths: list[int], prompt_of: list[int | None], way: str, num_heads: int, rank_pool: RankPool
) -> None:
    heads = make_heads(sum(lengths), num_heads)
    scale = 0.3
    (got,) = rank_pool.run(
        attend_sharing, world_size=1, heads=heads, lengths=lengths, prompt_of=prompt_of, scale=scale, way=way
    )
    for key, value in dense_attention(heads, lengths, scale, prompt_of)._asdict().items():
        assert max_difference(getattr(got, key), value) < 1e-5, key


@pytest.mark.parametrize(("lengths", "prompt_of"), [*SHARING, (UNEVEN, [None] * len(UNEVEN))])
@pytest.mark.parametrize("way", ["cpu", "mask", "varlen"])
def test_ranks_that_share_rows_attend_to_all_that_stands_before(
    lengths: list[int], prompt_of: list[int | None], way: str, rank_pool: RankPool
) -> None:
    heads = make_heads(sum(lengths), HEADS)
    scale = 0.3
    (got,) = rank_pool.run(
        attend_among_ranks,
        world_size=1,
        heads=heads,
        lengths=lengths,
        prompt_of=prompt_of,
        scale=scale,
        way=way,
    )
    for key, value in dense_attention(heads, lengths, scale, prompt_of)._asdict().items():
        assert max_difference(getattr(got, key), value) < 1e-5, key


def attentions_of_context_parallel_rows(prompt_of: list[int | None], cp_comm_type: str) -> list[str]:
    """Run in a rank: return who computes the attention of Transformer Engine's layers."""
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine import layers
    from megarl.engine.context import RankSlice
    from megarl.engine.packed_rows import PackedRows

    found = []

    class Ring:
        def __init__(self, config: Any, softmax_scale: float | None, pg_collection: Any) -> None:
            pass

        def forward(self, query: Tensor, *arguments: Any, packed_seq_params: Any, **options: Any) -> Tensor:
            # The boundaries of padded sequences are enough only without others.
            assert packed_seq_params.cu_seqlens_q_padded is None
            assert packed_seq_params.cu_seqlens_q.tolist() == [0, 8, 12]
            found.append("ring")
            return query

    def gathers(key: Tensor, value: Tensor, context: object) -> tuple[Tensor, Tensor]:
        found.append("gather")
        return key, value

    config = SimpleNamespace(context_parallel_size=2, cp_comm_type=cp_comm_type)
    attention = layers.sharing_prompts(Ring)(config, pg_collection=SimpleNamespace(cp="ranks"))
    rows = PackedRows([7, 4], torch.device("cpu"), prompt_of, RankSlice(2, 0))
    heads = make_heads(6, HEADS)

    with (
        mock.patch.object(layers, "whole_keys", gathers),
        mock.patch.object(layers, "attend_pieces", lambda query, *rest: query),
        mock.patch.object(layers, "attend_shared", lambda query, *rest: query),
    ):
        attention.forward(*heads[:3], packed_seq_params=rows)
    return found


@pytest.mark.parametrize(
    ("prompt_of", "cp_comm_type", "who"),
    [([None, None], "p2p", "ring"), ([None, None], "all_gather", "gather"), ([None, 0], "p2p", "gather")],
)
def test_rows_travel_around_a_ring_unless_they_share_prompts(
    prompt_of: list[int | None], cp_comm_type: str, who: str, rank_pool: RankPool
) -> None:
    assert rank_pool.run(
        attentions_of_context_parallel_rows, world_size=1, prompt_of=prompt_of, cp_comm_type=cp_comm_type
    ) == [[who]]


def plan_on_host(lengths: list[int]) -> int:
    """Run in a rank: return how many of three layers make the plan of a micro-batch."""
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine.packed_rows import PackedRows

    packed = PackedRows(lengths, torch.device("cpu"))
    packed.cu_seqlens_q = packed.cu_seqlens_q.to("meta")  # contains no readable numbers

    return len({id(packed.attention_plan) for _ in range(3)})


def test_the_plan_of_attention_asks_nothing_of_the_device(rank_pool: RankPool) -> None:
    assert rank_pool.run(plan_on_host, world_size=1, lengths=[7, 7, 7]) == [1]


def norm(hidden: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine.layers import RMSNorm

    config = SimpleNamespace(
        params_dtype=hidden.dtype, sequence_parallel=True, layernorm_zero_centered_gamma=zero_centered
    )
    layer = RMSNorm(config, hidden.shape[-1], eps=eps)

    # Megatron sums such gradients over the ranks that share the tokens.
    assert layer.weight.sequence_parallel is True
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer(hidden).detach()


@pytest.mark.parametrize("of_family", [Qwen2RMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.0)])
def test_rms_norm_rounds_as_hugging_face_does(
    dtype: torch.dtype, tolerance: float, of_family: type[torch.nn.Module], rank_pool: RankPool
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(50, 64, generator=generator) * 3).to(dtype)
    hidden[0] *= 1e-3  # where eps matters
    reference = of_family(64, eps=1e-5).to(dtype)

    with torch.no_grad():
        reference.weight.copy_(torch.randn(64, generator=generator))
        want = reference(hidden)

    (got,) = rank_pool.run(
        norm,
        world_size=1,
        hidden=hidden,
        weight=reference.weight.detach(),
        eps=1e-5,
        zero_centered=of_family is Gemma3RMSNorm,
    )
    assert got.dtype == dtype
    assert max_difference(got, want) <= tolerance
