"""A baseline for each token: the group's returns there, weighted by how much gradient each response has gathered so far."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages.gae import rewards_to_go
from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, needed
from megarl.algorithms.masked import masked
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
    mask = inputs.response_mask
    returns = rewards_to_go(inputs.token_level_rewards, mask, gamma=1.0)
    gathered = masked(1.0 - 2.0 * log_probs.exp() + squares, mask).clamp(min=0).cumsum(dim=1)
    number = (mask.cumsum(dim=1) - 1).clamp(min=0)  # of each valid token in its row
    slot = (inputs.groups.index[:, None] * mask.shape[1] + number)[mask]  # one for each (prompt, t)
    num_slots = len(inputs.groups.sizes) * mask.shape[1]

    def over_samples(x: Tensor) -> Tensor:
        return torch.zeros(num_slots, dtype=x.dtype, device=x.device).index_add_(0, slot, x)[slot]

    weight = over_samples(gathered[mask])
    compared = (over_samples(torch.ones_like(returns[mask])) > 1) & (weight > 0)
    baseline = over_samples((returns * gathered)[mask]) / torch.where(compared, weight, 1.0)
    advantages = torch.zeros_like(returns)
    advantages[mask] = torch.where(compared, returns[mask] - baseline, 0.0)
    return Advantages(advantages, returns)
