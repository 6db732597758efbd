"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2).

Groups whose samples all have the same score carry no signal. They are dropped, and others are generated in
their place. The rollout buffer asks for each scored group whether it is trained; the staleness controller
lets later groups move up, or begins another round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from megarl.algorithms.groups import rows_with_signal
from megarl.batch.branches import episode_numbers
from megarl.batch.data_proto import DataProto
from megarl.machine.errors import RunError
from megarl.rollout.driver.sample_rows import StepGroups

_MARGIN = 1.2  # A few surplus groups cost less than one more round.


class NoSignalError(RunError):
    """Too few prompts of a step have samples that differ in score, and no further prompts may be dropped."""


class DynamicSampling:
    """Decides by the scores of groups which of them a step trains.

    Args:
        max_dropped: Maximum number of groups that may be dropped for a step.
    """

    def __init__(self, max_dropped: int) -> None:
        self.max_dropped = max_dropped
        self._scores: list[float] = []  # that have decided since the last step was taken

    def is_trained(self, uid: str, scores: Sequence[float]) -> bool:
        """Return whether a group is trained, given the scores of its scored samples."""
        self._scores += scores
        values = torch.tensor(scores, dtype=torch.float64)
        return bool(rows_with_signal(values, np.full(len(scores), uid)).any())

    def end_step(self) -> None:
        self._scores = []

    def error(self, step: int, wanted: int, num_kept: int, num_dropped: int) -> NoSignalError:
        """Return the error of a step for which too many groups were dropped.

        Args:
            wanted: Number of groups that the step trains.
        """
        scores = np.array(self._scores)

        # Scoring may have failed for every sample.
        spread = f"from {scores.min():.3g} to {scores.max():.3g}" if len(scores) else "no sample was scored"
        mean = f"{scores.mean():.3g}" if len(scores) else "unknown"

        return NoSignalError(
            f"step {step}: only {num_kept} of {num_kept + num_dropped} prompts have samples with different "
            f"scores, and {wanted} are needed; the mean score is {mean}, {spread}, and all "
            f"algorithm.dynamic_sampling.max_generations={self.max_dropped // wanted + 1} generations are "
            "used up. Raise it, or rollout.n, or train on prompts that are neither always solved nor out of "
            "reach"
        )


def num_to_replace(num_wanted: int, num_kept: int, num_decided: int) -> int:
    """Return the number of groups of a further round.

    The result exceeds the number that suffices at the current rate of kept groups by a margin, and is at most
    a whole step.
    """
    missing = _MARGIN * (num_wanted - num_kept)
    share = num_kept / num_decided
    return num_wanted if missing >= share * num_wanted else math.ceil(missing / share)


def select_trained(batch: DataProto, groups: StepGroups, n: int) -> tuple[DataProto, dict[str, float]]:
    """Return the samples of the groups that are trained, and the metrics of the step.

    The metrics are `dynamic_sampling/num_generations`, the rounds of generation; `num_prompts`, the prompts
    sampled; `num_without_signal`, those of them that were dropped; `num_surplus`, those that had a signal but
    were not needed; `score_mean`, the mean over all samples.

    Args:
        batch: The scored samples of all groups.
        n: Number of samples of a group.
    """
    num_prompts = len(groups.is_trained)
    metrics = {
        "num_generations": groups.num_rounds,
        "num_prompts": num_prompts,
        "num_without_signal": num_prompts - sum(groups.is_trained) - groups.num_surplus,
        "num_surplus": groups.num_surplus,
        "score_mean": batch.non_tensor_batch["score"].astype(np.float64).mean(),
    }

    return batch.select_idxs(np.repeat(groups.is_trained, n)[episode_numbers(batch)]), {
        f"dynamic_sampling/{name}": float(value) for name, value in metrics.items()
    }
