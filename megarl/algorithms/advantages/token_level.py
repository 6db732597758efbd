"""Token-level estimators, in which the advantage of a token depends on what follows it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, Estimator, needed
from megarl.algorithms.groups import refuse_unusable
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
from megarl.batch.ragged import Column
from megarl.config.schema import AdvantageConfig, AdvantageEstimator

_BASELINE = "optimal_token_baseline"
_HINT = "use rloo, whose baseline needs only the scores"
# Chunk of a row in discounted_suffix_sums. It costs 16 multiplications per element, and the second level sums
# only a sixteenth as many values.
_CHUNK_TOKENS = 16


def gae(
    token_level_rewards: Column, values: Column, response_mask: Column, gamma: float, lam: float
) -> Advantages:
    """GAE: return advantages and returns, (B, R) each (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = sum_k (gamma lam)^k delta_{t+k}; returns = A + V. The episode
    ends after the last valid token, where V = 0. Rewards in masked slots are ignored.

    A token outside the mask (padding, tool output) is not a step of the episode: it gets 0, and the token
    before a gap is followed by the token after it.

    The implementation sums returns, R_t = r_t + gamma (1 - lam) V_{t+1} + gamma lam R_{t+1}, which is the
    same recursion with one pass fewer.
    """
    advantages, returns = (empty_like(token_level_rewards, token_level_rewards.dtype) for _ in range(2))
    for rows, slots, (steps, kept_values) in _episodes(response_mask, token_level_rewards, values):
        next_values = kept_values
        # Move valid tokens to the front, so that the recursion skips gaps in the mask.
        if slots is not None:
            steps = to_front(steps, slots)
            next_values = to_front(kept_values, slots)
        # If lam = 1, the bootstrap term is 0, which saves a pass over the tokens.
        if lam != 1.0:
            steps[:, :-1].add_(next_values[:, 1:], alpha=gamma * (1.0 - lam))
        sums = discounted_suffix_sums(steps, gamma * lam)
        sums = sums if slots is None else from_front(sums, slots)
        returns[rows] = sums
        advantages[rows] = sums - kept_values

    return Advantages(of_form(advantages, response_mask), of_form(returns, response_mask))


def whitened_gae(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """PPO for language models: whitened GAE advantages (Ouyang et al. 2022).

    The whitening is over the valid tokens of the whole batch. The returns are not whitened.
    """
    values = needed(inputs.values, "gae", "the critic's `values`", "use grpo to train without a critic")
    advantages, returns = gae(
        inputs.token_level_rewards, values, inputs.response_mask, config.gamma, config.lam
    )
    return Advantages(whiten(advantages, inputs.response_mask, out=advantages), returns)


def reinforce_plus_plus(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """REINFORCE++: discounted rewards-to-go, whitened over the batch (Hu 2025, arXiv 2501.03262).

    The whitening is over all valid tokens of the batch.

    With the KL penalty in the reward, as in the paper, the return of a token includes its own penalty and
    those of later tokens. Returns are the rewards-to-go before whitening.
    """
    returns = rewards_to_go(inputs.token_level_rewards, inputs.response_mask, config.gamma)
    return Advantages(whiten(returns, inputs.response_mask), returns)


def remax(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """ReMax: rewards-to-go minus the score of the greedy response (Li et al. 2024, arXiv 2310.10505).

    With only an outcome score, this is outcome - greedy score. With a KL penalty in the reward, the return of
    a token includes its own penalty and those of later tokens; the greedy response has no penalty. Returns
    are the rewards-to-go.
    """
    baseline = needed(
        inputs.baseline_scores,
        "remax",
        "`baseline_scores` of greedy responses",
        "use rloo, whose baseline is the mean of the other samples",
    )
    refuse_unusable("the greedy response's score", baseline, inputs.uid)
    returns = rewards_to_go(inputs.token_level_rewards, inputs.response_mask, gamma=1.0)
    per_row = inputs.on_every_token(baseline.to(returns.dtype)).advantages

    return Advantages(map_tokens(torch.sub, inputs.response_mask, returns, per_row), returns)


def optimal_token_baseline(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Optimal token baseline: G_t - B_t (Li et al. 2026, arXiv 2602.07078).

    B_t = sum_i G_it W_it / sum_i W_it over the samples of a prompt that have a token t.

    G are the rewards-to-go, which are also the returns. W_it = sum over j <= t of 1 - 2 p_ij + sum_v p_ijv^2,
    the squared norm of the gradient with respect to the logits, accumulated along the response.

    t counts valid tokens, so tool output shifts nothing. If only one sample of a prompt has a token t, there
    is nothing to compare and its advantage is 0, as in a group of size 1.
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
        # Within the block, groups are numbered from its first one.
        advantages[rows], returns[rows] = _of_whole_groups(rewards, mask, old, squared, index - index[0])

    return Advantages(of_form(advantages, inputs.response_mask), of_form(returns, inputs.response_mask))


def _of_whole_groups(
    rewards: Tensor, mask: Tensor, log_probs: Tensor, squares: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns (b, r) of a block of whole groups.

    `index` (b,) is the group number of each row, ascending from 0; the other arguments are (b, R).
    """
    slots = front_slots(mask)
    num_groups = int(index[-1]) + 1
    returns = _rewards_to_go(masked(rewards, mask), slots, gamma=1.0)
    # Rounding may leave a squared norm slightly below 0.
    norms = masked(1.0 - 2.0 * log_probs.exp() + squares, mask).clamp(min=0)

    # 1 where a sample has a token t
    here = mask.to(returns.dtype)
    returns_here = returns
    # Align the samples by their count of valid tokens, so that tool output shifts nothing.
    if slots is not None:
        here, norms, returns_here = (to_front(x, slots) for x in (here, norms, returns))
    gathered = norms.cumsum(dim=1).mul_(here)

    def over_samples(x: Tensor) -> Tensor:
        """Return the sums of x (b, R) over the samples of each group, (num_groups, R)."""
        return x.new_zeros(num_groups, x.shape[1]).index_add_(0, index, x)

    weight = over_samples(gathered)
    compared = ((over_samples(here) > 1) & (weight > 0))[index]
    # The divisor 1 avoids a division by 0; `compared` excludes those positions.
    baseline = (over_samples(returns_here * gathered) / torch.where(weight > 0, weight, 1.0))[index]
    advantages = torch.where(compared, returns_here - baseline, 0.0) * here

    return advantages if slots is None else from_front(advantages, slots), returns


def rewards_to_go(token_level_rewards: Column, response_mask: Column, gamma: float) -> Column:
    """Return sum_k gamma^k r_{t+k} over the valid tokens from t on, (B, R); 0 in masked slots."""
    returns = empty_like(token_level_rewards, token_level_rewards.dtype)
    for rows, slots, (rewards,) in _episodes(response_mask, token_level_rewards):
        returns[rows] = _rewards_to_go(rewards, slots, gamma)
    return of_form(returns, response_mask)


def _rewards_to_go(rewards: Tensor, slots: Tensor | None, gamma: float) -> Tensor:
    """Compute rewards_to_go of a block of rows, whose rewards are 0 in masked slots."""
    if slots is None:
        return discounted_suffix_sums(rewards, gamma)
    return from_front(discounted_suffix_sums(to_front(rewards, slots), gamma), slots)


def _episodes(
    response_mask: Column, *columns: Column
) -> Iterator[tuple[Tensor, Tensor | None, list[Tensor]]]:
    """Yield all rows of the columns (B, R), in blocks that fit the cache.

    A block is the numbers of its rows in the batch (b,), their front_slots if there are gaps, and their
    columns (b, r), which are 0 in masked slots.
    """
    rows_of_mask = as_rows(response_mask)
    rows_of_columns = rows_like(response_mask, columns)
    all_count = leaves_nothing_out(response_mask)

    for rows in rows_of_mask.blocks_of_like_length():
        padded = [column[rows] for column in rows_of_columns]  # padded with 0
        # Without gaps, valid tokens are at the front already.
        if all_count:
            yield rows, None, padded
        else:
            mask = rows_of_mask[rows]
            yield rows, front_slots(mask), [masked(column, mask) for column in padded]


def discounted_suffix_sums(x: Tensor, discount: float) -> Tensor:
    """Return y with y_t = x_t + discount y_{t+1}, (B, R).

    Each chunk of a row is multiplied by the triangular matrix of the discount's powers. The chunk totals are
    summed separately, and each token then adds the discounted total of the later chunks. There is no loop
    over tokens, and the rounding error grows as in a sum of 16 and a sum of log2(R / 16) values.
    """
    num_rows, num_tokens = x.shape
    # Zeros after the last token do not change any suffix sum.
    padded = torch.nn.functional.pad(x, (0, -num_tokens % _CHUNK_TOKENS))
    distance = torch.arange(_CHUNK_TOKENS, device=x.device)
    powers = discount ** (distance[:, None] - distance).clamp(min=0).to(x.dtype)
    sums = (padded.view(-1, _CHUNK_TOKENS) @ powers.tril()).view(num_rows, -1, _CHUNK_TOKENS)
    # The first sum of each chunk is the chunk's total.
    following = _suffix_sums_by_doubling(sums[:, :, 0].contiguous(), discount**_CHUNK_TOKENS)
    # Add the discounted total of all later chunks to each token.
    sums[:, :-1].addcmul_(following[:, 1:, None], discount ** (_CHUNK_TOKENS - distance).to(x.dtype))

    return sums.view(num_rows, -1)[:, :num_tokens]


def _suffix_sums_by_doubling(x: Tensor, discount: float) -> Tensor:
    """Compute discounted_suffix_sums of x, overwriting x.

    Each pass doubles the number of tokens in the sum of a token.
    """
    sums = x
    longer = torch.empty_like(x)
    span = 1
    factor = discount

    # Once the power of the discount underflows to 0, nothing more is added.
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
