"""The section of profiler traces."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.config.schema.keys import Reader, only_with


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Selects the steps, models and ranks that write a profiler trace to `profile/` of the run."""

    steps: list[int] = field(default_factory=list)  # steps that are profiled, from 1; empty: none
    # models, such as actor, critic or reference
    roles: list[str] = only_with(field(default_factory=lambda: ["actor"]), Reader(".steps", example="[3]"))
    # ranks of each of these models, from 0
    ranks: list[int] = only_with(field(default_factory=lambda: [0]), Reader(".steps", example="[3]"))
