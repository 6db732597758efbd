"""The subject of `megarl doctor`: a run's configuration, if it can be read, and its plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.config.load import read_config
from megarl.config.roles import model_roles
from megarl.config.schema import Device, RunConfig
from megarl.config.validate import read_architectures
from megarl.doctor.check_result import CheckResult, doubtful, good, wrong
from megarl.doctor.checked_config import find_on_hub, problems_of, violations_here
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.placement.placement_plan import PlacementPlan
from megarl.placement.plan import plan_placement

CONFIGURATION = "configuration"


@dataclass(frozen=True, kw_only=True)
class ExaminedRun:
    """The run that is checked. Without a configuration only the machine is checked.

    Attributes:
        architectures: The architectures of the readable models, by role.
        num_gpus: The number of GPUs of this machine, as reported by the driver.
        ray_address: The address of the cluster that the run would join; None if it starts its own.
        unfetched: The keys of inputs on a hub that are not fetched yet.
    """

    config: RunConfig | None = None
    plan: PlacementPlan | None = None
    architectures: Mapping[str, Architecture] = field(default_factory=dict)
    num_gpus: int = 0
    ray_address: str | None = None
    shared_memory: Path = Path("/dev/shm")
    unfetched: Collection[str] = ()

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


def read_subject(
    path: str | None, overrides: Sequence[str], num_gpus: int, ray_address: str | None
) -> tuple[ExaminedRun, list[CheckResult]]:
    """Read the run in the file `path`, and return its problems.

    Parts that cannot be read are omitted, so that the rest is checked.
    """
    if path is None:
        return ExaminedRun(num_gpus=num_gpus, ray_address=ray_address), []
    try:
        read = read_config(RunConfig, path, overrides)
    except ConfigError as error:
        return ExaminedRun(num_gpus=num_gpus, ray_address=ray_address), list(
            _problems(error.source, error.problems)
        )

    loaded = find_on_hub(read, fetch=False)
    config = loaded.config
    problems = problems_of(loaded, violations_here(loaded))
    results = list(_problems(path, problems)) or [good(CONFIGURATION, f"{path} has no errors")]
    results += [doubtful(CONFIGURATION, line, "fetch it now with `hf download`") for line in loaded.absent]
    # With schema problems the configuration is incomplete, so nothing further is checked.
    if read.problems:
        return ExaminedRun(num_gpus=num_gpus, ray_address=ray_address), results

    try:
        plan = plan_placement(config)
    except ConfigError:  # already reported in `problems`
        plan = None

    architectures, _ = read_architectures(config)
    return ExaminedRun(
        config=config,
        plan=plan,
        architectures=architectures,
        num_gpus=num_gpus,
        ray_address=ray_address,
        unfetched=[line.partition(":")[0] for line in loaded.absent],
    ), results


def _problems(source: str, problems: Sequence[str]) -> Iterator[CheckResult]:
    for problem in problems:
        yield wrong(
            CONFIGURATION,
            problem,
            f"change it in {source} or on the command line; `megarl check` reports it too",
        )
