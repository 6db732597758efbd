"""What a run must satisfy whose generation runs ahead of training (`rollout.max_staleness` above 0)."""

from __future__ import annotations

from megarl.config.schema import CorrectionLevel, Late, OnUpdate, PlacementStrategy, PPOConfig
from megarl.config.violation import Violation, Violations

_KEY = "rollout.max_staleness"
_TAKING_TURNS = (PlacementStrategy.hybrid, PlacementStrategy.fully_collocate)


def generation_ahead(config: PPOConfig) -> Violations:
    staleness, algorithm, placement = config.rollout.max_staleness, config.algorithm, config.placement
    if config.rollout.late is Late.mask and (not staleness or config.rollout.on_update is OnUpdate.drain):
        other = _KEY if not staleness else "rollout.on_update"
        yield Violation(
            ("rollout.late", other),
            f"is mask, but with {other.partition('.')[2]}={'0' if not staleness else 'drain'} no sample is ever late; use late=wait, or "
            "max_staleness above 0 and on_update=go_on",
        )
    if config.rollout.max_error_rate and not staleness:
        yield Violation(
            ("rollout.max_error_rate", _KEY),
            f"is {config.rollout.max_error_rate:g}, but with max_staleness=0 nothing replaces a prompt that is dropped; use "
            "max_error_rate=0, or max_staleness above 0",
        )
    if not staleness:
        return
    correction = algorithm.rollout_correction
    if correction.level is CorrectionLevel.none and not correction.bypass:
        yield Violation(
            (_KEY, "algorithm.rollout_correction.level"),
            f"is {staleness}: samples are then by older weights than those that are trained, and nothing corrects for it; use "
            "algorithm.rollout_correction.level=token (truncated importance weights) or sequence, or rollout_correction.bypass=true",
        )
    pool = placement.roles.get("rollout") if placement.strategy is PlacementStrategy.custom else None
    others = sorted(role for role, other in placement.roles.items() if role != "rollout" and other == pool and pool is not None)
    if placement.strategy in _TAKING_TURNS or others:
        whom = ", ".join(others) or "the actor"
        yield Violation(
            (_KEY, "placement.strategy"),
            f"is {staleness}: the engines generate while the other roles train, but in this placement they take turns with {whom} on the "
            "same devices; use split_collocate or stand_alone, or max_staleness=0",
        )
    if algorithm.dynamic_sampling.enabled and config.reward.model.path is not None:
        yield Violation(
            (_KEY, "algorithm.dynamic_sampling.enabled", "reward.model.path"),
            f"is {staleness}: dynamic sampling looks at the scores of each prompt as soon as it has its samples, and a reward model scores "
            "whole steps; use reward functions alone, dynamic_sampling.enabled=false, or max_staleness=0",
        )
