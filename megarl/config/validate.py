"""Validates a configuration across its sections, with tables of rules that are all applied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megarl.config.readers import unread_keys
from megarl.config.roles import REWARD_MODEL, ModelRole, judge_roles, model_roles
from megarl.config.rules import (
    agent,
    algorithm,
    data,
    engine_stages,
    experts,
    fp8,
    fp8_training,
    judges,
    lora,
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
    RewardModelRunConfig,
    RunConfig,
    SFTConfig,
)
from megarl.config.schema.keys import leaves
from megarl.config.violation import Violation, Violations
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture

Architectures = dict[str, Architecture]
# Keys or sections whose numbers a rule relies on. `{role}` is the section of a role's parallel sizes.
Keys = tuple[str, ...]

_ROWS = (
    "trainer.prompts_per_step",
    "rollout.n",
    "trainer.updates_per_step",
    "trainer.samples_per_step",
    "trainer.pairs_per_step",
)
_SAMPLER = ("rollout.temperature", "rollout.top_p")
_ENGINE_SIZES = ("rollout.tensor_parallel_size", "rollout.expert_parallel_size")
_ENGINE_STAGES = ("rollout.pipeline_parallel_size",)
_ACTOR_SIZES = tuple(f"actor.parallel.{axis}_parallel_size" for axis in ("tensor", "pipeline", "data"))
_CORRECTION = "algorithm.rollout_correction"

RULES: Mapping[Callable[[RunConfig], Violations], Keys] = {
    models.optimizers: (),
    data.train_files: (),
    run.layers: (),
    run.flash_attention: (),
    run.ring_attention: (),
    run.compared_validations: (),
    run.output_folders: (),
    run.profile: (),
    run.tracking: (),
    run.recovery_factors: ("recovery.hang_factor", "recovery.straggler_factor"),
}
SFT_RULES: Mapping[Callable[[SFTConfig], Violations], Keys] = {
    data.chat_columns: (),
    run.sft_metrics: (),
}
PREFERENCE_RULES: Mapping[Callable[[PreferenceConfig], Violations], Keys] = {
    run.pair_metrics: (),
    models.pairs_fit: ("actor.micro_batch.sequences",),
}
PPO_RULES: Mapping[Callable[[PPOConfig], Violations], Keys] = {
    run.validation_metrics: (),
    run.mini_batches: ("trainer.updates_per_step", "trainer.prompts_per_step", "rollout.n"),
    rollout.sampling: (*_SAMPLER, "rollout.validation.min_new_tokens", "data.max_response_length"),
    rollout.whole_model: ("rollout.tensor_parallel_size", *_ENGINE_STAGES),
    rollout.engine_memory: (),
    rollout.shared_devices: (
        *("rollout.num_replicas", "rollout.tensor_parallel_size", *_ENGINE_STAGES),
        *_ACTOR_SIZES,
    ),
    rollout.generation_ahead: ("rollout.max_staleness",),
    engine_stages.run: _ENGINE_STAGES,
    fp8.run: (),
    speculation.run: (),
    data.curriculum: (),
    reward.something_scores: (),
    judges.judges: (),
    agent.episodes: ("rollout.max_staleness", "agent.max_turn_tokens", "data.max_response_length"),
    algorithm.estimator: ("rollout.n",),
    algorithm.teacher: ("rollout.n", "algorithm.advantage.distillation"),
    algorithm.critic: ("trainer.critic_warmup_steps", "trainer.total_steps"),
    algorithm.policy_loss: ("trainer.updates_per_step", "trainer.epochs_per_batch"),
    algorithm.aggregations: ("data.max_response_length",),
    algorithm.functions: (),
    algorithm.kl: (),
    lora.reference: (),
    lora.served: (),
    algorithm.rollout_correction: (f"{_CORRECTION}.low", f"{_CORRECTION}.high"),
    algorithm.dynamic_sampling: ("algorithm.dynamic_sampling.max_generations",),
}
# Rules for each model of a run.
ROLE_RULES: Mapping[Callable[[RunConfig, ModelRole], Violations], Keys] = {
    models.layout: (),
    models.micro_batch: (),
    models.recomputation: (),
    lora.options: (),
    models.rows_of_mini_batch: (*_ROWS, "{role}.data_parallel_size"),
    megatron.options: (),
    fp8_training.recipe: (),
}
# Rules for each model whose architecture could be read.
MODEL_RULES: Mapping[Callable[[ModelRole, Architecture], Violations], Keys] = {
    models.fit_layout: ("{role}",),
    experts.fit_layout: ("{role}",),
    lora.fit_model: (),
    vision.fit_layout: ("{role}",),
    megatron.fit_model: (),
    fp8_training.fit_model: ("{role}",),
}
# Rules for the architecture of one role's model.
PPO_MODEL_RULES: Mapping[str, Mapping[Callable[[PPOConfig, Architecture], Violations], Keys]] = {
    "actor": {
        rollout.engine_fits_model: _ENGINE_SIZES,
        engine_stages.fit_model: _ENGINE_STAGES,
        experts.engine_fits: _ENGINE_SIZES,
        fp8.fits_model: _ENGINE_SIZES,
        speculation.fits_model: ("rollout.tensor_parallel_size",),
        experts.routing_replay: (),
        vision.engine_fits: (),
        lora.fit_engine: (),
    },
    REWARD_MODEL: {reward.reads_conversations: ("reward.model",)},
}
# Rules for all architectures together.
PPO_MODELS_RULES: Mapping[Callable[[PPOConfig, Architectures], Violations], Keys] = {
    models.rows_fit: (),
    models.kernels_fit: (),
    models.same_vocabulary: (),
    models.top_k_fits: ("algorithm.advantage.distillation.top_k",),
    experts.layers_fit: (),
    lora.layers_fit: (),
    vision.packing: (),
    vision.every_role: (),
}
SFT_MODELS_RULES: Mapping[Callable[[SFTConfig | PreferenceConfig, Architectures], Violations], Keys] = {
    models.chats_fit: (),
    models.kernels_fit: (),
    experts.layers_fit: (),
    lora.layers_fit: (),
    vision.packing: (),
}


class KindRules(NamedTuple):
    """The rules of one kind of run, in addition to those for all kinds.

    Attributes:
        run: Rules that are called with the configuration.
        model: Rules by role, called with the configuration and the architecture of the role's model.
        models: Rules that are called with the configuration and all architectures by role.
    """

    run: Mapping[Any, Keys]
    model: Mapping[str, Mapping[Any, Keys]]
    models: Mapping[Any, Keys]


KINDS: Mapping[type[RunConfig], KindRules] = {
    PPOConfig: KindRules(PPO_RULES, PPO_MODEL_RULES, PPO_MODELS_RULES),
    SFTConfig: KindRules(SFT_RULES, {}, SFT_MODELS_RULES),
    DPOConfig: KindRules(PREFERENCE_RULES, {}, {**SFT_MODELS_RULES, models.same_vocabulary: ()}),
    RewardModelRunConfig: KindRules(PREFERENCE_RULES, {}, SFT_MODELS_RULES),
}


def validate(config: RunConfig) -> list[Violation]:
    """Return the violations of all rules that do not depend on the machine.

    The only files that are read are the models' `config.json`. A rule is skipped if one of its numbers is out
    of range, which is reported instead. `rules.machine` checks the requirements on the run's machine.
    """
    violations = list(range_violations(config))
    # A rule that relies on a number out of range would only repeat the problem.
    broken = {key for violation in violations for key in violation.keys}

    # Check the configuration alone.
    kind = KINDS[type(config)]
    violations += _violations(RULES, broken, config)
    violations += _violations(kind.run, broken, config)
    roles = model_roles(config)
    for role in roles:
        violations += _violations(ROLE_RULES, broken, config, role, section=role.parallel_key)

    # Check the configuration against the models.
    architectures, unreadable = read_architectures(config)
    violations += unreadable

    for role in roles:
        if (model := architectures.get(role.name)) is not None:
            violations += _violations(MODEL_RULES, broken, role, model, section=role.parallel_key)

    # A model that could not be read is reported already, so its rules are skipped.
    for name, rules in kind.model.items():
        if name in architectures:
            violations += _violations(rules, broken, config, architectures[name])

    violations += _violations(kind.models, broken, config, architectures)
    violations += unread_keys(config, architectures, refused=True)

    # The reference shares the actor's model and layout, and therefore its violations.
    return list(dict.fromkeys(violations))


def _violations(
    rules: Mapping[Any, Keys], broken: Collection[str], *arguments: object, section: str = ""
) -> Violations:
    """Apply the rules whose numbers are in range."""
    for rule, keys in rules.items():
        needed = [key.format(role=section) for key in keys]
        if not any(each == key or each.startswith(f"{key}.") for each in broken for key in needed):
            yield from rule(*arguments)


def read_architectures(config: RunConfig) -> tuple[Architectures, list[Violation]]:
    """Return the architectures of the models by role, and the violations of those that cannot be read.

    The architecture of a role that trains adapters includes them.
    """
    architectures: Architectures = {}
    violations = []

    for role in model_roles(config):
        try:
            architecture = read_architecture(role.path, config.model.trust_remote_code)
            architectures[role.name] = replace(architecture, lora=role.lora)
        except ConfigError as error:
            violations.append(Violation((role.path_key,), f"{error.source}: {'; '.join(error.problems)}"))

    # Judges that the run serves are no model roles, but their memory is planned.
    for name, judge in judge_roles(config).items():
        try:
            architectures[name] = read_architecture(judge.path, config.model.trust_remote_code)
        except ConfigError as error:
            violations.append(
                Violation((f"{judge.key}.path",), f"{error.source}: {'; '.join(error.problems)}")
            )

    return architectures, violations


def range_violations(config: object) -> Violations:
    """Yield the numbers of a configuration that are outside the ranges of their keys."""
    for leaf in leaves(config):
        if leaf.items is not None and not leaf.items.fits(leaf.value):
            yield Violation((leaf.key,), f"is {leaf.value}, but must be {leaf.items}")
        elif isinstance(leaf.value, int | float) and leaf.value not in leaf.range:
            yield Violation((leaf.key,), leaf.range.explain(leaf.value))
