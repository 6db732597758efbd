"""Log-probs of k tokens at each position and of all others together, over a tensor-parallel vocabulary.

The functions work on the logits of a chunk of tokens. Shapes: t tokens, v columns of this rank, k tokens of
the vocabulary for each position. `here` (t, k) bool is True for those of the k tokens that this rank holds,
and `column` (t, k) is their column, 0 for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Added to a logit to exclude it from a softmax. Finite, because 0 times it must be 0.
_EXCLUDED = -1e6


class TopK(NamedTuple):
    """The request for the `k` most likely tokens at each position, among the ids below `vocab_size`."""

    k: int
    vocab_size: int


def most_likely(logits: Tensor, top: TopK, first: int, group: dist.ProcessGroup) -> Tensor:
    """Return the ids (t, k) int32 of the tokens with the largest logits over all ranks, in descending order.

    Args:
        logits: (t, v).
        top: The request. `vocab_size` is at least `k`.
        first: The id of this rank's first column.
        group: The tensor-parallel group.
    """
    # Ranks of a small vocabulary may hold fewer than k tokens, or none.
    num_columns = max(0, min(logits.shape[1], top.vocab_size - first))
    num_found = min(top.k, num_columns)
    shape = (logits.shape[0], top.k)
    values = logits.new_full(shape, float("-inf"))
    ids = torch.zeros(shape, dtype=torch.int32, device=logits.device)
    if num_found:
        values[:, :num_found], columns = logits[:, :num_columns].topk(num_found, dim=1)
        ids[:, :num_found] = columns.int() + first
    if group.size() == 1:
        return ids

    # Logits and ids share one collective: float32 represents ids below 2**24 exactly.
    assert top.vocab_size <= 2**24
    own = torch.cat([values, ids.to(values.dtype)], dim=1)
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    values, numbers = torch.cat([part.view(-1, 2, top.k) for part in parts], dim=2).unbind(1)
    return numbers.gather(1, values.topk(top.k, dim=1).indices).int()


def top_log_probs(
    logits: Tensor,
    here: Tensor,
    column: Tensor,
    log_partition: Tensor,
    group: dist.ProcessGroup,
    blocks: Sequence[slice],
) -> Tensor:
    """Return the log-probs of the k tokens and, last, of all other tokens together, (t, k + 1).

    The last one is summed over the other tokens: 1 minus the sum over the k tokens would have no correct
    digit where they have nearly all the mass. It is -inf if there are no others. The logits are unchanged
    when this returns.

    Args:
        logits: (t, v) float32.
        here: (t, k).
        column: (t, k).
        log_partition: (t,), the logarithm of the sum of the exponentials of all logits.
        group: The tensor-parallel group.
        blocks: The rows that are processed at a time.
    """
    parallel = group.size() > 1
    values = torch.zeros(column.shape, dtype=logits.dtype, device=logits.device)
    maximum = logits.new_full((logits.shape[0],), float("-inf"))

    # Exclude the k tokens. Tokens of other ranks change nothing in column 0.
    if logits.shape[1]:
        values = logits.gather(1, column)
        logits.scatter_add_(1, column, torch.where(here, float("-inf"), 0.0))
        maximum = logits.amax(1)
    if parallel:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    # Without other tokens, the maximum is -inf, and the difference of two infinities is NaN.
    maximum = torch.where(maximum.isinf(), 0.0, maximum)
    others = torch.cat([(logits[block] - maximum[block, None]).exp_().sum(1) for block in blocks])
    # The excluded logits are -inf, so a maximum restores them.
    if logits.shape[1]:
        logits.scatter_reduce_(1, column, torch.where(here, values, float("-inf")), "amax")

    sums = torch.cat([torch.where(here, values, 0.0), others[:, None]], dim=1)
    if parallel:
        dist.all_reduce(sums, group=group)
    sums[:, -1].log_().add_(maximum)
    return sums.sub_(log_partition[:, None])


# What the logits' gradient follows from: `here` and `column`, both (t, k); the result of `top_log_probs`, and
# the gradient with respect to it, both (t, k + 1).
TopGradient = tuple[Tensor, Tensor, Tensor, Tensor]


def replace_by_gradient(
    logits: Tensor,
    top: TopGradient,
    log_partition: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    blocks: Sequence[slice],
) -> None:
    """Replace logits (t, v) by their gradient, without the term 1[i = y] g_logp of a target y's log-prob.

    With probabilities q_i, the probability r of all other tokens together, and gradients g_i, g_r, g_logp (of
    the target's log-prob) and g_H (of the entropy H), where G is the sum of all g_i and g_r:

    - for one of the k tokens: g_i - q_i (G + g_logp + g_H (log q_i + H));
    - for another token: w_i (g_r - r (G + g_logp + g_H (log q_i + H))), where w_i = q_i / r.

    The other tokens have a softmax w of their own, so that nothing cancels where r is small.
    """
    here, column, of_top, gradient = top
    tail = of_top[:, -1]
    of_others = tail.exp()
    tail = torch.where(tail.isinf(), 0.0, tail)
    common = gradient.sum(1)
    if grad_log_probs is not None:
        common = common + grad_log_probs
    base = gradient[:, -1] - of_others * common

    # All other tokens: the k tokens are excluded, so that w is 0 there.
    if logits.shape[1]:
        logits.scatter_add_(1, column, torch.where(here, _EXCLUDED, 0.0))
    for block in blocks:
        log_shares = logits[block].sub_((log_partition + tail)[block, None])
        if grad_entropy is None:
            log_shares.exp_().mul_(base[block, None])
        else:
            shares = log_shares.exp()
            factor = log_shares.add_((tail + entropy)[block, None])
            factor.mul_((-of_others * grad_entropy)[block, None]).add_(base[block, None]).mul_(shares)

    # The k tokens, on the ranks that hold them.
    log_probs = of_top[:, :-1]
    weight = common[:, None]
    if grad_entropy is not None:
        weight = weight + grad_entropy[:, None] * (log_probs + entropy[:, None])
    own = gradient[:, :-1] - log_probs.exp() * weight
    if logits.shape[1]:
        logits.scatter_add_(1, column, torch.where(here, own, 0.0))
