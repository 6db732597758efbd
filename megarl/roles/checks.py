"""Checks of the first batch and update, which stop a run that would train on wrong numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from megarl.algorithms.masked import map_tokens, moments, token_blocks
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import padded
from megarl.config.schema import DType
from megarl.machine.errors import RunError, counted

# ---- first batch: engine and trainer must agree on log-probs

_CAUSES_OF_DIFFERENCES = (
    "the engine does not have the trainer's weights: resharding.verify=always names the tensor",
    "the engine computes in another precision: compare model.dtype with rollout.sglang.server_args (dtype, "
    "quantization, kv_cache_dtype)",
    "the engine changes the distribution before it reports log-probs: penalties or logit processors in "
    "rollout.sglang.server_args",
    "a model whose architecture the engine reads differently (rope scaling, sliding window): compare both "
    "with transformers",
)


class LogProbMismatchError(RunError):
    """Engine and trainer disagree about the samples of the first batch.

    The message has the numbers and likely causes.
    """


class LogProbCheck:
    """Checks the first batch with tokens sampled by the current weights.

    Later batches are tracked by `training/rollout_log_probs_diff_mean`. Tokens sampled by older weights
    cannot be checked.
    """

    def __init__(self, max_difference: float) -> None:
        self._max_difference = max_difference
        self.passed = False

    def __call__(self, batch: DataProto) -> None:
        """Compare the log-probs.

        Raises:
            LogProbMismatchError: The mean of |rollout_log_probs - old_log_probs| over response tokens sampled
                by the current weights exceeds the bound.
        """
        if not self.wants(batch):
            return

        # Only tokens sampled by the current weights are comparable: the trainer scores with those.
        columns = batch.columns
        version = batch.meta_info["weight_version"]
        mask = map_tokens(
            lambda versions: versions == version,
            columns["response_mask"],
            columns["token_versions"],
            dtype=torch.bool,
        )
        rollout = columns["rollout_log_probs"]
        old = columns["old_log_probs"]
        mean = moments(_difference, mask, rollout, old).mean

        if not mean <= self._max_difference:  # rejects NaN as well
            raise LogProbMismatchError(
                self._explain(padded(map_tokens(_difference, mask, rollout, old)), padded(mask), mean)
            )

        self.passed = True

    def wants(self, batch: DataProto) -> bool:
        """Return whether no batch has been checked yet and this one has such tokens."""
        versions = batch.columns["token_versions"]
        version = batch.meta_info["weight_version"]
        return not self.passed and any(
            bool((block.columns[0] == version).any()) for block in token_blocks(versions, versions)
        )

    def _explain(self, difference: torch.Tensor, mask: torch.Tensor, mean: float) -> str:
        # The first token comes from the engine's prefill, later ones from its decode: report them separately.
        row, position = divmod(int(torch.nan_to_num(difference, nan=torch.inf).argmax()), mask.shape[1])
        first = _mean(difference[:, :1], mask[:, :1])
        later = _mean(difference[:, 1:], mask[:, 1:])

        return (
            f"rollout and actor disagree about the first batch: mean |log-prob difference| {mean:.3g} over "
            f"{counted(int(mask.sum()), 'token')}, more than "
            f"resharding.max_log_prob_difference={self._max_difference:g}. First tokens of the responses: "
            f"{first}; later ones: {later}; largest {float(difference[row, position]):.3g} at sample {row}, "
            f"token {position}. Likely causes:"
            + "".join(f"\n  - {cause}" for cause in _CAUSES_OF_DIFFERENCES)
            + "\nIf this difference is normal for the precision, raise the bound."
        )


def _difference(rollout: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (rollout - old).abs()


def _mean(difference: torch.Tensor, mask: torch.Tensor) -> str:
    return f"{float(difference.sum() / mask.sum()):.3g}" if mask.any() else "none"


# ---- first update: its ratios must be 1

_CAUSES_OF_RATIOS = (
    "weights that changed between scoring and the update: something else trains or loads them",
    "a model that computes different outputs in training and in scoring: dropout in its config.json",
    "log-probs with another temperature, or of other rows than those of the update",
)


# Tolerances in nats: for the mean over tokens (`actor/approx_kl`), and for the log ratio of one token.
# Scoring and update compute the same tokens in different micro-batches, so they differ by rounding. Over many
# tokens it averages out: 16,000 tokens of a model of four layers differ by at most 1e-6, and 3e-10 in the
# mean, in float32; by 0.01 and 6e-7 in bfloat16. Deep models differ by more, which must not end a run; the
# errors that this check looks for show in the mean.
_TOLERANCES = {DType.float32: (1e-4, 1e-2), DType.bfloat16: (1e-2, 2.0)}


class FirstRatioError(RunError):
    """The first update's ratios of new to old probabilities are not 1.

    The message has the numbers and likely causes.
    """


class FirstRatioCheck:
    """Checks the first update of a process that has stored `old_log_probs`.

    No update came before it, so the stored log-probs are its own.
    """

    def __init__(self, dtype: DType) -> None:
        self._mean_tolerance, self._token_tolerance = _TOLERANCES[dtype]  # in nats
        self._passed = False

    def __call__(self, metrics: Mapping[str, float]) -> None:
        """Check the metrics of the mini-batch; see ActorLoss.

        A mini-batch without tokens has no extremes and is skipped.

        Raises:
            FirstRatioError: The ratios are not 1.
        """
        if self._passed or "actor/ratio_max" not in metrics:
            return

        # The extremes allow for rounding of single tokens; the mean catches a systematic difference.
        low = metrics["actor/ratio_min"]
        high = metrics["actor/ratio_max"]
        mean = metrics["actor/approx_kl"]
        limit = math.exp(self._token_tolerance)
        near = 1 / limit <= low and high <= limit

        if not (near and abs(mean) <= self._mean_tolerance):  # rejects NaN as well
            raise FirstRatioError(
                f"the first update's ratios of new to old probabilities are {low:.6g} to {high:.6g}, mean "
                f"log-prob difference {mean:.3g}, but the policy has not changed since it was scored: they "
                f"must be in [{1 / limit:.4g}, {limit:.4g}], the mean within {self._mean_tolerance:g} of 0. "
                "Likely causes:" + "".join(f"\n  - {cause}" for cause in _CAUSES_OF_RATIOS)
            )

        self._passed = True
