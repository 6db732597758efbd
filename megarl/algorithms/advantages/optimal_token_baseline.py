"""A baseline for each token: the group's returns there, weighted by how much gradient each response has gathered so far."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages.gae import rewards_to_go
from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, needed
from megarl.algorithms.masked import block_rows, masked
from megarl.algorithms.tool_gaps import from_front, front_slots, to_front
from megarl.config.schema import AdvantageConfig

_NAME, _REMEDY = "optimal_token_baseline", "use rloo, whose baseline needs only the scores"


def optimal_token_baseline(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """G_t - B_t, with B_t = sum_i G_it W_it / sum_i W_it over the samples of a prompt that have a token t (Li et al. 2026, arXiv
    2602.07078). G: rewards to go. W_it = sum over j <= t of 1 - 2 p_ij + sum_v p_ijv^2, the squared norm of the gradient with
    respect to the logits, gathered along the response. Returns are G.

    t counts valid tokens, so tool output moves nothing. Where only one sample of a prompt still has a token there is nothing to
    compare and the advantage is 0, as for a group of one.
    """
    log_probs = needed(inputs.old_log_probs, _NAME, "`old_log_probs`", _REMEDY)
    squares = needed(inputs.sum_pi_squared, _NAME, "`sum_pi_squared`", _REMEDY)
    rewards, mask = inputs.token_level_rewards, inputs.response_mask
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    for rows in inputs.groups.blocks(block_rows(rewards)):
        index = inputs.groups.index[rows]
        block = _of_whole_groups(rewards[rows], mask[rows], log_probs[rows], squares[rows], index - index[0])
        advantages[rows], returns[rows] = block
    return Advantages(advantages, returns)


def _of_whole_groups(rewards: Tensor, mask: Tensor, log_probs: Tensor, squares: Tensor, index: Tensor) -> Advantages:
    """index (b,): the number of a row's group, in rising order from 0; all others (b, R)."""
    slots, num_groups = front_slots(mask), int(index[-1]) + 1
    returns = rewards_to_go(rewards, mask, gamma=1.0)
    norms = masked(1.0 - 2.0 * log_probs.exp() + squares, mask).clamp(min=0)
    here, returns_here = mask.to(returns.dtype), returns  # here: 1 where a sample has a token t
    if slots is not None:
        here, norms, returns_here = (to_front(x, slots) for x in (here, norms, returns))
    gathered = norms.cumsum(dim=1).mul_(here)

    def over_samples(x: Tensor) -> Tensor:
        """(num_groups, R) sums of x (b, R)."""
        return x.new_zeros(num_groups, x.shape[1]).index_add_(0, index, x)

    weight = over_samples(gathered)
    compared = ((over_samples(here) > 1) & (weight > 0))[index]
    baseline = (over_samples(returns_here * gathered) / torch.where(weight > 0, weight, 1.0))[index]
    advantages = torch.where(compared, returns_here - baseline, 0.0) * here
    return Advantages(advantages if slots is None else from_front(advantages, slots), returns)
