"""Reference implementations of the advantage estimators in plain Python: one row and one token at a time,
floats only, with groups found by comparing uids."""

import math
import statistics

from tests.unit.algorithms.reference import gae_row

EPSILON = 1e-6


def advantages(kind, batch, config):
    """Return advantages and returns as lists of lists.

    `batch` is a dictionary of lists with the names of AdvantageInputs.
    """
    rewards = batch["token_level_rewards"]
    mask = batch["response_mask"]
    uid = batch["uid"]
    rows = range(len(rewards))
    scores = [sum(reward for reward, keep in zip(rewards[i], mask[i], strict=True) if keep) for i in rows]
    group = [[j for j in rows if uid[j] == uid[i] and any(mask[j])] or [i] for i in rows]
    to_go = [gae_row(rewards[i], [0.0] * len(mask[i]), mask[i], 1.0, 1.0)[0] for i in rows]

    if kind == "gae":
        pairs = [gae_row(rewards[i], batch["values"][i], mask[i], config.gamma, config.lam) for i in rows]
        return whitened([pair[0] for pair in pairs], mask), [pair[1] for pair in pairs]

    if kind == "reinforce_plus_plus":
        discounted = [gae_row(rewards[i], [0.0] * len(mask[i]), mask[i], config.gamma, 1.0)[0] for i in rows]
        return whitened(discounted, mask), discounted

    if kind == "remax":
        baseline = batch["baseline_scores"]
        shifted = [
            [x - baseline[i] if keep else 0.0 for x, keep in zip(to_go[i], mask[i], strict=True)]
            for i in rows
        ]
        return shifted, to_go

    if kind == "optimal_token_baseline":
        return optimal_token_baseline(batch, mask, group, to_go), to_go

    if kind == "distillation":
        section = config.distillation
        of_rewards = [normalized(scores, group[i], i, config.normalize_by_std) for i in rows]
        mixed = [
            [
                section.coefficient * (teacher - old) + section.reward_weight * of_rewards[i] if keep else 0.0
                for teacher, old, keep in zip(
                    batch["teacher_log_prob"][i], batch["old_log_probs"][i], mask[i], strict=True
                )
            ]
            for i in rows
        ]
        return mixed, mixed

    per_row_of = {
        "grpo": lambda: [normalized(scores, group[i], i, config.normalize_by_std) for i in rows],
        "maxrl": lambda: [relative_to_the_mean(scores, group[i], i) for i in rows],
        "grpo_pass_k": lambda: [pass_k(scores, group[i], i, config.normalize_by_std) for i in rows],
        "rloo": lambda: [leave_one_out(scores, group[i], i) for i in rows],
        "reinforce_plus_plus_baseline": lambda: [normalized(scores, group[i], i, False) for i in rows],
        "opo": lambda: [scores[i] - length_weighted_mean(scores, mask, group[i]) for i in rows],
        "gpg": lambda: gpg(scores, mask, group, rows),
        "gdpo": lambda: gdpo(batch["score_parts"], batch["score_weights"], mask, group, rows),
    }
    assert kind in per_row_of, (
        f"tests/unit/algorithms/reference_advantages.py has no slow version of {kind!r}; add one"
    )
    per_row = per_row_of[kind]()
    spread = [[per_row[i] if keep else 0.0 for keep in mask[i]] for i in rows]
    spread = whitened(spread, mask) if kind == "reinforce_plus_plus_baseline" else spread

    return spread, spread


def relative_to_the_mean(scores, group, i):
    mean = sum(scores[j] for j in group) / len(group)
    if mean <= 0 or len({scores[j] for j in group}) == 1:
        return 0.0
    return (scores[i] - mean) / mean


def whitened(rows, mask):
    valid = [
        x for row, keeps in zip(rows, mask, strict=True) for x, keep in zip(row, keeps, strict=True) if keep
    ]
    mean = sum(valid) / max(len(valid), 1)
    variance = sum((x - mean) ** 2 for x in valid) / max(len(valid) - 1, 1)
    scale = math.sqrt(variance + 1e-8)

    return [
        [(x - mean) / scale if keep else 0.0 for x, keep in zip(row, keeps, strict=True)]
        for row, keeps in zip(rows, mask, strict=True)
    ]


def deviation_of(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def normalized(scores, group, i, by_std):
    own = [scores[j] for j in group]
    return (scores[i] - statistics.fmean(own)) / (deviation_of(own) + EPSILON if by_std else 1.0)


def pass_k(scores, group, i, by_std):
    """Return the reduction of the group's best score without sample i."""
    others = [scores[j] for j in group if j != i]
    gain = max(scores[j] for j in group) - max(others) if others else 0.0
    return gain / (deviation_of([scores[j] for j in group]) + EPSILON if by_std else 1.0)


def leave_one_out(scores, group, i):
    others = [scores[j] for j in group if j != i]
    return scores[i] - statistics.fmean(others) if others else 0.0


def length_weighted_mean(scores, mask, group):
    lengths = [sum(mask[j]) for j in group]
    return sum(length * scores[j] for length, j in zip(lengths, group, strict=True)) / max(sum(lengths), 1)


def gpg(scores, mask, group, rows):
    counted = [i for i in rows if any(mask[i])]
    with_signal = [i for i in counted if len({scores[j] for j in group[i]}) > 1]
    return [normalized(scores, group[i], i, False) * len(counted) / max(len(with_signal), 1) for i in rows]


def gdpo(parts, weights, mask, group, rows):
    totals = [0.0 for _ in rows]
    for k, weight in enumerate(weights):
        column = [parts[i][k] for i in rows]
        totals = [total + weight * normalized(column, group[i], i, True) for i, total in enumerate(totals)]

    counted = [totals[i] for i in rows if any(mask[i])]
    mean = statistics.fmean(counted) if counted else 0.0
    return [(totals[i] - mean) / (deviation_of(counted) + EPSILON) for i in rows]


def optimal_token_baseline(batch, mask, group, to_go):
    log_probs = batch["old_log_probs"]
    squares = batch["sum_pi_squared"]
    tokens = [[t for t, keep in enumerate(row) if keep] for row in mask]
    energy = [
        [
            sum(max(1 - 2 * math.exp(log_probs[i][u]) + squares[i][u], 0.0) for u in own[: n + 1])
            for n in range(len(own))
        ]
        for i, own in enumerate(tokens)
    ]
    out = [[0.0] * len(row) for row in mask]

    for i, own in enumerate(tokens):
        for n, t in enumerate(own):
            there = [j for j in group[i] if len(tokens[j]) > n]
            weight = sum(energy[j][n] for j in there)
            if len(there) > 1 and weight > 0:
                out[i][t] = to_go[i][t] - sum(to_go[j][tokens[j][n]] * energy[j][n] for j in there) / weight

    return out
