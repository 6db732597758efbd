"""Log-probabilities and entropy over a vocabulary that is cut across tensor-parallel ranks, in chunks of tokens.

A (tokens, vocabulary) tensor is never made: logits exist for `chunk_tokens` tokens at a time and are computed again in
the backward pass. Columns that only pad the vocabulary are left out before the product, so they cannot reach the softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class TokenScores(NamedTuple):
    log_probs: Tensor  # (T,) float32
    entropy: Tensor  # (T,) float32, nats


class _VocabParallelScores(torch.autograd.Function):
    """log softmax(logits)[target] and the entropy, from logits (T, V / tp) of this rank.

    d log p_y / d z_i = 1[i = y] - p_i;   d H / d z_i = -p_i (log p_i + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first_column: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        tokens, columns = logits.shape
        parallel = group.size() > 1
        # A rank can hold nothing but padding, when the vocabulary is small.
        maximum = logits.amax(-1) if columns else logits.new_full((tokens,), float("-inf"))
        if parallel:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        logits = logits - maximum[:, None]
        here = (targets >= first_column) & (targets < first_column + columns)
        column = torch.where(here, targets - first_column, 0)
        target = torch.where(here, logits.gather(1, column[:, None])[:, 0], 0.0) if columns else logits.new_zeros(tokens)
        exponentials = logits.exp()
        sums = torch.stack([exponentials.sum(-1), (exponentials * logits).sum(-1), target])
        if parallel:
            dist.all_reduce(sums, group=group)
        partition, weighted, target = sums
        log_partition = partition.log()
        log_probs = target - log_partition
        entropy = log_partition - weighted / partition
        ctx.save_for_backward(exponentials.div_(partition[:, None]), entropy, here, column)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        probabilities, entropy, here, column = ctx.saved_tensors
        gradient = None
        if grad_log_probs is not None:
            gradient = probabilities * -grad_log_probs[:, None]
            if gradient.shape[1]:
                gradient.scatter_add_(1, column[:, None], torch.where(here, grad_log_probs, 0.0)[:, None])
        if grad_entropy is not None:
            logs = probabilities.clamp_min(torch.finfo(torch.float32).tiny).log()
            from_entropy = -grad_entropy[:, None] * probabilities * (logs + entropy[:, None])
            gradient = from_entropy if gradient is None else gradient + from_entropy
        return gradient, None, None, None


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    group: dist.ProcessGroup,
) -> TokenScores:
    """Scores of `targets` under softmax(hidden @ weight.T / temperature).

    hidden: (T, H), the same on every rank of `group`, whose gradient is this rank's part of the sum over the group.
    weight: (padded V / tp, H), this rank's rows. targets: (T,) int64, global token ids.
    """
    first_column = group.rank() * weight.shape[0]
    weight = weight[: max(0, min(weight.shape[0], vocab_size - first_column))]

    def scores(part: Tensor, part_targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(part, weight).float()
        if temperature != 1.0:
            logits = logits / temperature
        return _VocabParallelScores.apply(logits, part_targets, first_column, group)

    chunks = list(zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True))
    if len(chunks) == 1 or not torch.is_grad_enabled():
        results = [scores(*chunk) for chunk in chunks]
    else:
        results = [checkpoint(scores, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return TokenScores(torch.cat([log_probs for log_probs, _ in results]), torch.cat([entropy for _, entropy in results]))
