"""Attention for responses that share one copy of their prompt in the batch.

Each token of a response sees the prompt, and its own response up to itself. Both are calls of existing
kernels: a causal one for every sequence of the batch, and one for all responses to a prompt over that prompt.
A kernel also returns the log-sum-exp of its logits, by which the two results are weighted. Its backward pass
recomputes the softmax weights from a log-sum-exp: given that of the whole, it returns its part of the
gradient, so that a prompt's keys and values receive the sum over all its responses (Dao 2023,
FlashAttention-2; Liu et al. 2023, Ring Attention).

Shapes: T tokens of the batch, heads of queries, groups of keys and values, D numbers in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.engine.context import QueryPiece
from megarl.engine.platform import to_device

_NO_DROPOUT = 0.0


class Sequences(NamedTuple):
    """The sequences of one call.

    Attributes:
        queries: The number of queries of each sequence.
        keys: The number of keys of each sequence.
        query_bounds: int32 on the device, the boundaries of the queries.
        key_bounds: int32 on the device, the boundaries of the keys.
    """

    queries: list[int]
    keys: list[int]
    query_bounds: Tensor
    key_bounds: Tensor


class PromptSharing(NamedTuple):
    """The sequences of a packed batch that continue others. Made on the host.

    With context parallelism, a rank has queries in pieces, and the keys of all ranks.

    Attributes:
        own: Every sequence over itself; of a piece, over its sequence up to the piece's end.
        over_prompts: For each shared prompt, all its responses over it.
        own_keys: (K,) indices of the keys of `own`, on the device; None if these are all keys in their order.
        responses: (N,) indices of the responses' tokens, on the device, in the order of `over_prompts`.
        prompts: (M,) indices of the prompts' keys, on the device, in the order of `over_prompts`.
    """

    own: Sequences
    over_prompts: Sequences
    own_keys: Tensor | None
    responses: Tensor
    prompts: Tensor


def shared_prompts(
    pieces: Sequence[QueryPiece], key_order: Tensor | None, device: torch.device
) -> PromptSharing | None:
    """Describe the shared prompts of a batch; None if no sequence continues another.

    Args:
        pieces: The pieces of this rank; without context parallelism, whole sequences.
        key_order: (T,) the position of each token of the batch among the keys of all ranks. None if a rank
            has all tokens.
    """
    followers: dict[range, list[QueryPiece]] = {}
    for piece in pieces:
        if piece.prompt:
            followers.setdefault(piece.prompt, []).append(piece)
    if not followers:
        return None

    def keys(seen: Sequence[range]) -> Tensor:
        positions = torch.cat([torch.arange(each.start, each.stop) for each in seen])
        return to_device(positions if key_order is None else key_order[positions], device)

    responses = [piece for each in followers.values() for piece in each]
    tokens = [torch.arange(piece.start, piece.start + piece.length) for piece in responses]

    # All responses to a prompt are one sequence of queries: each sees the whole prompt, without a mask.
    return PromptSharing(
        own=sequences_of([piece.length for piece in pieces], [len(piece.own) for piece in pieces], device),
        over_prompts=sequences_of(
            [sum(piece.length for piece in each) for each in followers.values()],
            list(map(len, followers)),
            device,
        ),
        own_keys=None if key_order is None else keys([piece.own for piece in pieces]),
        responses=to_device(torch.cat(tokens), device),
        prompts=keys(list(followers)),
    )


def sequences_of(queries: list[int], keys: list[int], device: torch.device) -> Sequences:
    """Return the sequences of a call, given the numbers of their queries and keys."""
    query_bounds, key_bounds = (
        to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
        for lengths in (queries, keys)
    )
    return Sequences(queries, keys, query_bounds, key_bounds)


def attend(query: Tensor, key: Tensor, value: Tensor, shared: PromptSharing, scale: float | None) -> Tensor:
    """Attend with shared prompts. On CUDA, only 16-bit dtypes are supported.

    Args:
        query: (T, heads, D).
        key: (T, groups, D); with context parallelism those of all ranks, as `whole_keys` returns them.
        value: (T, groups, D), as `key`.

    Returns:
        (T, heads * D).
    """
    return _Attention.apply(query, key, value, shared, scale).flatten(1)


# The result of one call: the output (T, heads, D); the log-sum-exp (T, heads), in float32; and what the
# kernel needs in the backward pass.
AttentionResult = tuple[Tensor, Tensor, Any]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, shared: PromptSharing, scale: float | None
    ) -> Tensor:
        kernel = kernel_for(query)

        # Every sequence attends to itself, then all responses attend to their prompts.
        output, log_sum, own_state = kernel.forward(
            query, *_chosen(key, value, shared.own_keys), shared.own, True, scale
        )
        chosen = query.index_select(0, shared.responses)
        prompt_output, prompt_log_sum, prompt_state = kernel.forward(
            chosen, *_chosen(key, value, shared.prompts), shared.over_prompts, False, scale
        )

        # Each result is weighted by its share of the softmax's sum, which follows from the log-sum-exps.
        own_log_sum = log_sum.index_select(0, shared.responses)
        share = torch.sigmoid(prompt_log_sum - own_log_sum)[..., None]  # the prompt's share
        merged = output.index_select(0, shared.responses).float().lerp_(prompt_output.float(), share)
        output.index_copy_(0, shared.responses, merged.to(output.dtype))
        log_sum.index_copy_(0, shared.responses, torch.logaddexp(own_log_sum, prompt_log_sum))

        # With the log-sum-exp of the whole, both backward calls reproduce the weights of one softmax.
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.shared = shared
        ctx.scale = scale
        ctx.states = (own_state, prompt_state)

        return output

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sum = ctx.saved_tensors
        shared = ctx.shared
        kernel = kernel_for(query)
        own_state, prompt_state = ctx.states
        gradient = gradient.contiguous()

        # The gradients of every sequence's attention to itself.
        own = output, log_sum, own_state
        own_keys = _chosen(key, value, shared.own_keys)
        gradients = kernel.backward(gradient, query, *own_keys, own, shared.own, True, ctx.scale)
        if shared.own_keys is not None:
            # Several pieces see the same key.
            summed = (torch.zeros_like(key).index_add_(0, shared.own_keys, share) for share in gradients[1:])
            gradients = gradients[0], *summed

        # The gradients of the responses' attention to their prompts.
        responses = (
            tensor.index_select(0, shared.responses) for tensor in (gradient, query, output, log_sum)
        )
        chosen_gradient, chosen, whole, whole_log_sum = responses
        of_prompts = kernel.backward(
            chosen_gradient,
            chosen,
            *_chosen(key, value, shared.prompts),
            (whole, whole_log_sum, prompt_state),
            shared.over_prompts,
            False,
            ctx.scale,
        )

        # Both calls contribute to responses as queries, and to prompts as keys and values.
        for total, share, tokens in zip(
            gradients, of_prompts, (shared.responses, shared.prompts, shared.prompts), strict=True
        ):
            total.index_add_(0, tokens, share)

        return *gradients, None, None


def _chosen(key: Tensor, value: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the keys and values at the given places; all of them if `at` is None."""
    return (key, value) if at is None else (key.index_select(0, at), value.index_select(0, at))


class VarlenKernel:
    """torch's variable-length flash attention: its own kernels, or those that `flash_attention` activates.

    `varlen_attn` is based on the same operators, but its backward pass supports a single call only. Without a
    window it would also choose cuDNN if there are as many key heads as query heads, whose log-sum-exps have
    another shape. Those of flash attention are (heads, T). Grouped heads need no flag, and the causal mask is
    aligned to the lower right.
    """

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequences: Sequences,
        causal: bool,
        scale: float | None,
        window: int = 0,
    ) -> AttentionResult:
        output, log_sum, state, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            *_bounds(sequences),
            _NO_DROPOUT,
            causal,
            False,  # no mask for debugging
            scale=scale,
            **_window(causal, window),
        )
        return output, log_sum.t().contiguous(), state

    @staticmethod
    def backward(
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        whole: AttentionResult,
        sequences: Sequences,
        causal: bool,
        scale: float | None,
        window: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, log_sum, state = whole
        return torch.ops.aten._flash_attention_backward(
            gradient,
            query,
            key,
            value,
            output,
            log_sum.t().contiguous(),
            *_bounds(sequences),
            _NO_DROPOUT,
            causal,
            state,
            query.new_empty(0),  # the second part of a state that only dropout has
            scale=scale,
            **_window(causal, window),
        )


def _window(causal: bool, window: int) -> dict[str, int]:
    """Return the keys that a query sees to its left and right, -1 for all."""
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0 if causal else -1}


def _bounds(sequences: Sequences) -> tuple[Tensor, Tensor, int, int]:
    return sequences.query_bounds, sequences.key_bounds, max(sequences.queries), max(sequences.keys)


class _OnCPU:
    """torch's flash attention for CPUs, one sequence at a time."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequences: Sequences,
        causal: bool,
        scale: float | None,
        window: int = 0,
    ) -> AttentionResult:
        output = torch.empty_like(query)
        log_sum = query.new_empty(query.shape[:2], dtype=torch.float32)
        parts = (
            output.split(sequences.queries),
            log_sum.split(sequences.queries),
            *_cut(sequences, query, key, value),
        )

        # On CPUs, torch has no attention kernel for sequences of several lengths.
        for mixed, logarithms, *heads in zip(*parts, strict=True):
            mask = _mask(heads[0], len(heads[1]), window) if causal else None
            out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *map(_batch, heads), 0.0, causal and mask is None, attn_mask=mask, scale=scale
            )
            mixed.copy_(out[0].transpose(0, 1))
            logarithms.copy_(sums[0].t())

        return output, log_sum, None

    @staticmethod
    def backward(
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        whole: AttentionResult,
        sequences: Sequences,
        causal: bool,
        scale: float | None,
        window: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        totals = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        of_queries = (tensor.split(sequences.queries) for tensor in (gradient, *whole[:2]))
        parts = (*of_queries, *_cut(sequences, query, key, value), *_cut(sequences, *totals))

        for grad, output, log_sum, *rest in zip(*parts, strict=True):
            mask = _mask(rest[0], len(rest[1]), window) if causal else None
            heads = map(_batch, rest[:3])
            targets = rest[3:]
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _batch(grad),
                *heads,
                _batch(output),
                log_sum.t()[None],
                0.0,
                causal and mask is None,
                attn_mask=mask,
                scale=scale,
            )
            for target, part in zip(targets, found, strict=True):
                target.copy_(part[0].transpose(0, 1))

        return totals


def _mask(query: Tensor, num_keys: int, window: int) -> Tensor | None:
    """Return the summand (1, 1, S, keys) of a causal call aligned to the last key.

    None if the kernel's own mask is sufficient.
    """
    num_queries = len(query)
    if not window and num_keys == num_queries:
        return None

    # The queries are at the last positions of the keys.
    at = torch.arange(num_queries, device=query.device)[:, None] + num_keys - num_queries
    keys = torch.arange(num_keys, device=query.device)
    hidden = keys > at
    if window:
        hidden = hidden | (keys <= at - window)
    return query.new_zeros(num_queries, num_keys).masked_fill_(hidden, float("-inf"))[None, None]


def kernel_for(query: Tensor) -> type[VarlenKernel] | type[_OnCPU]:
    return VarlenKernel if query.device.type == "cuda" else _OnCPU


def _cut(sequences: Sequences, query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, ...]]:
    return [query.split(sequences.queries), key.split(sequences.keys), value.split(sequences.keys)]


def _batch(heads: Tensor) -> Tensor:
    """Rearrange (S, heads, D) to (1, heads, S, D)."""
    return heads.transpose(0, 1)[None]
