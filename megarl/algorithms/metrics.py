"""Metrics of a training step's batch, and of k samples of a prompt, such as pass@k.

Each function documents its formulas.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from math import comb, sqrt
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.masked import itself, map_tokens, masked_row_sums, moments, row_lengths
from megarl.batch.ragged import Column, RaggedTensor

_SPREAD_KEYS = ("advantages", "returns", "values")  # without a critic, the first two are the same column


def _summary(name: str, x: Tensor) -> dict[str, float]:
    """Return the mean, maximum and minimum over all elements of x; no metrics for an empty x."""
    if x.numel() == 0:
        return {}
    x = x.float()
    return {f"{name}/mean": float(x.mean()), f"{name}/max": float(x.max()), f"{name}/min": float(x.min())}


def data_metrics(batch: Mapping[str, Column], max_response_length: int) -> dict[str, float]:
    """Return the metrics of a whole batch.

    `batch` maps batch keys to columns (B, R), either all tensors or all rows of tokens. `response_mask` is
    required; each other key adds its metrics.

    - `critic/score/*`, `critic/rewards/*`: over rows, of the row's sum of `token_level_scores` /
      `token_level_rewards`.
    - `reward/mean`: equal to `critic/score/mean`, under the name that other frameworks use.
    - `critic/advantages/*`, `critic/returns/*`, `critic/values/*`: over valid tokens. `std` is the square
      root of the mean squared deviation.
    - `critic/vf_explained_var`: 1 - Var(returns - values) / Var(returns) over valid tokens (0 if
      Var(returns) is 0).
    - `response_length/{mean,max,min}`: tokens that the model generated, over rows. `clip_ratio`: fraction of
      rows with at least `max_response_length` tokens.
    - `prompt_length/{mean,max,min}`: tokens of `prompts`, over rows.
    - `training/rollout_probs_diff_{mean,max}`: over valid tokens, |exp(rollout_log_probs) -
      exp(old_log_probs)|.
    - `training/rollout_log_probs_diff_{mean,max}`: over valid tokens, |rollout_log_probs - old_log_probs|.
    """
    mask = batch["response_mask"]
    lengths = row_lengths(mask)
    metrics = _summary("response_length", lengths)
    if lengths.numel() > 0:
        metrics["response_length/clip_ratio"] = float((lengths >= max_response_length).float().mean())
    if isinstance(prompts := batch.get("prompts"), RaggedTensor):
        metrics |= _summary("prompt_length", prompts.lengths)

    for key, name in (("token_level_scores", "score"), ("token_level_rewards", "rewards")):
        if key in batch:
            metrics |= _summary(f"critic/{name}", masked_row_sums(batch[key], mask))

    if "critic/score/mean" in metrics:
        metrics["reward/mean"] = metrics["critic/score/mean"]
    # Several keys may refer to the same column, whose moments are then computed once.
    over_tokens = {
        id(column): moments(itself, mask, column)
        for column in map(batch.get, _SPREAD_KEYS)
        if column is not None
    }

    for name in _SPREAD_KEYS:
        if name in batch and (tokens := over_tokens[id(batch[name])]).number:
            metrics |= {
                f"critic/{name}/mean": tokens.mean,
                f"critic/{name}/max": tokens.maximum,
                f"critic/{name}/min": tokens.minimum,
                f"critic/{name}/std": sqrt(tokens.variance),
            }

    if "values" in batch and "returns" in batch:
        errors = moments(torch.sub, mask, batch["returns"], batch["values"])
        returns = over_tokens[id(batch["returns"])]
        metrics["critic/vf_explained_var"] = (
            1.0 - errors.variance / returns.variance if returns.variance > 0 else 0.0
        )

    return metrics | _rollout_differences(batch)


def _rollout_differences(batch: Mapping[str, Column]) -> dict[str, float]:
    """Compare the log-probs of the rollout with those of the trainer, if the batch has both."""
    metrics: dict[str, float] = {}
    if "rollout_log_probs" in batch and "old_log_probs" in batch:
        for name, difference in (
            ("probs", lambda rollout, old: (rollout.exp() - old.exp()).abs()),
            ("log_probs", _of_log_probs),
        ):
            tokens = moments(
                difference, batch["response_mask"], batch["rollout_log_probs"], batch["old_log_probs"]
            )
            metrics[f"training/rollout_{name}_diff_mean"] = tokens.mean
            metrics[f"training/rollout_{name}_diff_max"] = tokens.maximum if tokens.number else 0.0

    return metrics


def _of_log_probs(rollout: Tensor, old: Tensor) -> Tensor:
    return (rollout - old).abs()


def age_metrics(batch: Mapping[str, Column], version: int) -> dict[str, float]:
    """Return metrics of the token age.

    The age of a token is the number of weight versions between the one that sampled it and the trained one.

    - `rollout/age/{mean,max}`: `version` - `token_versions` (B, R), over valid tokens.
    - `training/rollout_log_probs_diff_mean/{current,older}`: as in data_metrics, over the tokens of age 0 and
      over all others. Present if there are older tokens and the batch has the trainer's log-probs.

    Args:
        version: The version of the weights that are trained.
    """
    mask = batch["response_mask"]
    ages = moments(lambda versions: version - versions, mask, batch["token_versions"])
    if not ages.number:
        return {}
    metrics = {"rollout/age/mean": ages.mean, "rollout/age/max": ages.maximum}

    if "old_log_probs" in batch and ages.maximum > 0:
        for name, of_age in (("current", torch.eq), ("older", torch.ne)):
            # The default argument binds the function of this iteration to the lambda.
            chosen = map_tokens(
                lambda versions, of_age=of_age: of_age(versions, version),
                mask,
                batch["token_versions"],
                dtype=torch.bool,
            )
            difference = moments(_of_log_probs, chosen, batch["rollout_log_probs"], batch["old_log_probs"])
            if difference.number:
                metrics[f"training/rollout_log_probs_diff_mean/{name}"] = difference.mean

    return metrics


def agent_metrics(arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the metrics of agent episodes; none for a batch without `num_turns`. All arrays are (B,).

    - `agent/turns/{mean,max,min}`: turns of the model. `agent/calls/mean`: tool calls. `agent/tool_s/mean`:
      seconds in tools.
    - `agent/errors/<kind>`: fraction of calls that failed with this error. Kinds that did not occur are left
      out.
    - `agent/ended/<why>`: fraction of episodes with this end, see EpisodeEnd.
    - `agent/branches/mean`: rows of an episode. `agent/failures/<kind>`: fraction of episodes whose program
      failed so. Both are present in runs with a harness.
    - `agent/metrics/<name>/{mean,max,min}`: the further numbers of a hub's environment.
    """
    if "num_turns" not in arrays:
        return {}
    metrics = _summary("agent/turns", torch.tensor(arrays["num_turns"].tolist()))
    calls = arrays["num_calls"].sum()
    metrics |= {
        "agent/calls/mean": calls / len(arrays["num_calls"]),
        "agent/tool_s/mean": float(arrays["tool_s"].mean()),
    }
    errors = sum((Counter(each) for each in arrays["call_errors"]), Counter())
    metrics |= {f"agent/errors/{kind.replace(' ', '_')}": count / calls for kind, count in errors.items()}
    ends = Counter(arrays["episode_end"].tolist())
    metrics |= {f"agent/ended/{end}": count / ends.total() for end, count in ends.items()}

    if "branch" in arrays:  # of the last row of each episode
        # Branches are numbered from 0.
        metrics["agent/branches/mean"] = float(np.mean(arrays["branch"].astype(float))) + 1
        failures = Counter(kind for kind in arrays["failure"] if kind is not None)
        metrics |= {f"agent/failures/{kind}": count / ends.total() for kind, count in failures.items()}
        metrics |= _number_metrics("agent/metrics", arrays["episode_metrics"])
    return metrics


def reward_number_metrics(numbers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return `reward/<name>/{mean,max,min}` of the further numbers that reward functions returned.

    These are the numbers that they returned in addition to their score.

    Args:
        numbers: For each sample, its numbers by name (see rewards.process.Outcome). A sample without a number
            of some name, such as one whose scoring failed, does not count in the metrics of that name.
    """
    return _number_metrics("reward", numbers)


def _number_metrics(section: str, numbers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for of_sample in numbers:
        for name, value in of_sample.items():
            by_name.setdefault(name, []).append(value)

    metrics: dict[str, float] = {}
    for name, values in sorted(by_name.items()):
        metrics |= _summary(f"{section}/{name}", torch.tensor(values))
    return metrics


def reward_model_metrics(batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics of reward models; none for a batch without `reward_model_scores`.

    All columns are (B,), before weights:

    - `reward/model/{mean,max,min}`: of `reward_model_scores`. `reward/functions/{mean,max,min}`: of
      `reward_function_scores`.
    - `reward/model/truncated`, `reward/model/spells_special`: fractions of True in `reward_model_truncated`
      (conversations that lost their oldest tokens) and `reward_model_spells_special` (answers whose text
      contains a special token of the reward model).
    """
    if "reward_model_scores" not in batch:
        return {}
    metrics = _summary("reward/model", batch["reward_model_scores"])
    metrics |= _summary("reward/functions", batch["reward_function_scores"])

    for name in ("truncated", "spells_special"):
        metrics[f"reward/model/{name}"] = float(batch[f"reward_model_{name}"].float().mean())
    return metrics


class Estimate(NamedTuple):
    """An estimate with its standard error over prompts.

    The error refers to another draw of prompts from the same distribution. It is None for a single prompt.
    """

    value: float
    standard_error: float | None


def mean_over_prompts(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per prompt, such as the mean score of its samples.

    The standard error is s / sqrt(P), where s is the standard deviation over the P prompts with divisor P -
    1. Samples of the same prompt are correlated, so an error over samples would be too small (Miller 2024,
    arXiv 2411.00640).

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("a mean over prompts needs at least one prompt")
    return Estimate(fmean(values), sqrt(variance(values) / len(values)) if len(values) > 1 else None)


def mean_difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Return the paired difference of two models on the same prompts, in the same order.

    This is the mean of `values` minus `others`. Pairing removes the variance of prompt difficulty from the
    standard error.

    Raises:
        ValueError: The numbers of prompts differ.
    """
    return mean_over_prompts([value - other for value, other in zip(values, others, strict=True)])


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Return the expected maximum of k of the scores.

    The result is the sum over i of s_(i) C(i - 1, k - 1) / C(n, k), with scores in ascending order and i from
    1.

    For scores of 0 and 1 this is pass@k, the probability that at least one of k samples is correct: 1 - C(n -
    c, k) / C(n, k), where c of n samples are correct (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    num_samples = len(scores)
    _check(num_samples, k)
    return sum(score * comb(rank, k - 1) for rank, score in enumerate(sorted(scores))) / comb(num_samples, k)


def majority_at_k(answers: Sequence[Hashable], scores: Sequence[float], k: int) -> float:
    """Return the expected score of the most frequent answer of k samples.

    Ties are broken uniformly at random.

    An answer with m samples wins j of the k votes in C(m, j) ways, times the ways in which the others share k
    - j votes with none above j. If t others tie with it, it gets 1 / (t + 1) of them.

    Args:
        answers: The answer of each sample; equal answers count together.
        scores: The score of each sample, averaged over the samples with the same answer.
    """
    _check(len(answers), k)
    votes = Counter(answers)
    totals: dict[Hashable, float] = defaultdict(float)
    for answer, score in zip(answers, scores, strict=True):
        totals[answer] += score
    expected = 0.0

    for answer, count in votes.items():
        others = [votes[other] for other in votes if other != answer]
        # Integers and fractions are exact and do not overflow, unlike floats.
        ways = sum(
            comb(count, won) * _ways_of_others(others, k - won, won) for won in range(1, min(count, k) + 1)
        )
        expected += totals[answer] / count * float(Fraction(ways) / comb(len(answers), k))

    return expected


def _ways_of_others(counts: Sequence[int], votes: int, most: int) -> Fraction:
    """Return the number of ways to distribute `votes` votes over answers with these sample counts.

    No answer may get more than `most` votes. Each way is divided by 1 + the number of answers that reach
    `most`.
    """
    ways = {(0, 0): 1}  # (votes given, answers at `most`) -> ways
    # Dynamic programming: each answer extends the table of the previous ones.
    for count in counts:
        longer: dict[tuple[int, int], int] = defaultdict(int)
        for (given, tied), number in ways.items():
            for more in range(min(count, most, votes - given) + 1):
                longer[given + more, tied + (more == most)] += number * comb(count, more)
        ways = longer

    return sum(
        (Fraction(number, tied + 1) for (given, tied), number in ways.items() if given == votes), Fraction(0)
    )


def _check(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"k is {k}, but must be between 1 and {num_samples}, the number of samples of the prompt; use "
            f"another k or more samples"
        )
