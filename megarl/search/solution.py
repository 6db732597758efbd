"""The results of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megarl.config.schema import PPOConfig
from megarl.placement.memory import DeviceMemory
from megarl.placement.placement_plan import PlacementPlan
from megarl.search.choices import Choice
from megarl.search.costs import StepTime
from megarl.search.engines import EngineChoice
from megarl.search.placements import Pool
from megarl.search.rejections import Rejections


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A complete configuration that `megarl check` accepts, with its predicted step.

    Attributes:
        choices: What is chosen for each unit, by name.
        engines: What is chosen for the engines.
    """

    config: PPOConfig
    plan: PlacementPlan
    memory: Sequence[DeviceMemory]
    step: StepTime
    pools: tuple[Pool, ...]
    choices: Mapping[str, Choice]
    engines: EngineChoice

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def kind(self) -> tuple[object, ...]:
        """The pools and parallel sizes, which distinguish it in a list of results."""
        return (
            self.pools,
            tuple(
                replace(each.parallel, virtual_pipeline_parallel_size=None) for each in self.choices.values()
            ),
            (self.engines.num_replicas, self.engines.tensor),
            self.engines.max_staleness > 0,
        )


class Found(NamedTuple):
    """The result of a search.

    Attributes:
        solutions: The best solutions, each of another kind, from fast to slow.
        rejections: What was considered, and why the rest was left out.
    """

    solutions: tuple[Solution, ...]
    rejections: Rejections
