"""The section of profiler traces."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Selects the steps, models and ranks that write a profiler trace to `profile/` of the run."""

    steps: list[int] = field(default_factory=list)  # steps that are profiled, from 1; empty: none
    roles: list[str] = field(default_factory=lambda: ["actor"])  # models, such as actor, critic or reference
    ranks: list[int] = field(default_factory=lambda: [0])  # ranks of each of these models, from 0
