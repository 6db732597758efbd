"""Metrics of a step's batch, by the names of the field; each function states its formulas."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megarl.algorithms.masked import masked


def _summary(name: str, x: Tensor) -> dict[str, float]:
    """Mean, maximum and minimum over all elements of x; nothing for an empty x."""
    if x.numel() == 0:
        return {}
    x = x.float()
    return {f"{name}/mean": float(x.mean()), f"{name}/max": float(x.max()), f"{name}/min": float(x.min())}


def data_metrics(batch: Mapping[str, Tensor], max_response_length: int) -> dict[str, float]:
    """Metrics of a whole batch of (B, R) tensors by batch key; `response_mask` is needed, each other key adds its metrics.

    - `critic/score/*` and `critic/rewards/*`: over rows, of the row's sum of `token_level_scores` / `token_level_rewards`.
    - `critic/advantages/*`, `critic/returns/*`, `critic/values/*`: over valid tokens; `std` is the square root of the mean squared
      deviation.
    - `critic/vf_explained_var`: 1 - Var(returns - values) / Var(returns) over valid tokens (0 where Var(returns) is 0).
    - `response_length/{mean,max,min}`: tokens that the model wrote, over rows; `clip_ratio`: share of rows with
      `max_response_length` tokens or more.
    - `prompt_length/{mean,max,min}`: True tokens of `prompt_attention_mask` (B, P), over rows.
    - `training/rollout_probs_diff_{mean,max}`: over valid tokens, |exp(rollout_log_probs) - exp(old_log_probs)|.
    - `training/rollout_log_probs_diff_{mean,max}`: over valid tokens, |rollout_log_probs - old_log_probs|.
    """
    mask = batch["response_mask"]
    lengths = mask.sum(dim=1)
    metrics = _summary("response_length", lengths)
    if lengths.numel() > 0:
        metrics["response_length/clip_ratio"] = float((lengths >= max_response_length).float().mean())
    if "prompt_attention_mask" in batch:
        metrics |= _summary("prompt_length", batch["prompt_attention_mask"].sum(dim=1))
    for key, name in (("token_level_scores", "score"), ("token_level_rewards", "rewards")):
        if key in batch:
            metrics |= _summary(f"critic/{name}", masked(batch[key], mask).sum(dim=1))
    for name in ("advantages", "returns", "values"):
        if name in batch:
            metrics |= _summary(f"critic/{name}", batch[name][mask])
            if mask.any():
                metrics[f"critic/{name}/std"] = float(batch[name][mask].std(correction=0))
    if "values" in batch and "returns" in batch:
        metrics["critic/vf_explained_var"] = _explained_variance(batch["values"][mask], batch["returns"][mask])
    if "rollout_log_probs" in batch and "old_log_probs" in batch:
        rollout, old = batch["rollout_log_probs"][mask], batch["old_log_probs"][mask]
        for name, difference in (("probs", (rollout.exp() - old.exp()).abs()), ("log_probs", (rollout - old).abs())):
            metrics[f"training/rollout_{name}_diff_mean"] = float(difference.mean()) if difference.numel() else 0.0
            metrics[f"training/rollout_{name}_diff_max"] = float(difference.max()) if difference.numel() else 0.0
    return metrics


def age_metrics(batch: Mapping[str, Tensor], version: int) -> dict[str, float]:
    """How many weight versions before `version`, the one that is trained, each token of `response_mask` was drawn.

    - `rollout/age/{mean,max}`: of version - `token_versions` (B, R), over valid tokens.
    - `training/rollout_log_probs_diff_mean/{current,older}`: as in data_metrics, over the tokens of age 0 and the others; where there are
      older ones, and the trainer's own log-probs.
    """
    mask = batch["response_mask"]
    ages = (version - batch["token_versions"])[mask]
    if not len(ages):
        return {}
    metrics = {"rollout/age/mean": float(ages.double().mean()), "rollout/age/max": float(ages.max())}
    if "old_log_probs" in batch and (ages > 0).any():
        difference = (batch["rollout_log_probs"] - batch["old_log_probs"])[mask].abs()
        for name, of_age in (("current", ages == 0), ("older", ages > 0)):
            if of_age.any():
                metrics[f"training/rollout_log_probs_diff_mean/{name}"] = float(difference[of_age].mean())
    return metrics


def reward_model_metrics(batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Nothing for a batch without `reward_model_scores`. All (B,), before weights:

    - `reward/model/{mean,max,min}`: of `reward_model_scores`; `reward/functions/{mean,max,min}`: of `reward_function_scores`.
    - `reward/model/truncated`, `reward/model/spells_special`: shares of True in `reward_model_truncated` (conversations that lost their
      oldest tokens) and `reward_model_spells_special` (answers whose text has a special token of the reward model in it).
    """
    if "reward_model_scores" not in batch:
        return {}
    metrics: dict[str, float] = {}
    for name, scores in (("model", batch["reward_model_scores"]), ("functions", batch["reward_function_scores"])):
        metrics |= _summary(f"reward/{name}", scores)
    for name in ("truncated", "spells_special"):
        metrics[f"reward/model/{name}"] = float(batch[f"reward_model_{name}"].float().mean())
    return metrics


def _explained_variance(values: Tensor, returns: Tensor) -> float:
    if returns.numel() == 0:
        return 0.0
    variance = float(returns.var(correction=0))
    return 1.0 - float((returns - values).var(correction=0)) / variance if variance > 0 else 0.0
