"""What a batch's scores are made of, where a reward model has a part in them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


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
        metrics |= {f"reward/{name}/{kind}": float(value) for kind, value in _summary(scores.float()).items()}
    for name in ("truncated", "spells_special"):
        metrics[f"reward/model/{name}"] = float(batch[f"reward_model_{name}"].float().mean())
    return metrics


def _summary(scores: Tensor) -> dict[str, Tensor]:
    return {"mean": scores.mean(), "max": scores.max(), "min": scores.min()}
