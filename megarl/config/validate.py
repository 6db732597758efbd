"""Validates a configuration across its sections, with one list of checks that are all applied."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from types import UnionType
from typing import Any

from megarl.config.finding import CONFIGURATION, Finding, Findings, wrong
from megarl.config.readers import unread_keys
from megarl.config.roles import REWARD_MODEL, ModelRole, judge_roles, model_roles
from megarl.config.rules import (
    agent,
    algorithm,
    data,
    experts,
    fp8,
    lora,
    machine,
    megatron,
    models,
    reward,
    rollout,
    run,
    speculation,
    vision,
)
from megarl.config.schema import (
    DPOConfig,
    PPOConfig,
    PreferenceConfig,
    RunConfig,
    SFTConfig,
)
from megarl.config.schema.keys import leaves
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture

Architectures = dict[str, Architecture]

_ENGINE_SIZES = ("rollout.tensor_parallel_size", "rollout.expert_parallel_size")
_ENGINE_STAGES = ("rollout.pipeline_parallel_size",)
_CORRECTION = "algorithm.rollout_correction"


class Needs(Enum):
    """The arguments of a check. Members are in the order in which checks run."""

    run = auto()  # the configuration
    role = auto()  # the configuration, and each model role
    model = auto()  # the configuration, each model role whose architecture could be read, and that
    actor = auto()  # the configuration, and the architecture of the policy
    reward_model = auto()  # the configuration, and the architecture of the reward model
    models = auto()  # the configuration, and all architectures by role
    files = auto()  # the configuration, on the machine with the run's files and packages
    folders = auto()  # the configuration, on the machine that writes the run's folders
    plan = auto()  # a `Loaded` configuration, and the errors found in it
    resumption = auto()  # the configuration, without errors
    # The run that `megarl doctor` examines, the first one with the machine's GPUs.
    gpus = auto()
    machine = auto()
    machine_of_run = auto()  # skipped without a configuration
    inputs = auto()
    processes = auto()


@dataclass(frozen=True)
class Check:
    """A row of the list of checks.

    Attributes:
        function: Yields the findings. A text names a module and its function: the module is imported when
            the check runs, so that a missing library fails only this check.
        numbers: The keys or sections whose numbers the check relies on. `{role}` is the section of a role's
            parallel sizes. The check is skipped if one of them is out of range.
        kind: The runs that are checked.
        title: The name of the check in messages.
    """

    needs: Needs
    function: Callable[..., Findings] | str
    numbers: tuple[str, ...] = ()
    kind: type[RunConfig] | UnionType = RunConfig
    title: str = CONFIGURATION

    def run(self, *arguments: Any) -> Findings:
        function = self.function
        if isinstance(function, str):
            try:
                function = pkgutil.resolve_name(function)
            except ImportError as error:
                yield wrong(
                    self.title,
                    f"cannot be checked: {error}",
                    "install the packages that the check of versions reports, then run this command again",
                )
                return
        yield from function(*arguments)


def checks_of(checks: Sequence[Check], needs: Needs, config: RunConfig | None) -> list[Check]:
    """Return the checks of a list that need the same. Without a configuration, those of every run."""
    return [
        each
        for each in checks
        if each.needs is needs and (each.kind is RunConfig or isinstance(config, each.kind))
    ]


def run_checks(
    checks: Sequence[Check],
    config: RunConfig,
    arguments: Mapping[Needs, Sequence[tuple[Any, ...]]],
    broken: Collection[str] = (),
) -> Findings:
    """Run the checks for a configuration that need one of `arguments`, once with each tuple there.

    Args:
        broken: The keys whose numbers are out of range.
    """
    for needs, calls in arguments.items():
        for call in calls:
            section = next((each.parallel_key for each in call if isinstance(each, ModelRole)), "")
            for check in checks_of(checks, needs, config):
                numbers = [key.format(role=section) for key in check.numbers]
                if not any(each == key or each.startswith(f"{key}.") for each in broken for key in numbers):
                    yield from check.run(*call)


def _checks(
    needs: Needs, kind: type[RunConfig] | UnionType, rules: Mapping[Callable[..., Findings], tuple[str, ...]]
) -> Iterator[Check]:
    """Return the rows of rules, given with the numbers that each relies on."""
    return (Check(needs, rule, numbers, kind) for rule, numbers in rules.items())


# The checks of values and of files. `megarl.doctor.checks` adds those of plans, inputs and processes.
RULES = (
    *_checks(
        Needs.run,
        RunConfig,
        {
            models.optimizers: (),
            data.train_files: (),
            run.layers: (),
            run.flash_attention: (),
            run.ring_attention: (),
            run.compared_validations: (),
            run.output_folders: (),
            run.functions: (),
            run.profile: (),
            run.tracking: (),
            run.recovery_factors: ("recovery.hang_factor", "recovery.straggler_factor"),
        },
    ),
    *_checks(Needs.run, SFTConfig, {data.chat_columns: ()}),
    *_checks(Needs.run, PreferenceConfig, {models.pairs_fit: ("actor.micro_batch.sequences",)}),
    *_checks(Needs.run, SFTConfig | PreferenceConfig, {run.loss_metrics: ()}),
    *_checks(
        Needs.run,
        PPOConfig,
        {
            run.validation_metrics: (),
            run.mini_batches: ("trainer.updates_per_step", "trainer.prompts_per_step", "rollout.n"),
            rollout.sampling: (
                "rollout.temperature",
                "rollout.validation.min_new_tokens",
                "data.max_response_length",
            ),
            rollout.whole_model: ("rollout.tensor_parallel_size", *_ENGINE_STAGES),
            rollout.engine_memory: (),
            rollout.shared_devices: (
                *("rollout.num_replicas", "rollout.tensor_parallel_size", *_ENGINE_STAGES),
                *(f"actor.parallel.{axis}_parallel_size" for axis in ("tensor", "pipeline", "data")),
            ),
            rollout.generation_ahead: ("rollout.max_staleness",),
            rollout.stages: _ENGINE_STAGES,
            fp8.run: (),
            speculation.run: (),
            data.curriculum: (),
            reward.something_scores: (),
            reward.judges: (),
            agent.episodes: ("rollout.max_staleness", "agent.max_turn_tokens", "data.max_response_length"),
            algorithm.estimator: ("rollout.n",),
            algorithm.teacher: ("rollout.n", "algorithm.advantage.distillation"),
            algorithm.critic: ("trainer.critic_warmup_steps", "trainer.total_steps"),
            algorithm.policy_loss: ("trainer.updates_per_step", "trainer.epochs_per_batch"),
            algorithm.aggregations: ("data.max_response_length",),
            algorithm.kl: (),
            lora.reference: (),
            lora.served: (),
            algorithm.rollout_correction: (f"{_CORRECTION}.low", f"{_CORRECTION}.high"),
            algorithm.dynamic_sampling: ("algorithm.dynamic_sampling.max_generations",),
        },
    ),
    *_checks(
        Needs.role,
        RunConfig,
        {
            models.layout: (),
            models.micro_batch: (),
            models.recomputation: (),
            lora.options: (),
            models.rows_of_mini_batch: (
                "trainer.prompts_per_step",
                "rollout.n",
                "trainer.updates_per_step",
                "trainer.samples_per_step",
                "trainer.pairs_per_step",
                "{role}.data_parallel_size",
            ),
            megatron.options: (),
            fp8.recipe: (),
        },
    ),
    *_checks(
        Needs.model,
        RunConfig,
        {
            models.fit_layout: ("{role}",),
            experts.fit_layout: ("{role}",),
            lora.fit_model: (),
            vision.fit_layout: ("{role}",),
            megatron.fit_model: (),
            fp8.products_fit: ("{role}",),
            models.head_fits: (),
            models.rows_fit: (),
            models.kernels_fit: (),
            models.selections_fit: (),
            experts.layers_fit: (),
            lora.layers_fit: (),
        },
    ),
    *_checks(
        Needs.actor,
        PPOConfig,
        {
            rollout.engine_fits_model: _ENGINE_SIZES,
            rollout.stages_fit_model: _ENGINE_STAGES,
            experts.engine_fits: _ENGINE_SIZES,
            experts.attention_fits: _ENGINE_SIZES,
            fp8.fits_model: _ENGINE_SIZES,
            speculation.fits_model: ("rollout.tensor_parallel_size",),
            experts.routing_replay: (),
            vision.engine_fits: (),
            lora.fit_engine: (),
        },
    ),
    *_checks(Needs.reward_model, PPOConfig, {reward.reads_conversations: ("reward.model",)}),
    *_checks(
        Needs.models,
        PPOConfig,
        {
            models.top_k_fits: ("algorithm.advantage.distillation.top_k",),
            vision.every_role: (),
        },
    ),
    *_checks(Needs.models, RunConfig, {vision.packing: ()}),
    *_checks(Needs.models, PPOConfig | DPOConfig, {models.same_vocabulary: ()}),
    Check(Needs.models, partial(unread_keys, refused=True)),
    *_checks(Needs.files, RunConfig, dict.fromkeys(machine.RULES, ())),
    Check(Needs.folders, machine.writable_folders),
)


def validate(config: RunConfig) -> list[Finding]:
    """Return the violations of all rules that do not depend on the machine.

    The only files that are read are the models' `config.json`. A rule is skipped if one of its numbers is out
    of range, which is reported instead.
    """
    found = list(range_violations(config))
    # A rule that relies on a number out of range would only repeat the problem.
    broken = {key for each in found for key in each.keys}

    # Check the configuration alone.
    roles = model_roles(config)
    found += run_checks(
        RULES, config, {Needs.run: [(config,)], Needs.role: [(config, role) for role in roles]}, broken
    )

    # Check the configuration against the models. One that could not be read is reported, and has no checks.
    architectures, unreadable = read_architectures(config)
    found += unreadable
    of_models = {
        Needs.model: [
            (config, role, architectures[role.name]) for role in roles if role.name in architectures
        ],
        Needs.actor: [(config, architectures[name]) for name in architectures if name == "actor"],
        Needs.reward_model: [(config, architectures[name]) for name in architectures if name == REWARD_MODEL],
        Needs.models: [(config, architectures)],
    }
    found += run_checks(RULES, config, of_models, broken)

    # The reference shares the actor's model and layout, and therefore its violations.
    return list(dict.fromkeys(found))


def validate_here(config: RunConfig, *, writes: bool = False) -> list[Finding]:
    """Return the findings about data, code, models, GPUs, packages and folders on this machine.

    Args:
        writes: Whether the run starts on this machine, so that its folders must be writable.
    """
    needed = {Needs.files: [(config,)]} | ({Needs.folders: [(config,)]} if writes else {})
    return list(dict.fromkeys(run_checks(RULES, config, needed)))


def read_architectures(config: RunConfig) -> tuple[Architectures, list[Finding]]:
    """Return the architectures of the models by role, and the violations of those that cannot be read.

    The architecture of a role that trains adapters includes them.
    """
    architectures: Architectures = {}
    violations = []

    # Judges that the run serves are no model roles, but their memory is planned.
    for name, folder, key, role in [
        *((role.name, role.path, role.path_key, role) for role in model_roles(config)),
        *((name, judge.path, f"{judge.key}.path", None) for name, judge in judge_roles(config).items()),
    ]:
        try:
            architecture = read_architecture(folder, config.model.trust_remote_code)
            architectures[name] = architecture if role is None else role.trained(architecture)
        except ConfigError as error:
            violations.append(Finding((key,), f"{error.source}: {'; '.join(error.problems)}"))

    return architectures, violations


def range_violations(config: object) -> Findings:
    """Yield the numbers of a configuration that are outside the ranges of their keys."""
    for leaf in leaves(config):
        has_range = leaf.range.length is not None or isinstance(leaf.value, int | float)
        if has_range and leaf.value not in leaf.range:
            yield Finding((leaf.key,), leaf.range.explain(leaf.value))
