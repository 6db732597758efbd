"""Slow references in plain Python: one row and one token at a time, floats only."""

import math


def gae_row(rewards, values, mask, gamma, lam):
    """Advantages and returns of one row by the backward recursion, over the valid tokens only."""
    valid = [t for t, keep in enumerate(mask) if keep]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    next_value = next_advantage = 0.0
    for t in reversed(valid):
        delta = rewards[t] + gamma * next_value - values[t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[t]
        advantages[t], returns[t] = next_advantage, next_advantage + values[t]
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


def aggregate(rows, masks, kind):
    sums = [sum(x for x, keep in zip(row, mask, strict=True) if keep) for row, mask in zip(rows, masks, strict=True)]
    counts = [sum(mask) for mask in masks]
    filled = [(s, c) for s, c in zip(sums, counts, strict=True) if c]
    if kind == "token_mean":
        return sum(sums) / sum(counts)
    if kind == "sequence_mean_token_sum":
        return sum(s for s, _ in filled) / len(filled)
    return sum(s / c for s, c in filled) / len(filled)
