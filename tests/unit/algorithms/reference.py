"""Slow reference implementations in plain Python: one row and one token at a time, floats only."""

import math


def gae_row(rewards, values, mask, gamma, lam):
    """Return advantages and returns of one row by the backward recursion over the valid tokens."""
    valid = [t for t, keep in enumerate(mask) if keep]
    advantages = [0.0] * len(mask)
    returns = [0.0] * len(mask)
    next_value = next_advantage = 0.0

    for t in reversed(valid):
        delta = rewards[t] + gamma * next_value - values[t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[t]
        advantages[t] = next_advantage
        returns[t] = next_advantage + values[t]

    return advantages, returns


def ppo_token(new, old, advantage, clip_low, clip_high, clip_dual):
    ratio = math.exp(new - old)
    loss = max(-ratio * advantage, -min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage)
    if clip_dual is not None and advantage < 0:
        loss = min(loss, -clip_dual * advantage)
    return loss


def value_token(value, old, target, clip):
    if clip is None:
        return 0.5 * (value - target) ** 2
    near = min(max(value, old - clip), old + clip)
    return 0.5 * max((value - target) ** 2, (near - target) ** 2)


def aggregate(rows, masks, kind, norm_tokens=None):
    sums = [
        sum(x for x, keep in zip(row, mask, strict=True) if keep)
        for row, mask in zip(rows, masks, strict=True)
    ]
    counts = [sum(mask) for mask in masks]
    filled = [(s, c) for s, c in zip(sums, counts, strict=True) if c]
    if kind == "token_mean":
        return sum(sums) / sum(counts)
    if kind == "sequence_mean_token_sum_norm":
        return sum(s / norm_tokens for s, _ in filled) / len(filled)
    if kind == "sequence_mean_token_sum":
        return sum(s for s, _ in filled) / len(filled)

    return sum(s / c for s, c in filled) / len(filled)


def policy_row(kind, new, at, old, advantages, mask, selected, config):
    """Return the losses of one row's tokens, as a dictionary t -> loss.

    As a function of `new`, with `at` fixed, its derivative at new = at is the gradient that the loss should
    have.

    Args:
        at: The new log-probs at which parts without a gradient are evaluated.
    """
    valid = [t for t, keep in enumerate(mask) if keep]
    mean_log_ratio = sum(at[t] - old[t] for t in valid) / max(len(valid), 1)
    mean_advantage = sum(advantages[t] for t in valid) / max(len(valid), 1)
    losses = {}

    for t in valid:
        ratio = math.exp(new[t] - old[t])
        frozen = math.exp(at[t] - old[t])
        advantage = advantages[t]
        low = 1 - config.clip_low
        high = 1 + config.clip_high
        if kind == "ppo_clip":
            losses[t] = ppo_token(
                new[t], old[t], advantage, config.clip_low, config.clip_high, config.clip_dual
            )
        elif kind == "gspo":
            ratio = math.exp(mean_log_ratio + new[t] - at[t])
            losses[t] = max(-ratio * advantage, -min(max(ratio, low), high) * advantage)
        elif kind == "gmpo":
            if mean_advantage > 0:
                cut = [min(new[u] - old[u], config.clip_high) for u in valid]
            else:
                cut = [max(new[u] - old[u], -config.clip_low) for u in valid]
            losses[t] = -mean_advantage * math.exp(sum(cut) / len(valid))
        elif kind == "cispo":
            losses[t] = -min(max(frozen, low), high) * advantage * new[t]
        elif kind == "sapo":
            tau = config.sapo.temperature_positive if advantage > 0 else config.sapo.temperature_negative
            losses[t] = -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
        elif kind in ("vespo", "topr"):
            whole = math.exp(sum(at[u] - old[u] for u in valid))
            losses[t] = -response_weight(kind, whole, advantage, config) * advantage * new[t]
        elif kind == "dro":
            losses[t] = -advantage * new[t] + config.dro_beta / 2 * (new[t] - old[t]) ** 2
        elif kind == "gpg":
            losses[t] = -advantage * new[t]
        elif kind == "clip_cov":
            kept = ppo_token(new[t], old[t], advantage, config.clip_low, config.clip_high, config.clip_dual)
            losses[t] = 0.0 if selected[t] else kept
        elif kind == "kl_cov":
            losses[t] = -ratio * advantage + (
                config.covariance.kl_coefficient * abs(new[t] - old[t]) if selected[t] else 0.0
            )
        else:
            losses[t] = dppo_token(kind, new[t], at[t], old[t], advantage, config)

    return losses


def response_weight(kind, ratio, advantage, config):
    if kind == "topr":
        return min(ratio, 1.0) if advantage < 0 else 1.0
    power, rate = (
        (config.vespo.power_negative, config.vespo.rate_negative)
        if advantage < 0
        else (config.vespo.power_positive, config.vespo.rate_positive)
    )
    return math.exp(rate) * ratio**power * math.exp(-rate * ratio)


def dppo_token(kind, new, at, old, advantage, config):
    p = math.exp(at)
    q = math.exp(old)
    distance = (
        abs(p - q) if kind == "dppo_tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    )
    away = (
        (at > old and distance > config.clip_high)
        if advantage > 0
        else (at < old and distance > config.clip_low)
    )
    weight = p / q if config.clip_dual is None else min(p / q, config.clip_dual)

    return 0.0 if away else -weight * math.exp(new - at) * advantage
