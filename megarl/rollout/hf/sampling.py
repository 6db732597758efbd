"""One token per row from a row of logits, with its log-prob as the contract of `Sample` has it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megarl.rollout.interface import SamplingParameters


class SampledTokens(NamedTuple):
    token_ids: torch.Tensor  # (B,) int64
    log_probs: torch.Tensor  # (B,) float32


def sample_tokens(logits: torch.Tensor, sampling: SamplingParameters, generator: torch.Generator) -> SampledTokens:
    """logits: (B, V) in any float type; memory for a few float32 copies of it is used."""
    logits = logits.float()
    if sampling.temperature == 0:
        token_ids = logits.argmax(dim=-1)
    else:
        logits = logits / sampling.temperature
        token_ids = torch.multinomial(_truncate(logits, sampling).softmax(dim=-1), 1, generator=generator).squeeze(-1)
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
