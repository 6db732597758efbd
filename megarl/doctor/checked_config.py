"""A configuration that is read and checked in every way that needs no process; all that is wrong with it is said at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.published import with_published_models
from megarl.config.roles import model_roles
from megarl.config.schema import PPOConfig, RolloutConfig, RolloutEngineKind, SFTConfig
from megarl.config.sources import is_hub_name
from megarl.config.validate import absent_files, read_architectures, validate
from megarl.config.violation import Violation
from megarl.placement.memory import budget_problems, plan_memory, refuses
from megarl.placement.plan import plan_placement
from megarl.placement.transport import choose_transport

RunConfig = TypeVar("RunConfig", bound=PPOConfig | SFTConfig)
# Without these a placement cannot even be counted.
_PLACEMENT_KEYS = (
    *("placement.", "actor.parallel.", "critic.parallel.", "reward.model.parallel"),
    *("rollout.num_replicas", "rollout.tensor_parallel_size"),
)


def load_checked_anywhere(schema: type[RunConfig], path: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, list[str]]:
    """`load_config`, and every check that reads no more of a run's files than its models' `config.json`; also on a machine without the
    run's models: those that are published, or on a hub, are known, and files that a run reads may be elsewhere too. The second value:
    what is not here, a line each; empty where the models are. Raises ConfigError that lists all that is wrong."""
    return checked_anywhere(*find_inputs(load_config(schema, path, overrides), path), path)


def find_inputs(config: RunConfig, path: str) -> tuple[RunConfig, list[str]]:
    """The configuration, of the file `path`, with a folder for each model that is not here but published, or on a hub. The second value:
    a line about each of them, and about data on a hub, that a run would fetch. Raises ConfigError where a hub does not answer."""
    config, absent = with_published_models(config, path)
    config, on_hub = find_on_hub(config, path)
    return config, [*absent, *on_hub]


def find_on_hub(config: RunConfig, path: str) -> tuple[RunConfig, list[str]]:
    """As `find_inputs`, of what is on a hub alone."""
    if not any(map(is_hub_name, (*(role.path for role in model_roles(config)), *config.data.train_files, *config.data.val_files))):
        return config, []
    # Here, because the hub's library takes half a second; nobody else shall wait for it.
    from megarl.data.hub import with_hub_inputs

    return with_hub_inputs(config, path, large=False)


def checked_anywhere(config: RunConfig, absent: Sequence[str], path: str) -> tuple[RunConfig, list[str]]:
    """What `find_inputs` gave, checked as far as that can be; and all that is not here, a line each."""
    checked(config, path, with_files=not absent)
    said = {line.partition(":")[0] for line in absent}
    return config, [*absent, *(str(each) for each in absent_files(config) if each.keys[0] not in said)]


def checked(config: RunConfig, path: str, with_files: bool) -> RunConfig:
    """The configuration, of the file `path`, with every check that needs no process; with_files: as for `validate`. Raises ConfigError."""
    refuse(path, problems_of(config, validate(config, with_files)))
    return config


def refuse(path: str, problems: Sequence[str]) -> None:
    """Raises ConfigError where there are any."""
    if problems:
        raise ConfigError(path, problems)


def problems_of(config: PPOConfig | SFTConfig, violations: Sequence[Violation]) -> list[str]:
    """The violations, a line each, and what is wrong with the placement and with the arguments for an engine's own library."""
    problems = [str(violation) for violation in violations]
    if not any(_is_about_placement(violation) for violation in violations):
        try:
            plan = plan_placement(config)
            if isinstance(config, PPOConfig):
                choose_transport(config, plan)
            if not violations and refuses(config) and config.placement.device_memory_gb is not None:
                problems += budget_problems(config, plan_memory(config, plan, read_architectures(config)[0]))
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
        # Here, because asking an engine's library takes seconds and torch; nobody else shall wait for it.
        from megarl.workers.engines import SERVER_ARGS_CHECKS

        try:
            SERVER_ARGS_CHECKS[engine](settings.server_args)
        except ConfigError as error:
            problems += error.problems
    return problems


def _is_about_placement(violation: Violation) -> bool:
    return any(key.startswith(_PLACEMENT_KEYS) for key in violation.keys)
