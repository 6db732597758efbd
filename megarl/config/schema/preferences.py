"""The section `loss` of runs that train on pairs of answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megarl.config.schema.keys import ranged


class DPOLossKind(str, Enum):
    """The loss of a pair. The names are TRL's."""

    sigmoid = "sigmoid"  # -log sigmoid(beta * difference of the log-ratios) (Rafailov et al. 2023)
    # (difference of the mean log-ratios per token - 1 / (2 beta))^2 (Azar et al. 2023)
    ipo = "ipo"
    # -log sigmoid(beta * difference of the mean log-ratios per token), which does not favor long answers
    # (Lambert et al. 2024)
    sigmoid_norm = "sigmoid_norm"


@dataclass(frozen=True, kw_only=True)
class DPOLossConfig:
    kind: DPOLossKind = DPOLossKind.sigmoid  # loss of a pair; see Preferences
    # how strongly the policy is held to the reference; with sigmoid_norm, use values such as 5
    beta: float = ranged(0.1, above=0)


@dataclass(frozen=True, kw_only=True)
class RewardModelLossConfig:
    """The Bradley-Terry loss, -log sigmoid(score of chosen - score of rejected - margin)."""

    # weight of the mean squared sum of a pair's scores, which keeps scores around 0 (Eisenstein et al. 2023),
    # such as 0.01
    center_coefficient: float = ranged(0.0, at_least=0)
