"""The section `placement`: the devices of each role."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.schema.keys import Reader, only_with, ranged


class PlacementStrategy(str, Enum):
    # three pools of devices: actor and reference, critic and reward, rollout
    split_collocate = "split_collocate"
    hybrid = "hybrid"  # as split_collocate, but the rollout shares the actor's devices in time
    fully_collocate = "fully_collocate"  # all roles share the same devices in time
    stand_alone = "stand_alone"  # each role has its own devices
    custom = "custom"  # as specified by `roles` and `pools`


class OverBudget(str, Enum):
    refuse = "refuse"  # the run does not start; the error names the device
    warn = "warn"  # the run logs a warning and continues


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    strategy: PlacementStrategy = PlacementStrategy.split_collocate  # see Placements
    num_nodes: int = ranged(1, at_least=1, at_most=10000)  # nodes over which the pools are spread
    # devices of each node; null: as many as the roles need
    devices_per_node: int | None = ranged(None, at_least=1, at_most=128)
    # the pool of each role; the roles of a pool share its devices in time
    roles: dict[str, str] = only_with(
        field(default_factory=dict), Reader(".strategy", (PlacementStrategy.custom,)), is_refused=True
    )
    # the devices of each pool, as its number of devices on each node
    pools: dict[str, list[int]] = only_with(
        field(default_factory=dict), Reader(".strategy", (PlacementStrategy.custom,)), is_refused=True
    )
    # memory budget of one device, in 2**30 bytes; null: the plan's estimate is not checked
    device_memory_gb: float | None = ranged(None, above=0)
    # peak of one device, for `perf/mfu/*`; null: the bfloat16 peak of a known GPU
    device_peak_tflops: float | None = ranged(None, above=0)
    # kind of device, for predicted step times: a name in configs/devices, or a file of `megarl calibrate`,
    # relative to the current folder; null: a run logs no prediction
    device_profile: str | None = None
    # how to handle a device whose estimate exceeds its memory
    over_budget: OverBudget = only_with(OverBudget.refuse, Reader(".device_memory_gb", example="72"))
