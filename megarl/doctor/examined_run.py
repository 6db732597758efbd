"""The run whose inputs and machine are checked. Parts that cannot be read are left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megarl.config.roles import model_roles
from megarl.config.schema import Device, RunConfig
from megarl.models.architecture import Architecture
from megarl.plan.placement.placement_plan import PlacementPlan

ROWS = 256  # number of rows of each file that are rendered


@dataclass(frozen=True, kw_only=True)
class ExaminedRun:
    """The run that is checked. Without a configuration only the machine is checked.

    Attributes:
        architectures: The architectures of the models to check, by role.
        num_gpus: The number of GPUs of this machine, as reported by the driver.
        ray_address: The address of the cluster that the run would join; None if it starts its own.
        skipped: The keys of inputs that are not checked, because they are missing or have a known problem.
        num_rows: The number of rows of each data file that are rendered.
    """

    config: RunConfig | None = None
    plan: PlacementPlan | None = None
    architectures: Mapping[str, Architecture] = field(default_factory=dict)
    num_gpus: int = 0
    ray_address: str | None = None
    shared_memory: Path = Path("/dev/shm")
    skipped: Collection[str] = ()
    num_rows: int = ROWS

    @property
    def use_gpu(self) -> bool:
        """Whether the run uses GPUs. `device: auto` uses them if there are any."""
        device = Device.auto if self.config is None else self.config.device
        return self.num_gpus > 0 if device is Device.auto else device is Device.cuda

    @property
    def all_models_known(self) -> bool:
        return self.config is not None and all(
            role.name in self.architectures for role in model_roles(self.config)
        )

    @property
    def processes_here(self) -> int:
        """The number of worker processes on the fullest node; 2 if there is no plan."""
        if self.plan is None:
            return 2
        nodes = [process.node for process in self.plan.processes]
        return max(nodes.count(node) for node in set(nodes))
