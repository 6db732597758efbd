"""The gate of the first batch: engine and trainer must mean the same by a log-prob, or the run ends before it learns from noise."""

from __future__ import annotations

import torch

from megarl.batch.data_proto import DataProto
from megarl.config.errors import RunError

_CAUSES = (
    "the engine does not hold the trainer's weights: resharding.verify=always names the tensor",
    "the engine computes in another precision: compare model.dtype with rollout.sglang.server_args (dtype, quantization, kv_cache_dtype)",
    "the engine changes the distribution before it reports log-probs: penalties or logit processors in rollout.sglang.server_args",
    "a model whose architecture the engine reads differently (rope scaling, sliding window): compare both with transformers",
)


class LogProbMismatchError(RunError):
    """Engine and trainer disagree about the samples of the first batch; the message has the numbers and the likely causes."""


class LogProbGate:
    """Looks at the first batch that it is given; later ones are followed by `training/rollout_log_probs_diff_mean`."""

    def __init__(self, max_difference: float) -> None:
        self._max_difference = max_difference
        self.passed = False

    def __call__(self, batch: DataProto) -> None:
        """Raises LogProbMismatchError where the mean of |rollout_log_probs - old_log_probs| over the response tokens exceeds the bound."""
        if self.passed:
            return
        tensors = batch.tensors
        mask = tensors["response_mask"]
        difference = torch.where(mask, (tensors["rollout_log_probs"] - tensors["old_log_probs"]).abs(), 0.0)
        mean = float(difference.sum() / mask.sum().clamp(min=1))
        if not mean <= self._max_difference:  # a NaN does not pass
            raise LogProbMismatchError(self._explain(difference, mask, mean))
        self.passed = True

    def _explain(self, difference: torch.Tensor, mask: torch.Tensor, mean: float) -> str:
        row, position = divmod(int(torch.nan_to_num(difference, nan=torch.inf).argmax()), mask.shape[1])
        first, later = _mean(difference[:, :1], mask[:, :1]), _mean(difference[:, 1:], mask[:, 1:])
        return (
            f"rollout and actor disagree about the first batch: mean |log-prob difference| {mean:.3g} over {int(mask.sum())} tokens, "
            f"more than resharding.max_log_prob_difference={self._max_difference:g}. First tokens of the responses: {first}; "
            f"later ones: {later}; largest {float(difference[row, position]):.3g} at sample {row}, token {position}. Likely causes:"
            + "".join(f"\n  - {cause}" for cause in _CAUSES)
            + "\nIf the difference is what this precision gives, raise the bound."
        )


def _mean(difference: torch.Tensor, mask: torch.Tensor) -> str:
    return f"{float(difference.sum() / mask.sum()):.3g}" if mask.any() else "none"
