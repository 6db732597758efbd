"""The decoding loop over a transformers model: one prefill of left-padded prompts, then one token per step
for every row.

transformers' own `generate` spends more time per token on its bookkeeping than a small model spends on its
forward pass, and keeps all steps' logits to return log-probs; this loop keeps one step's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from megarl.rollout.hf.attention import KVCache, SharedPrompts
from megarl.rollout.interface import SamplingParameters


class Decoded(NamedTuple):
    token_ids: torch.Tensor  # (B, N) int64, N steps were made
    log_probs: torch.Tensor  # (B, N) float32
    lengths: torch.Tensor  # (B,) int64: what lies beyond is no part of the sample
    stopped: torch.Tensor  # (B,) bool: the last token is a stop token


class _Rows(NamedTuple):
    """The rows that are still computed, (A,) of the B; `positions` (A,) of the next token; what they have
    read and written."""

    indices: torch.Tensor
    positions: torch.Tensor
    prompts: SharedPrompts
    written: KVCache


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: list[list[int]],
    sampling: SamplingParameters,
    stop_token_ids: torch.Tensor,
    seeds: Sequence[int],
    is_ended: Callable[[list[int]], bool] | None = None,
) -> Decoded:
    """One sample of each prompt, equal prompts being prefilled once; `seeds`, one per prompt, stand for the
    seed of `sampling`. Where `is_ended` is true of a sample's tokens, it stops there as at a stop token.

    Rows that have ended leave the batch as soon as they are half of it.
    """
    batch_size = len(prompts)
    sampled_ids = torch.zeros(batch_size, sampling.max_new_tokens, dtype=torch.int64, device=model.device)
    log_probs = torch.zeros(batch_size, sampling.max_new_tokens, device=model.device)
    lengths = torch.full((batch_size,), sampling.max_new_tokens, device=model.device)
    stopped = torch.zeros(batch_size, dtype=torch.bool, device=model.device)
    keys = row_keys(seeds, model.device)

    logits, rows = _prefill(model, prompts)

    for step in range(sampling.max_new_tokens):
        if step > 0:
            logits = _step(model, sampled_ids[rows.indices, step - 1], rows)
            rows = rows._replace(positions=rows.positions + 1)
        # End tokens are forbidden until the sample has its minimum length.
        forbidden = stop_token_ids[: 0 if step >= sampling.min_new_tokens else None]
        sampled = sample_tokens(logits, sampling, keys[rows.indices], step, forbidden)
        sampled_ids[rows.indices, step], log_probs[rows.indices, step] = sampled
        ends = torch.isin(sampled.token_ids, stop_token_ids)
        if is_ended is not None:
            written = sampled_ids[rows.indices, : step + 1].tolist()
            ends |= torch.tensor([is_ended(token_ids) for token_ids in written], device=model.device)
        # A row that has ended may still be computed along; only its first end counts.
        ends &= ~stopped[rows.indices]
        lengths[rows.indices[ends]] = step + 1
        stopped[rows.indices[ends]] = True
        rows = _drop_ended(rows, stopped)
        if not len(rows.indices):
            break

    return Decoded(sampled_ids[:, : step + 1], log_probs[:, : step + 1], lengths, stopped)


def _prefill(model: PreTrainedModel, prompts: list[list[int]]) -> tuple[torch.Tensor, _Rows]:
    """Logits (B, V) of each prompt's last token, and the rows, which have written nothing."""
    distinct = {prompt: index for index, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    token_ids, mask = _left_pad([list(prompt) for prompt in distinct], model.device)
    # Positions count real tokens only, so that padding does not shift them.
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    cache = KVCache()
    output = model(
        input_ids=token_ids,
        attention_mask=mask.long(),
        position_ids=positions,
        use_cache=False,  # transformers' own
        kv_cache=cache,
        logits_to_keep=1,
    )
    # Spread the results of the distinct prompts over the rows that share them.
    owners = [distinct[tuple(prompt)] for prompt in prompts]
    chosen = torch.tensor(owners, device=model.device)
    shared = SharedPrompts.of(cache, mask, owners)

    return output.logits[chosen, -1], _Rows(
        torch.arange(len(prompts), device=model.device), mask.sum(-1)[chosen], shared, KVCache()
    )


def _step(model: PreTrainedModel, token_ids: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Logits (A, V) after one more token of each row; token_ids: (A,)."""
    output = model(
        input_ids=token_ids[:, None],
        # of four dimensions it is taken as it is: transformers would build another at every step
        attention_mask=rows.prompts.bias,
        position_ids=rows.positions[:, None],
        use_cache=False,  # transformers' own
        kv_cache=rows.written,
        prompts=rows.prompts,
    )
    return output.logits[:, -1]


def _drop_ended(rows: _Rows, stopped: torch.Tensor) -> _Rows:
    """Copying what was written costs about what a step does, so it is done when it halves the steps to
    come."""
    alive = (~stopped[rows.indices]).nonzero().squeeze(-1)
    if 2 * len(alive) > len(rows.indices):
        return rows
    if not len(alive):
        return rows._replace(indices=alive)
    rows.written.select(alive)

    return _Rows(rows.indices[alive], rows.positions[alive], rows.prompts.select(alive), rows.written)


def _left_pad(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, P) token ids, 0 at the padding, and (B, P) bool, False there."""
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return token_ids, torch.arange(width, device=device) >= width - lengths[:, None]


# ---- one token per row from a row of logits, with its log-prob as the contract of `Sample` has it


class SampledTokens(NamedTuple):
    token_ids: torch.Tensor  # (B,) int64
    log_probs: torch.Tensor  # (B,) float32


def sample_tokens(
    logits: torch.Tensor, sampling: SamplingParameters, keys: torch.Tensor, step: int, forbidden: torch.Tensor
) -> SampledTokens:
    """Token `step` of each row; the seed of `sampling` is not used.

    logits: (B, V) in any float type; memory for a few float32 copies of it is used. keys: (B,) of row_keys.
    forbidden: (F,) token ids that are not drawn.
    """
    logits = logits.float()
    if sampling.temperature != 0:
        logits = logits / sampling.temperature
    # The draw sees restricted logits; the log-prob is over the whole vocabulary.
    allowed = logits.index_fill(-1, forbidden, -torch.inf) if len(forbidden) else logits
    if sampling.temperature != 0:
        allowed = _truncate(allowed, sampling) + gumbel_noise(keys, step, logits.shape[-1])
    token_ids = allowed.argmax(dim=-1)
    chosen = logits.gather(-1, token_ids[:, None]).squeeze(-1)

    return SampledTokens(token_ids, chosen - logits.logsumexp(dim=-1))


def _truncate(logits: torch.Tensor, sampling: SamplingParameters) -> torch.Tensor:
    """Tokens that top-k, and then top-p, leave out become -inf; ties are broken by the sort, so exactly k
    stay."""
    top_k = min(sampling.top_k, logits.shape[-1]) if sampling.top_k != -1 else logits.shape[-1]
    if top_k == logits.shape[-1] and sampling.top_p == 1:
        return logits
    values, token_ids = logits.topk(top_k, dim=-1)  # sorted, the most probable first

    if sampling.top_p < 1:
        probs = values.softmax(dim=-1)
        reached_before = probs.cumsum(dim=-1) - probs  # the first token always stays
        values = values.masked_fill(reached_before >= sampling.top_p, -torch.inf)

    # Put the remaining logits back at the places of their tokens.
    return torch.full_like(logits, -torch.inf).scatter(-1, token_ids, values)


# ---- random numbers by position instead of by turn
#
# A token's noise follows from (seed, step, token id) and nothing else.
# A generator with a state would hand a row other numbers when the batch around it changes. This hash has no
# state, so that a sample can be written again, alone or beside others, and comes out the same.

# SplitMix64 (Steele, Lea, Flood 2014): the increment and the two multipliers, as signed 64-bit numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_SHIFTS = (30, 27, 31)
_BITS = 53  # of a hash that are used


def row_keys(seeds: Sequence[int], device: torch.device) -> torch.Tensor:
    """(B,) int64, one per row; `seeds` are any integers, of which the lowest 63 bits count."""
    return _mix(torch.tensor([seed % 2**63 for seed in seeds], dtype=torch.int64, device=device) + _INCREMENT)


def gumbel_noise(keys: torch.Tensor, step: int, vocab_size: int) -> torch.Tensor:
    """(B, V) float32, Gumbel(0, 1): the argmax of log-probs plus this noise is a draw from the distribution.

    keys: (B,) int64 of `row_keys`. step: how many tokens of the sample were drawn before.
    """
    # Hash in two stages: seed and step give a key, key and token id give the noise.
    keys = _mix(keys + step)
    counters = torch.arange(1, vocab_size + 1, device=keys.device) * _INCREMENT
    bits = _mix(keys[:, None] + counters)
    # Take the highest bits; the mask removes the copies of the sign that the shift brings in.
    bits = bits.bitwise_right_shift_(64 - _BITS).bitwise_and_(2**_BITS - 1)

    # In (0, 1], and exact near 0, where the largest noise comes from; a float32 near 1 has no room for that.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-_BITS)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(state: torch.Tensor) -> torch.Tensor:
    """Every bit of the result depends on every bit of `state`, which is overwritten."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        # The shift keeps the sign; the mask takes its copies away.
        state.bitwise_xor_((state >> shift).bitwise_and_(2 ** (64 - shift) - 1))
        if multiplier != 1:
            state.mul_(multiplier)
    return state
