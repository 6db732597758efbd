"""Loads a configuration and runs all checks that start no process, and reports all problems together.

`megarl train` requires all inputs of a run on its machine. The commands that only plan a run (`check`,
`plan`, `rehearse`, and a submission to a cluster) require only the `config.json` of each model: other missing
inputs are listed, and existing ones are checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megarl.config.load import Loaded, is_on_cuda, read_config, resolved
from megarl.config.published import with_published_models
from megarl.config.roles import model_roles
from megarl.config.rules.machine import missing, writable_folders
from megarl.config.schema import Device, PPOConfig, RolloutConfig, RolloutEngineKind, RunConfig
from megarl.config.sources import is_hub_name
from megarl.config.validate import read_architectures, validate
from megarl.config.violation import Absence, Violation
from megarl.machine.errors import ConfigError
from megarl.placement.memory import budget_problems, plan_memory, refuses
from megarl.placement.plan import plan_placement
from megarl.placement.transport import choose_transport
from megarl.step_time.device import assumed_profile, with_budget

# Keys that a placement depends on.
_PLACEMENT_KEYS = (
    *(
        "placement",
        "actor.parallel",
        "teacher.parallel",
        "teachers",
        "critic.parallel",
        "reward.model.parallel",
    ),
    *("rollout.num_replicas", "rollout.tensor_parallel_size", "rollout.pipeline_parallel_size"),
)

# A machine without GPUs may run a role of this many ranks. A larger layout is meant for GPUs.
_MOST_CPU_RANKS = 4


def violations_here[Run: RunConfig](loaded: Loaded[Run]) -> list[Violation]:
    """Return all violations for a run that starts on this machine."""
    return [*_shared_violations(loaded), *_about_open_keys(loaded, writable_folders(loaded.config))]


def divided_violations[Run: RunConfig](
    loaded: Loaded[Run], starts_elsewhere: bool = False
) -> tuple[list[Violation], list[Violation]]:
    """Divide the violations into errors, and things missing here that the run's machine may have.

    If all files and GPUs of a run are here, the run is expected to start here, and every violation is an
    error.

    Args:
        starts_elsewhere: Whether the run starts on another machine in any case.
    """
    violations = _shared_violations(loaded)
    # A machine without the run's files or GPUs is probably not the one that will run it.
    lacks_inputs = any(each.absence in (Absence.input, Absence.gpu) for each in violations)
    if not (starts_elsewhere or loaded.absent or lacks_inputs):
        return violations_here(loaded), []

    return [each for each in violations if each.absence is None], [
        each for each in violations if each.absence is not None
    ]


def _shared_violations[Run: RunConfig](loaded: Loaded[Run]) -> list[Violation]:
    """Return all violations except those about output folders."""
    config = loaded.config
    lines = {line.partition(":")[0] for line in loaded.absent}
    # A model that was not fetched from the hub is already reported in its line.
    explained = {role.path_key for role in model_roles(config) if role.path_key in lines}

    return [
        each
        for each in _about_open_keys(loaded, [*validate(config), *missing(config)])
        if not (each.absence is Absence.input and explained.issuperset(each.keys))
    ]


def _about_open_keys[Run: RunConfig](loaded: Loaded[Run], violations: Iterable[Violation]) -> list[Violation]:
    """Return the violations without those about refused keys."""
    return [each for each in violations if not loaded.refuses(each.keys)]


def load_checked_anywhere[Run: RunConfig](
    schema: type[Run], path: str, overrides: Sequence[str] = (), *, starts_elsewhere: bool = False
) -> Loaded[Run]:
    """Load a configuration and check it. The only file that is read is each model's `config.json`.

    Each model's path in the result is a folder with a `config.json` on this machine. The run could start here
    if nothing is absent.

    Args:
        starts_elsewhere: See `divided_violations`.

    Raises:
        ConfigError: It lists every problem.
    """
    loaded = find_planned(schema, path, overrides)
    errors, absent = divided_violations(loaded, starts_elsewhere)
    refuse(path, problems_of(loaded, errors))

    return replace(loaded, absent=(*loaded.absent, *map(str, absent)))


def load_checked_here[Run: RunConfig](schema: type[Run], path: str, overrides: Sequence[str] = ()) -> Run:
    """Load a configuration for a run on this machine, and check it like `load_checked_anywhere`.

    Inputs on a hub are fetched.

    Raises:
        ConfigError: Lists every problem and every missing input.
    """
    loaded = find_on_hub(read_config(schema, path, overrides), fetch=True)
    refuse(path, problems_of(loaded, violations_here(loaded)))
    return loaded.config


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

    hub = with_hub_inputs(config, fetch)
    refused = {problem.partition(":")[0] for problem in hub.problems}
    return replace(
        loaded,
        config=hub.config,
        problems=(*loaded.problems, *hub.problems),
        refused=loaded.refused | refused,
        absent=(*loaded.absent, *hub.lines),
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
    if not names_a_hub(config):
        return config
    from megarl.data.hub import with_cached_models

    return with_cached_models(config)


def refuse(path: str, problems: Sequence[str]) -> None:
    """Raise ConfigError if there are problems."""
    if problems:
        raise ConfigError(path, problems)


def problems_of[Run: RunConfig](loaded: Loaded[Run], violations: Sequence[Violation]) -> list[str]:
    """Return the schema problems, the violations, and problems of the placement and of engine arguments.

    The first problem of the memory budget contains what the plan assumes.
    """
    config = loaded.config
    assumed = "; ".join(loaded.warnings)
    problems = [*loaded.problems, *map(str, violations)]

    if not any(_is_about_placement(violation) for violation in violations) and not loaded.refuses(
        _PLACEMENT_KEYS
    ):
        try:
            plan = plan_placement(config)
            if isinstance(config, PPOConfig):
                choose_transport(config, plan)
            # The memory plan is only computed for a configuration without other problems.
            if not problems and refuses(config) and config.placement.device_memory_gb is not None:
                over = budget_problems(config, plan_memory(config, plan, read_architectures(config)[0]))
                problems += [f"{line} ({assumed})" if assumed else line for line in over[:1]]
                problems += over[1:]
        except ConfigError as error:
            problems += error.problems

    if isinstance(config, PPOConfig):
        problems += _server_args_problems(config.rollout)
    return problems


def _server_args_problems(rollout: RolloutConfig) -> list[str]:
    problems: list[str] = []
    for engine in RolloutEngineKind:
        settings = rollout.settings_of(engine)
        if settings is None or not settings.server_args:
            continue
        # Imported here, because the engine's library needs torch and takes seconds to import.
        from megarl.rollout.engines import SERVER_ARGS_CHECKS

        try:
            SERVER_ARGS_CHECKS[engine](settings.server_args)
        except ConfigError as error:
            problems += error.problems

    return problems


def _is_about_placement(violation: Violation) -> bool:
    return any(key.startswith(_PLACEMENT_KEYS) for key in violation.keys)
