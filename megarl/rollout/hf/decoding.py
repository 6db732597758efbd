"""Decoding loop over a transformers model.

It makes one prefill of left-padded prompts, then one token per step for every row.

transformers' own `generate` spends more time per token on bookkeeping than a small model spends on its
forward pass, and keeps the logits of all steps to return log-probs; this loop keeps those of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megarl.batch.token_rows import token_positions
from megarl.data.images import ImageProcessor
from megarl.machine.errors import counted
from megarl.rollout.hf.attention import KVCache, SharedPrompts
from megarl.rollout.interface import GenerationRequest, SamplingParameters


class _Rows(NamedTuple):
    """Rows that are still being generated.

    `indices` (A,) are their rows among the B rows, and `positions` (A,) the positions of their next tokens.
    The other fields are what they have read and written.
    """

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
    images: Sequence[PromptImages] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Generate one sample per prompt. Equal prompts are prefilled once.

    Rows that have ended leave the batch once they make up half of it.

    Args:
        seeds: One seed per prompt, used instead of the seed of `sampling`.
        is_ended: If it returns True for a sample's tokens, the sample stops as at a stop token.
        images: The images of each prompt, for a model that reads images.

    Returns:
        After N steps, the token ids (B, N) int64; their log-probs (B, N) float32; the length of each sample
        (B,) int64, after which tokens are not part of it; and whether its last token is a stop token, (B,)
        bool.
    """
    batch_size = len(prompts)
    sampled_ids = torch.zeros(batch_size, sampling.max_new_tokens, dtype=torch.int64, device=model.device)
    log_probs = torch.zeros(batch_size, sampling.max_new_tokens, device=model.device)
    lengths = torch.full((batch_size,), sampling.max_new_tokens, device=model.device)
    stopped = torch.zeros(batch_size, dtype=torch.bool, device=model.device)
    keys = row_keys(seeds, model.device)

    logits, rows = _prefill(model, prompts, images)

    for step in range(sampling.max_new_tokens):
        if step > 0:
            logits = _step(model, sampled_ids[rows.indices, step - 1], rows)
            rows = rows._replace(positions=rows.positions + 1)
        # End tokens are forbidden until the sample has its minimum length.
        forbidden = stop_token_ids[: 0 if step >= sampling.min_new_tokens else None]
        token_ids, of_tokens = sample_tokens(logits, sampling, keys[rows.indices], step, forbidden)
        sampled_ids[rows.indices, step] = token_ids
        log_probs[rows.indices, step] = of_tokens
        ends = torch.isin(token_ids, stop_token_ids)
        if is_ended is not None:
            written = sampled_ids[rows.indices, : step + 1].tolist()
            ends |= torch.tensor([is_ended(token_ids) for token_ids in written], device=model.device)
        # A row that has ended may still be computed; only its first end counts.
        ends &= ~stopped[rows.indices]
        lengths[rows.indices[ends]] = step + 1
        stopped[rows.indices[ends]] = True
        rows = _drop_ended(rows, stopped)
        if not len(rows.indices):
            break

    return sampled_ids[:, : step + 1], log_probs[:, : step + 1], lengths, stopped


def _prefill(
    model: PreTrainedModel, prompts: list[list[int]], images: Sequence[PromptImages] | None
) -> tuple[torch.Tensor, _Rows]:
    """Return the logits (B, V) of each prompt's last token, and the rows, which have no tokens yet."""
    # Prompts are equal if their tokens and their images are.
    files = [()] * len(prompts) if images is None else [each.files for each in images]
    keys = list(zip(map(tuple, prompts), files, strict=True))
    distinct = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    token_ids, mask = _left_pad([list(prompt) for prompt, _ in distinct], model.device)
    # Positions count real tokens only, so that padding does not shift them.
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    next_positions = mask.sum(-1)
    cache = KVCache()
    pixels: dict[str, torch.Tensor] = {}

    if images is not None:
        positions, next_positions, pixels = _with_images([images[keys.index(key)] for key in distinct], mask)
    output = model(
        input_ids=token_ids,
        attention_mask=mask.long(),
        position_ids=positions,
        use_cache=False,  # transformers' own cache
        kv_cache=cache,
        logits_to_keep=1,
        **pixels,
    )
    # Expand the results of the distinct prompts to the rows that share them.
    owners = [distinct[key] for key in keys]
    chosen = torch.tensor(owners, device=model.device)
    shared = SharedPrompts.of(cache, mask, owners)

    return output.logits[chosen, -1], _Rows(
        torch.arange(len(prompts), device=model.device), next_positions[chosen], shared, KVCache()
    )


def _with_images(
    images: Sequence[PromptImages], mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the positions (3, B, P) of left-padded prompts, the next position of each, and the pixels.

    Args:
        images: The images of each prompt.
        mask: (B, P) bool, False at padding.
    """
    positions = torch.zeros(3, *mask.shape, dtype=torch.int64, device=mask.device)
    for row, of_prompt in enumerate(images):
        positions[:, row, mask.shape[1] - of_prompt.positions.shape[1] :] = of_prompt.positions
    following = torch.stack([of_prompt.positions.max() + 1 for of_prompt in images])

    if not any(len(of_prompt.grids) for of_prompt in images):
        return positions, following, {}
    return (
        positions,
        following,
        {
            "pixel_values": torch.cat([of_prompt.pixels for of_prompt in images]),
            "image_grid_thw": torch.cat([of_prompt.grids for of_prompt in images]),
        },
    )


def _step(model: PreTrainedModel, token_ids: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Return the logits (A, V) after one more token (A,) of each row."""
    output = model(
        input_ids=token_ids[:, None],
        # a four-dimensional mask is used as it is; otherwise transformers would build one at every step
        attention_mask=rows.prompts.bias,
        position_ids=rows.positions[:, None],
        use_cache=False,  # transformers' own cache
        kv_cache=rows.written,
        prompts=rows.prompts,
    )
    return output.logits[:, -1]


def _drop_ended(rows: _Rows, stopped: torch.Tensor) -> _Rows:
    """Drop rows that have ended if that halves the batch: copying the cache costs about as much as a step."""
    alive = (~stopped[rows.indices]).nonzero().squeeze(-1)
    if 2 * len(alive) > len(rows.indices):
        return rows
    if not len(alive):
        return rows._replace(indices=alive)
    rows.written.select(alive)

    return _Rows(rows.indices[alive], rows.positions[alive], rows.prompts.select(alive), rows.written)


def _left_pad(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids (B, P), 0 at padding, and a mask (B, P) bool, False at padding."""
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return token_ids, torch.arange(width, device=device) >= width - lengths[:, None]


# ---- sampling one token per row of logits, with its log-prob as defined by `Sample`


def sample_tokens(
    logits: torch.Tensor, sampling: SamplingParameters, keys: torch.Tensor, step: int, forbidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample token `step` of each row. The seed of `sampling` is not used.

    Args:
        logits: Shape (B, V), any float type. A few float32 copies of it are allocated.
        keys: Shape (B,), from row_keys.
        forbidden: Shape (F,), token ids that are not sampled.

    Returns:
        The token ids (B,) int64, and their log-probs (B,) float32.
    """
    logits = logits.float()
    if sampling.temperature != 0:
        logits = logits / sampling.temperature
    # Sample from restricted logits; the log-prob is over the whole vocabulary.
    allowed = logits.index_fill(-1, forbidden, -torch.inf) if len(forbidden) else logits
    if sampling.temperature != 0:
        allowed = _truncate(allowed, sampling) + gumbel_noise(keys, step, logits.shape[-1])
    token_ids = allowed.argmax(dim=-1)
    return token_ids, logits.gather(-1, token_ids[:, None]).squeeze(-1) - logits.logsumexp(dim=-1)


def _truncate(logits: torch.Tensor, sampling: SamplingParameters) -> torch.Tensor:
    """Set tokens excluded by top-k, and then top-p, to -inf.

    Ties are broken by the sort, so exactly k remain.
    """
    top_k = min(sampling.top_k, logits.shape[-1]) if sampling.top_k != -1 else logits.shape[-1]
    if top_k == logits.shape[-1] and sampling.top_p == 1:
        return logits
    values, token_ids = logits.topk(top_k, dim=-1)  # sorted, most probable first

    if sampling.top_p < 1:
        probs = values.softmax(dim=-1)
        reached_before = probs.cumsum(dim=-1) - probs  # the first token always stays
        values = values.masked_fill(reached_before >= sampling.top_p, -torch.inf)

    # Scatter the remaining logits back to the positions of their tokens.
    return torch.full_like(logits, -torch.inf).scatter(-1, token_ids, values)


# ---- random numbers by position instead of by state
#
# The noise of a token depends only on (seed, step, token id). A stateful generator would give a row other
# numbers when the batch around it changes. This hash is stateless, so that a sample can be regenerated, alone
# or in a batch, with the same result.

# SplitMix64 (Steele, Lea, Flood 2014): the increment and the two multipliers, as signed 64-bit numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_SHIFTS = (30, 27, 31)
_BITS = 53  # bits of a hash that are used


def row_keys(seeds: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return one key per row, (B,) int64. `seeds` are any integers, of which the lowest 63 bits count."""
    return _mix(torch.tensor([seed % 2**63 for seed in seeds], dtype=torch.int64, device=device) + _INCREMENT)


def gumbel_noise(keys: torch.Tensor, step: int, vocab_size: int) -> torch.Tensor:
    """Return Gumbel(0, 1) noise, (B, V) float32.

    The argmax of log-probs plus this noise is a sample from the distribution.

    Args:
        keys: Shape (B,) int64, from `row_keys`.
        step: Number of tokens of the sample drawn before.
    """
    # Hash in two stages: seed and step give a key; key and token id give the noise.
    keys = _mix(keys + step)
    counters = torch.arange(1, vocab_size + 1, device=keys.device) * _INCREMENT
    bits = _mix(keys[:, None] + counters)
    # Take the highest bits; the mask removes the copies of the sign bit that the shift produces.
    bits = bits.bitwise_right_shift_(64 - _BITS).bitwise_and_(2**_BITS - 1)

    # In (0, 1], and exact near 0, where the largest noise comes from; float32 lacks the precision near 1.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-_BITS)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(state: torch.Tensor) -> torch.Tensor:
    """Mix the bits of `state` in place, so that every bit of the result depends on every input bit."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        # The shift preserves the sign; the mask removes its copies.
        state.bitwise_xor_((state >> shift).bitwise_and_(2 ** (64 - shift) - 1))
        if multiplier != 1:
            state.mul_(multiplier)
    return state


class PromptImages(NamedTuple):
    """The images of a prompt for a model that reads images. A prompt may have none.

    Attributes:
        files: What identifies the images.
        pixels: (P, patch elements).
        grids: (I, 3).
        positions: (3, L), the positions of the prompt's tokens.
    """

    files: tuple[bytes, ...]
    pixels: Tensor
    grids: Tensor
    positions: Tensor


def prompt_images(
    requests: Sequence[GenerationRequest], processor: ImageProcessor, device: torch.device
) -> list[PromptImages]:
    """Return the images of each request. Those of samples of one prompt are decoded once.

    Raises:
        ValueError: A prompt does not have the tokens of its images.
    """
    made: dict[tuple[tuple[bytes, ...], tuple[int, ...]], PromptImages] = {}
    found = []

    for request in requests:
        key = request.images, tuple(request.prompt)
        if key not in made:
            made[key] = _images_of(request, processor, device)
        found.append(made[key])
    return found


def _images_of(request: GenerationRequest, processor: ImageProcessor, device: torch.device) -> PromptImages:
    tower = processor.tower
    patches = [processor.patches(data) for data in request.images]
    grids = torch.tensor([grid for _, grid in patches], dtype=torch.int64).view(-1, 3)
    counts = (grids.prod(1) // tower.patches_per_token).tolist()
    places = [place for place, token in enumerate(request.prompt) if token == tower.image_token_id]

    if len(places) != sum(counts):
        raise ValueError(
            f"request {request.request_id} has {counted(len(places), 'image token')}, but "
            f"{counted(sum(counts), 'feature')} of {counted(len(counts), 'image')}"
        )

    starts = [places[sum(counts[:number])] for number in range(len(counts))]
    pixels = torch.cat([of_image for of_image, _ in patches] or [torch.empty(0, tower.patch_elements)])
    return PromptImages(
        request.images,
        pixels.to(device),
        grids.to(device),
        token_positions(len(request.prompt), starts, grids, tower.spatial_merge_size).to(device),
    )
