"""The section `placement`: which role runs on which devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.schema.keys import ranged


class PlacementStrategy(str, Enum):
    split_collocate = "split_collocate"  # actor and reference, critic and reward, rollout: side by side
    hybrid = "hybrid"  # as split_collocate, but the rollout takes turns with the actor on its devices
    fully_collocate = "fully_collocate"  # all roles take turns on the same devices
    stand_alone = "stand_alone"  # each role has devices of its own
    custom = "custom"  # as `roles` and `pools` say


class OverBudget(str, Enum):
    refuse = "refuse"  # the run does not start, and says which device
    warn = "warn"  # it is said, and the run continues


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    strategy: PlacementStrategy = PlacementStrategy.split_collocate  # see the page on placements
    num_nodes: int = ranged(1, at_least=1, at_most=10000)  # the plan's pools are spread over so many
    devices_per_node: int | None = ranged(None, at_least=1, at_most=128)  # None: as many as the roles need
    # custom: role -> pool; the roles of one pool take turns
    roles: dict[str, str] = field(default_factory=dict)
    pools: dict[str, list[int]] = field(default_factory=dict)  # custom: pool -> its devices on each node
    # of one device, in 2**30 bytes; None: nothing is compared with the plan's sum
    device_memory_gb: float | None = ranged(None, above=0)
    # what `perf/mfu/*` is a share of; None: a known GPU's, for bfloat16
    device_peak_tflops: float | None = ranged(None, above=0)
    over_budget: OverBudget = OverBudget.refuse  # what happens where a device would hold more than it has
