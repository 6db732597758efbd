"""What ends a run before it learns from numbers that mean something else: checks of the first batch and of
the first update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from megarl.algorithms.masked import map_tokens, moments, token_blocks
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import padded
from megarl.config.schema import DType
from megarl.machine.errors import RunError

# ---- the first batch: engine and trainer must mean the same by a log-prob

_CAUSES_OF_DIFFERENCES = (
    "the engine does not hold the trainer's weights: resharding.verify=always names the tensor",
    "the engine computes in another precision: compare model.dtype with rollout.sglang.server_args (dtype, "
    "quantization, kv_cache_dtype)",
    "the engine changes the distribution before it reports log-probs: penalties or logit processors in "
    "rollout.sglang.server_args",
    "a model whose architecture the engine reads differently (rope scaling, sliding window): compare both "
    "with transformers",
)


class LogProbMismatchError(RunError):
    """Engine and trainer disagree about the samples of the first batch; the message has the numbers and the
    likely causes."""


class LogProbCheck:
    """Looks at the first batch that has tokens drawn by the weights of now; later ones are followed by
    `training/rollout_log_probs_diff_mean`. Of tokens that older weights drew it can say nothing."""

    def __init__(self, max_difference: float) -> None:
        self._max_difference = max_difference
        self.passed = False

    def __call__(self, batch: DataProto) -> None:
        """Raises LogProbMismatchError where the mean of |rollout_log_probs - old_log_probs| over the response
        tokens by the weights of now exceeds the bound."""
        if not self.wants(batch):
            return

        # Only tokens drawn by the current weights can be compared: the trainer scores with those.
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

        if not mean <= self._max_difference:  # a NaN does not pass
            raise LogProbMismatchError(
                self._explain(padded(map_tokens(_difference, mask, rollout, old)), padded(mask), mean)
            )

        self.passed = True

    def wants(self, batch: DataProto) -> bool:
        """None was looked at yet, and this one has such tokens."""
        versions = batch.columns["token_versions"]
        version = batch.meta_info["weight_version"]
        return not self.passed and any(
            bool((block.columns[0] == version).any()) for block in token_blocks(versions, versions)
        )

    def _explain(self, difference: torch.Tensor, mask: torch.Tensor, mean: float) -> str:
        # First tokens come from the engine's prefill, later ones from its decode: report them apart.
        row, position = divmod(int(torch.nan_to_num(difference, nan=torch.inf).argmax()), mask.shape[1])
        first = _mean(difference[:, :1], mask[:, :1])
        later = _mean(difference[:, 1:], mask[:, 1:])

        return (
            f"rollout and actor disagree about the first batch: mean |log-prob difference| {mean:.3g} over "
            f"{int(mask.sum())} tokens, "
            f"more than resharding.max_log_prob_difference={self._max_difference:g}. First tokens of the "
            f"responses: {first}; "
            f"later ones: {later}; largest {float(difference[row, position]):.3g} at sample {row}, token "
            f"{position}. Likely causes:"
            + "".join(f"\n  - {cause}" for cause in _CAUSES_OF_DIFFERENCES)
            + "\nIf the difference is what this precision gives, raise the bound."
        )


def _difference(rollout: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (rollout - old).abs()


def _mean(difference: torch.Tensor, mask: torch.Tensor) -> str:
    return f"{float(difference.sum() / mask.sum()):.3g}" if mask.any() else "none"


# ---- the first update: its ratios must be 1

_CAUSES_OF_RATIOS = (
    "weights that changed between scoring and the update: something else trains or loads them",
    "a model that is not the same function in training as in scoring: dropout in its config.json",
    "log-probs of another temperature or of other rows than those of the update",
)


class _Tolerance(NamedTuple):
    """In nats. mean: of `actor/approx_kl`, over tokens. extreme: of the logarithm of one token's ratio."""

    mean: float
    extreme: float


# Scoring and update compute the same tokens in other micro-batches, so they differ by rounding. Over many
# tokens it averages out: 16,000 tokens of a model of four layers differ by 1e-6 at most and 3e-10 in the mean
# in float32, by 0.01 and 6e-7 in bfloat16. Deep models differ by more, and a run must not end for that; what
# the gate looks for shows in the mean.
_TOLERANCES = {DType.float32: _Tolerance(1e-4, 1e-2), DType.bfloat16: _Tolerance(1e-2, 2.0)}


class FirstRatioError(RunError):
    """The first update's ratios of new to old probabilities are not 1; the message has the numbers and the
    likely causes."""


class FirstRatioCheck:
    """Looks at the first update of a process whose `old_log_probs` were stored; none has come before, so they
    are its own."""

    def __init__(self, dtype: DType) -> None:
        self._tolerance = _TOLERANCES[dtype]
        self._passed = False

    def __call__(self, metrics: Mapping[str, float]) -> None:
        """metrics: of the mini-batch, see ActorLoss; one without a token has no extremes and says nothing.
        Raises FirstRatioError."""
        if self._passed or "actor/ratio_max" not in metrics:
            return

        # The extremes allow for rounding of single tokens; the mean catches a systematic difference.
        low = metrics["actor/ratio_min"]
        high = metrics["actor/ratio_max"]
        mean = metrics["actor/approx_kl"]
        limit = math.exp(self._tolerance.extreme)
        near = 1 / limit <= low and high <= limit

        if not (near and abs(mean) <= self._tolerance.mean):  # a NaN does not pass
            raise FirstRatioError(
                f"the first update's ratios of new to old probabilities are {low:.6g} to {high:.6g}, mean "
                f"log-prob difference {mean:.3g}, "
                f"but the policy has not changed since it was scored: they must be in [{1 / limit:.4g}, "
                f"{limit:.4g}], the mean "
                f"within {self._tolerance.mean:g} of 0. Likely causes:"
                + "".join(f"\n  - {cause}" for cause in _CAUSES_OF_RATIOS)
            )

        self._passed = True
