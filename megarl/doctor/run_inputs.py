"""Finds the inputs of a run: models on this machine, published ones with only a `config.json`, and the hub.

`megarl train` requires all inputs of a run on its machine. The commands that only plan a run (`check`,
`plan`, `rehearse`, and a submission to a cluster) require only the `config.json` of each model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import constants

from megarl.config.load import Loaded, is_on_cuda, read_config, resolved
from megarl.config.roles import model_roles
from megarl.config.schema import Device, PPOConfig, RunConfig
from megarl.config.shipped import with_published_models
from megarl.config.sources import is_hub_name
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.step_time.device import assumed_profile, with_budget

# A machine without GPUs may run a role of this many ranks. A larger layout is meant for GPUs.
_MOST_CPU_RANKS = 4
ROWS = 256  # number of rows of each file that are rendered


def find_planned[Run: RunConfig](schema: type[Run], path: str, overrides: Sequence[str] = ()) -> Loaded[Run]:
    """Find the inputs of a run that is only planned here, with the device and the memory that it will have.

    `device: auto` is planned as CUDA if a role has more ranks than a machine without GPUs runs. GPUs without
    a memory budget have that of their kind, by default an H100's.
    """
    loaded = read_config(schema, path, overrides)
    assumed = []
    if _is_meant_for_gpus(loaded.config):
        # Problems are those without the override, which would hide a missing or unknown device.
        loaded = replace(loaded, config=read_config(schema, path, [*overrides, "device=cuda"]).config)
        assumed.append(
            "device: planned as cuda, because the layout needs several GPUs and this machine has none; "
            "device=cpu plans the run for a CPU"
        )

    loaded = find_inputs(loaded)
    config = loaded.config
    if config.placement.device_memory_gb is None and is_on_cuda(config.device):
        try:
            profile = assumed_profile(config)
        except ConfigError:  # reported by the check of the device profile
            return replace(loaded, warnings=tuple(assumed))
        config = with_budget(config, profile)
        assumed.append(
            f"placement.device_memory_gb: not set, so the plan has {config.placement.device_memory_gb:g} "
            f"GiB, nine tenths of {profile.name}; set it, or placement.device_profile, for other GPUs"
        )

    return replace(loaded, config=config, warnings=tuple(assumed))


def _is_meant_for_gpus(config: RunConfig) -> bool:
    if config.device is not Device.auto or is_on_cuda(config.device):
        return False
    ranks = [role.parallel.world_size for role in model_roles(config)]
    if isinstance(config, PPOConfig):
        ranks.append(config.rollout.num_replicas * config.rollout.devices_per_engine)
    return max(ranks) > _MOST_CPU_RANKS or config.placement.num_nodes > 1


def find_inputs[Run: RunConfig](loaded: Loaded[Run]) -> Loaded[Run]:
    """Find a folder with a `config.json` for each model, for a run that need not start on this machine.

    In order: the given folder, the hub's cache, the `models` folders next to the configuration and in
    `configs/`, the hub.
    """
    config, lines = with_published_models(_from_cache(loaded.config), loaded.source)
    return find_on_hub(replace(loaded, config=config, absent=tuple(lines)), fetch=False)


def find_on_hub[Run: RunConfig](loaded: Loaded[Run], fetch: bool) -> Loaded[Run]:
    """Replace names on the hub with local folders and files. With `fetch`, download weights and data too."""
    config = resolved(loaded.config)
    if not names_a_hub(config):
        return replace(loaded, config=config)

    # Imported here, because the hub's library takes half a second to import.
    from megarl.data.hub import with_hub_inputs

    config, lines, problems = with_hub_inputs(config, fetch)
    return replace(
        loaded,
        config=config,
        problems=(*loaded.problems, *problems),
        refused=loaded.refused | {problem.partition(":")[0] for problem in problems},
        absent=(*loaded.absent, *lines),
    )


def names_a_hub(config: RunConfig) -> bool:
    """Whether a model or a data file is given by a name on the Hugging Face hub."""
    return any(
        map(
            is_hub_name,
            (*(role.path for role in model_roles(config)), *config.data.train_files, *config.data.val_files),
        )
    )


def _from_cache[Run: RunConfig](config: Run) -> Run:
    # The folders of the hub's cache are looked for here, because its library takes half a second to import.
    cache = Path(constants.HF_HUB_CACHE)
    names = [role.path for role in model_roles(config) if is_hub_name(role.path)]
    if not any((cache / f"models--{name.replace('/', '--')}").is_dir() for name in names):
        return config
    from megarl.data.hub import with_cached_models

    return with_cached_models(config)


# ---- the run that is checked


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
