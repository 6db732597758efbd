"""Log-probabilities and entropy over a vocabulary sharded by tensor parallelism, in chunks of tokens.

The same pass returns the log-probs of several tokens per position, for distillation (top_tokens.py).

A (tokens, vocabulary) tensor is never created: logits exist for `chunk_tokens` tokens at a time and are
recomputed in the backward pass. Columns that only pad the vocabulary are excluded from the product, so they
cannot affect the softmax.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.engine import top_tokens
from megarl.engine.cpu_kernels import add_product_over_rows, in_main_grad, product, product_in_float32
from megarl.engine.top_tokens import TopGradient, TopK, most_likely, top_log_probs

# The number of logits that a core processes at a time: half a MiB, which stays in its cache together with as
# much derived data.
BLOCK_ELEMENTS = 2**17

# Outputs that cost another pass over the logits, and are only computed on request.
Extra = Literal["entropy", "sum_pi_squared"]
ENTROPY: tuple[Extra] = ("entropy",)


class _Vocabulary(NamedTuple):
    """This rank's vocabulary columns: `size` of them from `first` on. A small vocabulary may leave none."""

    first: int
    size: int
    temperature: float
    chunk_tokens: int
    group: dist.ProcessGroup
    extras: frozenset[Extra]
    in_float32: bool
    top: TopK | None

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return float32 logits (t, size) of hidden (t, H) and weight (>= size, H)."""
        # The rows after the first `size` only pad the vocabulary.
        columns = weight[: self.size]
        logits = product_in_float32(hidden, columns) if self.in_float32 else product(hidden, columns).float()
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return which ids (t, n) this rank holds, bool, and their columns, int64, 0 for the others."""
        here = (ids >= self.first) & (ids < self.first + self.size)
        return here, torch.where(here, ids - self.first, 0).long()


class _Scores(torch.autograd.Function):
    """log softmax(logits)[target], the entropy and the sum of squared probabilities, (T,) each; top tokens.

    Scores that were not requested are 0, and top tokens None.

    d log p_y / d z_i = 1[i = y] - p_i;   d H / d z_i = -p_i (log p_i + H).
    The log partition function is saved, so the backward pass needs no collective.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        top_ids: Tensor | None,
        vocabulary: _Vocabulary,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        # The gradient of an unused score stays None, so that the backward pass can skip it.
        ctx.set_materialize_grads(False)
        chunks = []

        # Logits exist for one chunk of tokens at a time.
        chunk_tokens = vocabulary.chunk_tokens
        for number, part in enumerate(hidden.split(chunk_tokens)):
            tokens = slice(number * chunk_tokens, (number + 1) * chunk_tokens)
            logits = vocabulary.logits(part, weight)
            chunks.append(
                _score(logits, targets[tokens], None if top_ids is None else top_ids[tokens], vocabulary)
            )

        scores, ids, top = (
            None if each[0] is None else torch.cat(each, dim=dim)
            for each, dim in zip(zip(*chunks, strict=True), (1, 0, 0), strict=True)
        )
        assert scores is not None
        log_probs, entropy, sum_pi_squared, log_partition = scores

        # The backward pass begins with the last chunk and needs as much memory then. The logits of this chunk
        # are therefore saved and overwritten instead of being recomputed.
        # pyrefly: ignore[unbound-name]  # there is at least one chunk
        ctx.save_for_backward(hidden, weight, targets, entropy, log_partition, ids, top, logits)
        ctx.vocabulary = vocabulary
        ctx.mark_non_differentiable(sum_pi_squared, *([] if ids is None else [ids]))

        return log_probs, entropy, sum_pi_squared, ids, top

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(
        ctx: Any,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        of_sum: Tensor | None,
        of_ids: Tensor | None,
        grad_top: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if grad_log_probs is None and grad_entropy is None and grad_top is None:
            return None, None, None, None, None
        hidden, weight, targets, entropy, log_partition, top_ids, top, last_logits = ctx.saved_tensors
        vocabulary: _Vocabulary = ctx.vocabulary

        # The temperature divides the logits, so it divides their gradient too.
        grad_log_probs, grad_entropy, grad_top = (
            None if gradient is None else gradient / vocabulary.temperature
            for gradient in (grad_log_probs, grad_entropy, grad_top)
        )
        grad_hidden = torch.empty_like(hidden)

        # Sum the chunks in float32, directly in Megatron's buffer if the weight has one. Frozen weights have
        # no gradient.
        buffer: Tensor | None = getattr(weight, "main_grad", None)  # set by Megatron on trained weights
        grad_weight: Tensor | None = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if buffer is None else buffer
        starts = range(0, hidden.shape[0], vocabulary.chunk_tokens)

        # In reverse, because the logits of the last chunk are saved from the forward pass.
        for start in reversed(starts):
            part = slice(start, start + vocabulary.chunk_tokens)
            logits = last_logits if start == starts[-1] else vocabulary.logits(hidden[part], weight)
            _replace_by_gradient(
                logits,
                vocabulary.find(targets[part, None]),
                log_partition[part],
                entropy[part],
                None if grad_log_probs is None else grad_log_probs[part],
                None if grad_entropy is None else grad_entropy[part],
                None if grad_top is None else (*vocabulary.find(top_ids[part]), top[part], grad_top[part]),
            )
            gradient = logits.to(hidden.dtype)
            grad_hidden[part] = product(gradient, weight[: vocabulary.size].t())
            if grad_weight is not None:
                add_product_over_rows(grad_weight[: vocabulary.size], gradient, hidden[part])

        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype) if buffer is None else in_main_grad(weight)
        return grad_hidden, grad_weight, None, None, None


def _score(
    logits: Tensor, targets: Tensor, top_ids: Tensor | None, vocabulary: _Vocabulary
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Score one chunk over the vocabulary columns of all ranks.

    Args:
        logits: (t, V / tp).
        targets: (t,) global token ids.
        top_ids: (t, k) global token ids. None: the most likely ones, if they are requested.
        vocabulary: This rank's columns.

    Returns:
        (4, t): log-probs, entropy, sum of squared probabilities, and log partition function. The top tokens
        (t, k), and the result of `top_log_probs` for them (t, k + 1), if there are any.
    """
    parallel = vocabulary.group.size() > 1

    # Subtracting the maximum over all ranks' columns keeps the exponentials finite.
    maximum = logits.amax(1) if vocabulary.size else logits.new_full((logits.shape[0],), float("-inf"))
    if parallel:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=vocabulary.group)

    # Only the rank that holds a target contributes its logit to the sum over ranks.
    here, column = vocabulary.find(targets[:, None])
    target = (
        torch.where(here, logits.gather(1, column), maximum[:, None])[:, 0] - maximum
        if vocabulary.size
        else torch.zeros_like(maximum)
    )
    of_columns = torch.cat(
        [_sums(logits[block], maximum[block], vocabulary.extras) for block in _blocks(logits)], dim=1
    )

    # All sums share one collective.
    sums = torch.cat([of_columns, target[None]])
    if parallel:
        dist.all_reduce(sums, group=vocabulary.group)

    # H = log Z - sum(z exp(z)) / Z, where z is a logit minus the maximum.
    partition, weighted, squares, target = sums
    log_partition = partition.log()
    entropy = log_partition - weighted / partition if "entropy" in vocabulary.extras else weighted

    whole_partition = log_partition + maximum
    scores = torch.stack([target - log_partition, entropy, squares / partition.square(), whole_partition])

    # Other tokens than the target, which a teacher chooses.
    if top_ids is None and vocabulary.top is not None:
        top_ids = most_likely(logits, vocabulary.top, vocabulary.first, vocabulary.group)
    if top_ids is None:
        return scores, None, None
    top = top_log_probs(logits, *vocabulary.find(top_ids), whole_partition, vocabulary.group, _blocks(logits))
    return scores, top_ids, top


def _blocks(logits: Tensor) -> list[slice]:
    """Return row blocks of logits (t, v). On a CPU, a block and its derived data fit in a core's cache."""
    num_rows, columns = logits.shape
    together = BLOCK_ELEMENTS // max(1, columns) if logits.device.type == "cpu" else num_rows
    return [slice(start, start + max(1, together)) for start in range(0, max(1, num_rows), max(1, together))]


def _sums(logits: Tensor, maximum: Tensor, extras: Collection[Extra]) -> Tensor:
    """Return (3, t): for z = logits - maximum, the sums over columns of exp(z), z exp(z) and exp(2 z).

    Sums that were not requested are 0.
    """
    shifted = logits - maximum[:, None]

    # In place if the operand is not needed again, because logits dominate the memory.
    exponentials = shifted.exp() if "entropy" in extras else shifted.exp_()
    not_asked_for = torch.zeros_like(maximum)
    weighted = shifted.mul_(exponentials).sum(1) if "entropy" in extras else not_asked_for
    partition = exponentials.sum(1)
    squares = exponentials.square_().sum(1) if "sum_pi_squared" in extras else not_asked_for

    return torch.stack([partition, weighted, squares])


def _replace_by_gradient(
    logits: Tensor,
    target: tuple[Tensor, Tensor],
    log_partition: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    top: TopGradient | None,
) -> None:
    """Replace logits (t, V / tp) by their gradient, given values per token (t,)."""
    if top is not None:
        top_tokens.replace_by_gradient(
            logits, top, log_partition, entropy, grad_log_probs, grad_entropy, _blocks(logits)
        )
    else:
        _replace_by_common_gradient(logits, log_partition, entropy, grad_log_probs, grad_entropy)

    # Add the term 1[i = y] of the log-prob's gradient, on the rank that holds the target.
    here, column = target
    if grad_log_probs is not None and logits.shape[1]:
        logits.scatter_add_(1, column, torch.where(here, grad_log_probs[:, None], 0.0))


def _replace_by_common_gradient(
    logits: Tensor,
    log_partition: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    """Replace logits by the part of their gradient that is the same expression for every column."""
    for block in _blocks(logits):
        log_softmax = logits[block].sub_(log_partition[block, None])
        if grad_entropy is None:
            assert grad_log_probs is not None
            log_softmax.exp_().mul_(-grad_log_probs[block, None])
        else:
            # -p_i (g_H (log p_i + H) + g_logp), computed in the memory of the logits.
            probabilities = log_softmax.exp()
            factor = log_softmax.add_(entropy[block, None]).mul_(-grad_entropy[block, None])
            if grad_log_probs is not None:
                factor.sub_(grad_log_probs[block, None])
            factor.mul_(probabilities)


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    group: dist.ProcessGroup,
    extras: Collection[Extra] = ENTROPY,
    in_float32: bool = False,
    top: TopK | Tensor | None = None,
) -> dict[str, Tensor]:
    """Score `targets` under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: (T, H), equal on every rank of `group`. Its gradient is this rank's part of the sum over the
            group.
        weight: (padded V / tp, H), this rank's rows.
        targets: (T,) int64, global token ids.
        vocab_size: V, without padding.
        temperature: Divides the logits.
        chunk_tokens: The number of tokens whose logits exist at a time.
        group: The tensor-parallel group.
        extras: The scores to compute in addition to log-probs.
        in_float32: Whether logits of 16-bit weights are not rounded to 16 bits.
        top: The tokens at each position that are scored too: ids (T, k) int32, or how many of the most likely
            ones.

    Returns:
        The scores that were requested, (T,) float32 each: `log_probs`; `entropy`, in nats; `sum_pi_squared`,
        the sums over the vocabulary of the squared probabilities, which have no gradient. With top tokens,
        `top_ids` (T, k) int32, k tokens of the vocabulary at each position, and `top_log_probs` (T, k + 1),
        the log-probs of these tokens and, last, of all other tokens together.
    """
    # The rows that only pad the vocabulary are at its end, and are excluded from the product.
    first = group.rank() * weight.shape[0]
    size = max(0, min(weight.shape[0], vocab_size - first))
    is_request = isinstance(top, TopK)
    vocabulary = _Vocabulary(
        first,
        size,
        temperature,
        chunk_tokens,
        group,
        frozenset(extras),
        in_float32,
        top if is_request else None,
    )

    log_probs, entropy, sum_pi_squared, ids, of_top = _Scores.apply(
        hidden, weight, targets, None if is_request else top, vocabulary
    )

    return {
        "log_probs": log_probs,
        **({"entropy": entropy} if "entropy" in vocabulary.extras else {}),
        **({"sum_pi_squared": sum_pi_squared} if "sum_pi_squared" in vocabulary.extras else {}),
        **({} if ids is None else {"top_ids": ids, "top_log_probs": of_top}),
    }
