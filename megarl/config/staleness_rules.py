"""What a run must satisfy whose generation runs ahead of training (`rollout.max_staleness` above 0)."""

from __future__ import annotations

from megarl.config.schema import CorrectionLevel, PlacementStrategy, PPOConfig
from megarl.config.violation import Violation, Violations

_KEY = "rollout.max_staleness"
_TAKING_TURNS = (PlacementStrategy.hybrid, PlacementStrategy.fully_collocate)


def generation_ahead(config: PPOConfig) -> Violations:
    staleness, algorithm, placement = config.rollout.max_staleness, config.algorithm, config.placement
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
    if algorithm.dynamic_sampling.enabled:
        yield Violation(
            (_KEY, "algorithm.dynamic_sampling.enabled"),
            f"is {staleness}: dynamic sampling draws prompts in the place of others when a step's samples are scored, which generation "
            "ahead of training cannot do yet; use dynamic_sampling.enabled=false, or max_staleness=0",
        )
