"""One token per row from a row of logits, with its log-prob as the contract of `Sample` has it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megarl.rollout.hf.noise import gumbel_noise
from megarl.rollout.interface import SamplingParameters


class SampledTokens(NamedTuple):
    token_ids: torch.Tensor  # (B,) int64
    log_probs: torch.Tensor  # (B,) float32


def sample_tokens(
    logits: torch.Tensor, sampling: SamplingParameters, keys: torch.Tensor, step: int, forbidden: torch.Tensor
) -> SampledTokens:
    """Token `step` of each row; the seed of `sampling` is not used.

    logits: (B, V) in any float type; memory for a few float32 copies of it is used. keys: (B,) of noise.row_keys.
    forbidden: (F,) token ids that are not drawn.
    """
    logits = logits.float()
    if sampling.temperature != 0:
        logits = logits / sampling.temperature
    allowed = logits.index_fill(-1, forbidden, -torch.inf) if len(forbidden) else logits
    if sampling.temperature != 0:
        allowed = _truncate(allowed, sampling) + gumbel_noise(keys, step, logits.shape[-1])
    token_ids = allowed.argmax(dim=-1)
    chosen = logits.gather(-1, token_ids[:, None]).squeeze(-1)
    return SampledTokens(token_ids, chosen - logits.logsumexp(dim=-1))


def _truncate(logits: torch.Tensor, sampling: SamplingParameters) -> torch.Tensor:
    """Tokens that top-k, and then top-p, leave out become -inf; ties are broken by the sort, so exactly k stay."""
    top_k = min(sampling.top_k, logits.shape[-1]) if sampling.top_k != -1 else logits.shape[-1]
    if top_k == logits.shape[-1] and sampling.top_p == 1:
        return logits
    values, token_ids = logits.topk(top_k, dim=-1)  # sorted, the most probable first
    if sampling.top_p < 1:
        probs = values.softmax(dim=-1)
        reached_before = probs.cumsum(dim=-1) - probs  # the first token always stays
        values = values.masked_fill(reached_before >= sampling.top_p, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(-1, token_ids, values)
