"""Estimators that look at what comes after a token: each token of a sample has an advantage of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, Estimator, needed
from megarl.algorithms.masked import (
    as_rows,
    empty_like,
    from_front,
    front_slots,
    leaves_nothing_out,
    map_tokens,
    masked,
    of_form,
    rows_like,
    to_front,
    whiten,
)
from megarl.algorithms.scores import refuse_unusable
from megarl.batch.ragged import Column
from megarl.config.schema import AdvantageConfig, AdvantageEstimator

_BASELINE = "optimal_token_baseline"
_HINT = "use rloo, whose baseline needs only the scores"
# of a row: as many multiplications an element, and a sixteenth of the tokens are left to be added up
_CHUNK_TOKENS = 16


class _Block(NamedTuple):
    advantages: Tensor  # (b, r)
    returns: Tensor


def gae(
    token_level_rewards: Column, values: Column, response_mask: Column, gamma: float, lam: float
) -> Advantages:
    """Advantages and returns for (B, R) (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = sum_k (gamma lam)^k delta_{t+k}; returns = A + V. The episode
    ends after the last valid token (V = 0 there). A reward in a masked slot is ignored.

    A token outside the mask (padding, tool output) is not a step of the episode: it gets 0, and the token
    before a gap is followed by the token after it.

    What is summed are the returns, R_t = r_t + gamma (1 - lam) V_{t+1} + gamma lam R_{t+1}: the same
    recursion with one pass less.
    """
    advantages, returns = (empty_like(token_level_rewards, token_level_rewards.dtype) for _ in range(2))
    for block in _episodes(response_mask, token_level_rewards, values):
        (steps, kept_values), slots = block.columns, block.slots
        next_values = kept_values
        # Move valid tokens to the front, so that the recursion skips gaps in the mask.
        if slots is not None:
            steps = to_front(steps, slots)
            next_values = to_front(kept_values, slots)
        # With lam = 1 the bootstrap term vanishes, which saves a pass over the tokens.
        if lam != 1.0:
            steps[:, :-1].add_(next_values[:, 1:], alpha=gamma * (1.0 - lam))
        sums = discounted_suffix_sums(steps, gamma * lam)
        sums = sums if slots is None else from_front(sums, slots)
        returns[block.rows] = sums
        advantages[block.rows] = sums - kept_values

    return Advantages(of_form(advantages, response_mask), of_form(returns, response_mask))


def whitened_gae(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Whitened over the valid tokens of the whole batch, as PPO for language models does (Ouyang et al.
    2022); returns are not."""
    values = needed(inputs.values, "gae", "the critic's `values`", "use grpo to train without a critic")
    advantages, returns = gae(
        inputs.token_level_rewards, values, inputs.response_mask, config.gamma, config.lam
    )
    return Advantages(whiten(advantages, inputs.response_mask, out=advantages), returns)


def reinforce_plus_plus(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """The discounted rewards to go, whitened over all valid tokens of the batch (Hu 2025, arXiv 2501.03262).

    With the KL penalty in the reward, as the paper has it, each token sees the penalties from itself on.
    Returns are the rewards to go before whitening.
    """
    returns = rewards_to_go(inputs.token_level_rewards, inputs.response_mask, config.gamma)
    return Advantages(whiten(returns, inputs.response_mask), returns)


def remax(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Rewards to go minus the greedy response's score, on each token (Li et al. 2024, arXiv 2310.10505).

    With an outcome score alone this is outcome - greedy score. With a KL penalty in the reward a token sees
    the penalties from itself on; the greedy response has none. Returns are the rewards to go.
    """
    baseline = needed(
        inputs.baseline_scores,
        "remax",
        "`baseline_scores` of greedy responses",
        "use rloo, whose baseline is the others'",
    )
    refuse_unusable("the greedy response's score", baseline, inputs.uid)
    returns = rewards_to_go(inputs.token_level_rewards, inputs.response_mask, gamma=1.0)
    per_row = inputs.on_every_token(baseline.to(returns.dtype)).advantages

    return Advantages(map_tokens(torch.sub, inputs.response_mask, returns, per_row), returns)


def optimal_token_baseline(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """G_t - B_t, with B_t = sum_i G_it W_it / sum_i W_it over the samples of a prompt that have a token t (Li
    et al. 2026, arXiv
    2602.07078). G: rewards to go. W_it = sum over j <= t of 1 - 2 p_ij + sum_v p_ijv^2, the squared norm of
    the gradient with respect to the logits, gathered along the response. Returns are G.

    t counts valid tokens, so tool output moves nothing. Where only one sample of a prompt still has a token
    there is nothing to compare and the advantage is 0, as for a group of one.
    """
    log_probs = needed(inputs.old_log_probs, _BASELINE, "`old_log_probs`", _HINT)
    squares = needed(inputs.sum_pi_squared, _BASELINE, "`sum_pi_squared`", _HINT)
    columns = rows_like(
        inputs.response_mask, (inputs.token_level_rewards, inputs.response_mask, log_probs, squares)
    )
    advantages, returns = (empty_like(columns[0], columns[0].dtype) for _ in range(2))

    # The baseline compares all samples of a prompt, so a block never splits a group.
    for rows in inputs.groups.blocks(columns[0].num_rows_of_block):
        index = inputs.groups.index[rows]
        rewards, mask, old, squared = (column[rows] for column in columns)
        block = _of_whole_groups(rewards, mask, old, squared, index - index[0])
        advantages[rows] = block.advantages
        returns[rows] = block.returns

    return Advantages(of_form(advantages, inputs.response_mask), of_form(returns, inputs.response_mask))


def _of_whole_groups(
    rewards: Tensor, mask: Tensor, log_probs: Tensor, squares: Tensor, index: Tensor
) -> _Block:
    """index (b,): the number of a row's group, in rising order from 0; all others (b, R)."""
    slots = front_slots(mask)
    num_groups = int(index[-1]) + 1
    returns = _rewards_to_go(masked(rewards, mask), slots, gamma=1.0)
    # Rounding may leave a squared norm slightly below 0.
    norms = masked(1.0 - 2.0 * log_probs.exp() + squares, mask).clamp(min=0)

    # here: 1 where a sample has a token t
    here = mask.to(returns.dtype)
    returns_here = returns
    # Align the samples by their count of valid tokens, so that tool output shifts nothing.
    if slots is not None:
        here, norms, returns_here = (to_front(x, slots) for x in (here, norms, returns))
    gathered = norms.cumsum(dim=1).mul_(here)

    def over_samples(x: Tensor) -> Tensor:
        """(num_groups, R) sums of x (b, R)."""
        return x.new_zeros(num_groups, x.shape[1]).index_add_(0, index, x)

    weight = over_samples(gathered)
    compared = ((over_samples(here) > 1) & (weight > 0))[index]
    # The divisor 1 avoids a division by 0; `compared` leaves those places out.
    baseline = (over_samples(returns_here * gathered) / torch.where(weight > 0, weight, 1.0))[index]
    advantages = torch.where(compared, returns_here - baseline, 0.0) * here

    return _Block(advantages if slots is None else from_front(advantages, slots), returns)


def rewards_to_go(token_level_rewards: Column, response_mask: Column, gamma: float) -> Column:
    """(B, R): sum_k gamma^k r_{t+k} over the valid tokens from t on; 0 in masked slots."""
    returns = empty_like(token_level_rewards, token_level_rewards.dtype)
    for block in _episodes(response_mask, token_level_rewards):
        returns[block.rows] = _rewards_to_go(block.columns[0], block.slots, gamma)
    return of_form(returns, response_mask)


def _rewards_to_go(rewards: Tensor, slots: Tensor | None, gamma: float) -> Tensor:
    """Of a block of rows; rewards: 0 in masked slots."""
    if slots is None:
        return discounted_suffix_sums(rewards, gamma)
    return from_front(discounted_suffix_sums(to_front(rewards, slots), gamma), slots)


class _Episodes(NamedTuple):
    """Some rows of a batch. rows: (b,) their numbers; slots: see front_slots; columns: (b, r) each, 0 in
    masked slots."""

    rows: Tensor
    slots: Tensor | None
    columns: list[Tensor]


def _episodes(response_mask: Column, *columns: Column) -> Iterator[_Episodes]:
    """All rows of the columns (B, R), in blocks that fit the cache."""
    rows_of_mask = as_rows(response_mask)
    rows_of_columns = rows_like(response_mask, columns)
    all_count = leaves_nothing_out(response_mask)

    for rows in rows_of_mask.blocks_of_like_length():
        padded = [column[rows] for column in rows_of_columns]  # with 0
        # Without gaps the tokens are in place already, and no slots are needed.
        if all_count:
            yield _Episodes(rows, None, padded)
        else:
            mask = rows_of_mask[rows]
            yield _Episodes(rows, front_slots(mask), [masked(column, mask) for column in padded])


def discounted_suffix_sums(x: Tensor, discount: float) -> Tensor:
    """(B, R): y_t = x_t + discount y_{t+1}.

    In chunks of a row by a product with the triangle of the discount's powers; then the chunks' totals, by
    themselves; then to each token what comes after its chunk. So there is no loop over tokens, and rounding
    grows as in a sum of 16 and one of log2(R / 16).
    """
    num_rows, num_tokens = x.shape
    # Zeros behind the last token change no suffix sum.
    padded = torch.nn.functional.pad(x, (0, -num_tokens % _CHUNK_TOKENS))
    distance = torch.arange(_CHUNK_TOKENS, device=x.device)
    powers = discount ** (distance[:, None] - distance).clamp(min=0).to(x.dtype)
    sums = (padded.view(-1, _CHUNK_TOKENS) @ powers.tril()).view(num_rows, -1, _CHUNK_TOKENS)
    # The first sum of each chunk is the chunk's total.
    following = _suffix_sums_by_doubling(sums[:, :, 0].contiguous(), discount**_CHUNK_TOKENS)
    # Each token then gets the discounted total of all later chunks.
    sums[:, :-1].addcmul_(following[:, 1:, None], discount ** (_CHUNK_TOKENS - distance).to(x.dtype))

    return sums.view(num_rows, -1)[:, :num_tokens]


def _suffix_sums_by_doubling(x: Tensor, discount: float) -> Tensor:
    """As `discounted_suffix_sums`; what is in x is lost. After each pass a token holds the sum over twice as
    many tokens as before."""
    sums = x
    longer = torch.empty_like(x)
    span = 1
    factor = discount

    # A discount that has underflowed to 0 adds nothing more.
    while span < x.shape[1] and factor != 0.0:
        torch.add(sums[:, :-span], sums[:, span:], alpha=factor, out=longer[:, :-span])
        longer[:, -span:] = sums[:, -span:]
        sums, longer = longer, sums
        span = 2 * span
        factor = factor * factor

    return sums


ESTIMATORS: dict[AdvantageEstimator, Estimator] = {
    AdvantageEstimator.gae: whitened_gae,
    AdvantageEstimator.reinforce_plus_plus: reinforce_plus_plus,
    AdvantageEstimator.remax: remax,
    AdvantageEstimator.optimal_token_baseline: optimal_token_baseline,
}
