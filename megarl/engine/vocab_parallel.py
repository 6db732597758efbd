"""Log-probabilities and entropy over a vocabulary that is cut across tensor-parallel ranks, in chunks of tokens.

A (tokens, vocabulary) tensor is never made: logits exist for `chunk_tokens` tokens at a time and are computed again in
the backward pass. Columns that only pad the vocabulary are left out before the product, so they cannot reach the softmax.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.engine.cpu_kernels import product

Extra = Literal["entropy", "sum_pi_squared"]  # what costs another pass over the logits, and is only computed where it is asked for


class TokenScores(NamedTuple):
    """(T,) float32 each; None where it was not asked for."""

    log_probs: Tensor
    entropy: Tensor | None  # nats
    sum_pi_squared: Tensor | None  # sum over the vocabulary of the squared probabilities; has no gradient


class _Vocabulary(NamedTuple):
    """This rank's columns: `size` of them from `first` on. It can hold none, when the vocabulary is small."""

    first: int
    size: int
    temperature: float
    chunk_tokens: int
    group: dist.ProcessGroup
    extras: frozenset[Extra]

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """(t, H), (>= size, H) -> (t, size) float32."""
        logits = product(hidden, weight[: self.size]).float()
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def find(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(t,) bool, which targets this rank holds, and (t, 1) their columns, 0 for the others."""
        here = (targets >= self.first) & (targets < self.first + self.size)
        return here, torch.where(here, targets - self.first, 0)[:, None]


class _Scores(torch.autograd.Function):
    """log softmax(logits)[target], the entropy and the sum of squared probabilities, (T,) each; 0 for what is not asked for.

    d log p_y / d z_i = 1[i = y] - p_i;   d H / d z_i = -p_i (log p_i + H).
    With the log of the partition function kept, the backward pass needs no collective.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: _Vocabulary) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        scores = []
        for part, part_targets in zip(hidden.split(vocabulary.chunk_tokens), targets.split(vocabulary.chunk_tokens), strict=True):
            logits = vocabulary.logits(part, weight)
            scores.append(_score(logits, part_targets, vocabulary))
        log_probs, entropy, sum_pi_squared, log_partition = torch.cat(scores, dim=1)
        # The backward pass begins with the last chunk and needs as much memory then: its logits are not made twice.
        ctx.save_for_backward(hidden, weight, targets, entropy, log_partition, logits)
        ctx.vocabulary = vocabulary
        ctx.mark_non_differentiable(sum_pi_squared)
        return log_probs, entropy, sum_pi_squared

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None
        hidden, weight, targets, entropy, log_partition, last_logits = ctx.saved_tensors
        vocabulary: _Vocabulary = ctx.vocabulary
        grad_log_probs, grad_entropy = (
            None if gradient is None else gradient / vocabulary.temperature for gradient in (grad_log_probs, grad_entropy)
        )
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        starts = range(0, hidden.shape[0], vocabulary.chunk_tokens)
        for start in reversed(starts):
            part = slice(start, start + vocabulary.chunk_tokens)
            logits = last_logits if start == starts[-1] else vocabulary.logits(hidden[part], weight)
            gradient = _logits_gradient(
                logits - log_partition[part, None],
                vocabulary.find(targets[part]),
                entropy[part],
                None if grad_log_probs is None else grad_log_probs[part],
                None if grad_entropy is None else grad_entropy[part],
            ).to(hidden.dtype)
            grad_hidden[part] = product(gradient, weight[: vocabulary.size].t())
            # Added up as it is, the part is never in memory in float32, nor beside the one before it.
            grad_weight[: vocabulary.size].add_(product(gradient.t(), hidden[part].t()))
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _score(logits: Tensor, targets: Tensor, vocabulary: _Vocabulary) -> Tensor:
    """(4, t): log-probs, entropy, sum of squared probabilities and log of the partition function, over all ranks' columns of
    `logits` (t, V / tp)."""
    parallel = vocabulary.group.size() > 1
    maximum = logits.amax(1) if vocabulary.size else logits.new_full((logits.shape[0],), float("-inf"))
    if parallel:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=vocabulary.group)
    here, column = vocabulary.find(targets)
    target = torch.where(here, logits.gather(1, column)[:, 0] - maximum, 0.0) if vocabulary.size else torch.zeros_like(maximum)
    shifted = logits - maximum[:, None]
    exponentials = shifted.exp() if "entropy" in vocabulary.extras else shifted.exp_()
    not_asked_for = torch.zeros_like(maximum)
    weighted = shifted.mul_(exponentials).sum(1) if "entropy" in vocabulary.extras else not_asked_for
    squares = exponentials.square().sum(1) if "sum_pi_squared" in vocabulary.extras else not_asked_for
    sums = torch.stack([exponentials.sum(1), target, weighted, squares])
    if parallel:
        dist.all_reduce(sums, group=vocabulary.group)
    partition, target, weighted, squares = sums
    log_partition = partition.log()
    entropy = log_partition - weighted / partition if "entropy" in vocabulary.extras else not_asked_for
    return torch.stack([target - log_partition, entropy, squares / partition.square(), log_partition + maximum])


def _logits_gradient(
    log_softmax: Tensor, target: tuple[Tensor, Tensor], entropy: Tensor, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """(t, V / tp) of those log-probs, which are overwritten, from what is known per token (t,)."""
    probabilities = log_softmax.exp()
    if grad_entropy is None:
        assert grad_log_probs is not None
        gradient = probabilities.mul_(-grad_log_probs[:, None])
    else:
        factor = log_softmax.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_log_probs is not None:
            factor.sub_(grad_log_probs[:, None])
        gradient = factor.mul_(probabilities)
    here, column = target
    if grad_log_probs is not None and gradient.shape[1]:
        gradient.scatter_add_(1, column, torch.where(here, grad_log_probs, 0.0)[:, None])
    return gradient


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    group: dist.ProcessGroup,
    extras: Collection[Extra] = ("entropy",),
) -> TokenScores:
    """Scores of `targets` under softmax(hidden @ weight.T / temperature); `extras`: those that are asked for beside the log-probs.

    hidden: (T, H), the same on every rank of `group`, whose gradient is this rank's part of the sum over the group.
    weight: (padded V / tp, H), this rank's rows. targets: (T,) int64, global token ids.
    """
    first = group.rank() * weight.shape[0]
    size = max(0, min(weight.shape[0], vocab_size - first))
    vocabulary = _Vocabulary(first, size, temperature, chunk_tokens, group, frozenset(extras))
    log_probs, entropy, sum_pi_squared = _Scores.apply(hidden, weight, targets, vocabulary)
    return TokenScores(
        log_probs, entropy if "entropy" in vocabulary.extras else None, sum_pi_squared if "sum_pi_squared" in vocabulary.extras else None
    )
