"""Policy losses per token. One module each; this dictionary is what there is."""

from __future__ import annotations

from megarl.algorithms.policy_losses.cispo import cispo
from megarl.algorithms.policy_losses.clip_cov import clip_cov, select_for_clip_cov
from megarl.algorithms.policy_losses.dppo import dppo_kl, dppo_tv
from megarl.algorithms.policy_losses.gmpo import gmpo
from megarl.algorithms.policy_losses.gpg import gpg
from megarl.algorithms.policy_losses.gspo import gspo
from megarl.algorithms.policy_losses.inputs import PolicyInputs, PolicyLoss, TokenLosses
from megarl.algorithms.policy_losses.kl_cov import kl_cov, select_for_kl_cov
from megarl.algorithms.policy_losses.ppo_clip import ppo_clip
from megarl.algorithms.policy_losses.sapo import sapo
from megarl.config.schema import PolicyLossKind

__all__ = ["POLICY_LOSSES", "PolicyInputs", "PolicyLoss", "TokenLosses"]

POLICY_LOSSES: dict[PolicyLossKind, PolicyLoss] = {
    PolicyLossKind.ppo_clip: PolicyLoss(ppo_clip),
    PolicyLossKind.gspo: PolicyLoss(gspo),
    PolicyLossKind.gmpo: PolicyLoss(gmpo),
    PolicyLossKind.cispo: PolicyLoss(cispo),
    PolicyLossKind.sapo: PolicyLoss(sapo),
    PolicyLossKind.gpg: PolicyLoss(gpg),
    PolicyLossKind.clip_cov: PolicyLoss(clip_cov, prepare=select_for_clip_cov),
    PolicyLossKind.kl_cov: PolicyLoss(kl_cov, prepare=select_for_kl_cov),
    PolicyLossKind.dppo_tv: PolicyLoss(dppo_tv),
    PolicyLossKind.dppo_kl: PolicyLoss(dppo_kl),
}
