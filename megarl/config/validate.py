"""Checks across the sections of a configuration: every violation is found, with both values and the nearest that work."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, lcm

from megarl.config.derive import max_row_tokens, room_of_longest_row, samples_per_step, updates_per_pass
from megarl.config.roles import REWARD_MODEL, ModelRole, model_roles, needs_reference
from megarl.config.rules import agent, algorithm, checkpoint, data, experts, reward, rollout, staleness
from megarl.config.schema import (
    Device,
    DType,
    Layers,
    OptimConfig,
    PPOConfig,
    Recomputation,
    Recompute,
    SFTConfig,
)
from megarl.config.schema.keys import leaves
from megarl.config.violation import Violation, Violations, either, nearest_divisors, nearest_multiples
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture

RunConfig = PPOConfig | SFTConfig


def validate(config: RunConfig) -> list[Violation]:
    """Return the violations of all rules that hold on every machine.

    Of all files that the configuration names, only the models' `config.json` is read. A rule is skipped if one of its own
    numbers is out of range: the range is the message. `rules.machine` has what the run's machine needs.
    """
    violations = list(_ranges(config))
    broken = {key for violation in violations for key in violation.keys}
    for rule in (
        _optim,
        data.train_files,
        data.columns,
        _layers,
        _validation,
        checkpoint.validation_metrics,
        checkpoint.output_folders,
    ):
        violations += rule(config)
    if isinstance(config, PPOConfig):
        for needed, ppo_rule in _PPO_RULES:
            if not broken.intersection(needed):
                violations += ppo_rule(config)
    for role in model_roles(config):
        violations += _role_rules(config, role, broken)
    architectures, unreadable = read_architectures(config)
    violations += unreadable
    for role in model_roles(config):
        if role.name in architectures and not any(key.startswith(role.parallel_key) for key in broken):
            violations += _fits_layout(role, architectures[role.name])
            violations += experts.fit_layout(role, architectures[role.name])
    if isinstance(config, PPOConfig) and "actor" in architectures and not broken.intersection(_ENGINE_SIZES):
        violations += rollout.engine_fits_model(config, architectures["actor"])
        violations += experts.engine_fits(config, architectures["actor"])
    if "actor" in architectures:
        violations += experts.routing_replay(config, architectures["actor"])
    if isinstance(config, PPOConfig) and REWARD_MODEL in architectures and not any(key.startswith("reward.model.") for key in broken):
        violations += reward.reads_conversations(config, architectures[REWARD_MODEL])
    violations += _lengths_fit(config, architectures)
    violations += _same_vocabulary(config, architectures)
    return list(dict.fromkeys(violations))  # the reference shares the actor's model and layout, and so its violations


def read_architectures(config: RunConfig) -> tuple[dict[str, Architecture], list[Violation]]:
    """The architecture of each role's model by the role's name, and why the others cannot be read."""
    architectures, violations = {}, []
    for role in model_roles(config):
        try:
            architectures[role.name] = read_architecture(role.path, config.model.trust_remote_code)
        except ConfigError as error:
            violations.append(Violation((role.path_key,), f"{error.source}: {'; '.join(error.problems)}"))
    return architectures, violations


def _ranges(config: RunConfig) -> Violations:
    for leaf in leaves(config):
        if isinstance(leaf.value, int | float) and leaf.value not in leaf.range:
            yield Violation((leaf.key,), leaf.range.explain(leaf.value))
        if leaf.items is not None and not leaf.items.fits(leaf.value):
            yield Violation((leaf.key,), f"is {leaf.value}, but must be {leaf.items}")


def _optim(config: RunConfig) -> Violations:
    sections: dict[str, OptimConfig] = {"actor.optim": config.actor.optim}
    if isinstance(config, PPOConfig):
        sections["critic.optim"] = config.critic.optim
    for key, optim in sections.items():
        if optim.min_lr > optim.lr:
            yield Violation((f"{key}.min_lr", f"{key}.lr"), f"min_lr {optim.min_lr:g} is above lr {optim.lr:g}; the rate decays to min_lr")


def _layers(config: RunConfig) -> Violations:
    if config.engine.layers is not Layers.transformer_engine:
        return
    if config.device is Device.cpu:
        yield Violation(
            ("engine.layers", "device"), "transformer_engine has layers for CUDA only, but device is cpu; use engine.layers=auto or local"
        )
    elif config.model.dtype is DType.float32 and config.engine.packing:
        yield Violation(
            ("engine.layers", "model.dtype"),
            "transformer_engine has no attention of packed rows for float32; use engine.layers=auto or local, or model.dtype=bfloat16",
        )


def _validation(config: RunConfig) -> Violations:
    if config.trainer.validate_every_steps > 0 and not config.data.val_files:
        yield Violation(
            ("trainer.validate_every_steps", "data.val_files"),
            f"validation every {config.trainer.validate_every_steps} steps needs val_files; name one, or set validate_every_steps to 0",
        )


def _mini_batches(config: PPOConfig) -> Violations:
    samples, updates = samples_per_step(config), config.trainer.updates_per_step
    if samples % updates:
        prompts, n = config.trainer.prompts_per_step, config.rollout.n
        step = lcm(n, updates) // n  # prompts_per_step that work are its multiples
        yield Violation(
            ("trainer.updates_per_step", "trainer.prompts_per_step", "rollout.n"),
            f"prompts_per_step {prompts} x n {n} = {samples} samples do not divide into updates_per_step {updates} mini-batches; "
            f"use updates_per_step {either(nearest_divisors(samples, updates))} "
            f"or prompts_per_step {either(nearest_multiples(prompts, step))}",
        )


_ENGINE_KEYS = ("rollout.num_replicas", "rollout.tensor_parallel_size")
_ENGINE_SIZES = ("rollout.tensor_parallel_size", "rollout.expert_parallel_size")


def _sizes(section: str) -> tuple[str, ...]:
    return tuple(f"{section}.parallel.{axis}_parallel_size" for axis in ("tensor", "pipeline", "data"))


# Each with the keys whose range it relies on.
_PPO_RULES: tuple[tuple[tuple[str, ...], Callable[[PPOConfig], Violations]], ...] = (
    (("trainer.updates_per_step", "trainer.prompts_per_step", "rollout.n"), _mini_batches),
    (
        ("rollout.temperature", "rollout.top_p", "rollout.validation.min_new_tokens", "data.max_response_length"),
        rollout.sampling,
    ),
    (("rollout.tensor_parallel_size",), rollout.whole_model),
    ((), rollout.engine_memory),
    ((*_ENGINE_KEYS, *_sizes("actor")), rollout.shared_devices),
    (("rollout.max_staleness",), staleness.generation_ahead),
    ((), reward.something_scores),
    (("rollout.max_staleness", "agent.max_turn_tokens", "data.max_response_length"), agent.episodes),
    *algorithm.RULES,
)


def _role_rules(config: RunConfig, role: ModelRole, broken: set[str]) -> Violations:
    """What one model's layout and micro-batches must satisfy without knowing the model."""
    parallel = role.parallel
    if parallel.virtual_pipeline_parallel_size is not None and parallel.pipeline_parallel_size == 1:
        yield Violation(
            (f"{role.parallel_key}.virtual_pipeline_parallel_size", f"{role.parallel_key}.pipeline_parallel_size"),
            f"virtual stages {parallel.virtual_pipeline_parallel_size} need a pipeline, but pipeline_parallel_size is 1; "
            "leave virtual_pipeline_parallel_size null, or use a pipeline_parallel_size of 2 or more",
        )
    if parallel.sequence_parallel and parallel.tensor_parallel_size == 1:
        yield Violation(
            (f"{role.parallel_key}.sequence_parallel", f"{role.parallel_key}.tensor_parallel_size"),
            "sequence_parallel splits activations over tensor-parallel ranks, but tensor_parallel_size is 1; use 2 or more, or false",
        )
    if parallel.context_parallel_size > 1 and not config.engine.packing:
        yield Violation(
            (f"{role.parallel_key}.context_parallel_size", "engine.packing"),
            f"context_parallel_size {parallel.context_parallel_size} cuts rows that are packed, but packing is false; "
            "use engine.packing=true, or context_parallel_size 1",
        )
    yield from _micro_batch(config, role)
    if role.optim is not None:
        yield from _recomputation(role)
    rows_keys = {"trainer.prompts_per_step", "rollout.n", "trainer.updates_per_step", "trainer.samples_per_step"}
    replicas_key = f"{role.parallel_key}.data_parallel_size"
    if role.optim is None or broken & (rows_keys | {replicas_key}):
        return
    rows, replicas = samples_per_step(config) // updates_per_pass(config), parallel.data_parallel_size
    if rows < replicas:
        size_key = "trainer.samples_per_step" if isinstance(config, SFTConfig) else "trainer.prompts_per_step"
        yield Violation(
            (replicas_key, size_key),
            f"a mini-batch has {rows} rows, fewer than data_parallel_size {replicas}, so some replicas would have nothing to learn from; "
            f"use data_parallel_size {max(rows, 1)} or fewer, or mini-batches of {replicas} rows or more",
        )


def _micro_batch(config: RunConfig, role: ModelRole) -> Violations:
    limit, key = role.micro_batch, role.micro_batch_key
    if (limit.sequences is None) == (limit.max_tokens is None):
        given = "neither is" if limit.sequences is None else f"both are ({limit.sequences} and {limit.max_tokens})"
        yield Violation(
            (f"{key}.sequences", f"{key}.max_tokens"), f"give exactly one, but {given}; set the other to null, as in {key}.max_tokens=null"
        )
    elif role.reads_policy_tokens and limit.max_tokens is not None:
        yield from _row_fits(config, role, limit.max_tokens)


def _row_fits(config: RunConfig, role: ModelRole, max_tokens: int) -> Violations:
    needed, size = room_of_longest_row(config, role), role.parallel.context_parallel_size
    if needed <= max_tokens * size:
        return
    lengths = ("data.max_length",) if isinstance(config, SFTConfig) else ("data.max_prompt_length", "data.max_response_length")
    room, padded = f"max_tokens {max_tokens}", ""
    if size > 1:
        lengths = (f"{role.parallel_key}.context_parallel_size", *lengths)
        room, padded = f"{room} x context_parallel_size {size} = {max_tokens * size}", f" ({needed} with what pads the ranks' parts)"
    yield Violation(
        (f"{role.micro_batch_key}.max_tokens", *lengths),
        f"a row may have {max_row_tokens(config)} tokens{padded}, more than {room}; "
        f"use max_tokens {-(-needed // size)} or more, or shorter rows",
    )


def _recomputation(role: ModelRole) -> Violations:
    (how, modules, num_layers), section = role.recomputation, role.parallel_key.removesuffix(".parallel")
    keys = f"{section}.recompute_modules", f"{section}.recompute"
    if how is Recompute.selective and not modules:
        yield Violation(
            keys, "selective computes nothing again, as recompute_modules is empty; name one, as [core_attn], or use recompute=none"
        )
    if how is not Recompute.selective and modules != Recomputation().modules:
        named = ", ".join(module.value for module in modules)
        yield Violation(
            keys, f"recompute_modules [{named}] are for recompute=selective, but it is {how.value}; leave them out, or use selective"
        )
    if how is not Recompute.full and num_layers is not None:
        yield Violation(
            (f"{section}.recompute_num_layers", f"{section}.recompute"),
            f"recompute_num_layers {num_layers} is for recompute=full, but it is {how.value}; leave it null, or use full",
        )


def _fits_layout(role: ModelRole, architecture: Architecture) -> Violations:
    parallel, tensor = role.parallel, role.parallel.tensor_parallel_size
    fields = ["num_attention_heads", "num_key_value_heads", *(["intermediate_size"] if architecture.num_dense_layers else [])]
    sizes = {field: getattr(architecture, field) for field in fields}
    if left := [f"{field} {size}" for field, size in sizes.items() if size % tensor]:
        yield Violation(
            (f"{role.parallel_key}.tensor_parallel_size",),
            f"{' and '.join(left)} of {role.path} {'does' if len(left) == 1 else 'do'} not divide by tensor_parallel_size {tensor}; "
            f"use {either(nearest_divisors(gcd(*sizes.values()), tensor))}",
        )
    stages = parallel.pipeline_parallel_size * (parallel.virtual_pipeline_parallel_size or 1)
    layers = architecture.num_hidden_layers
    if layers % stages:
        product = f"pipeline_parallel_size {parallel.pipeline_parallel_size}"
        if parallel.virtual_pipeline_parallel_size is not None:
            product += f" x virtual_pipeline_parallel_size {parallel.virtual_pipeline_parallel_size} = {stages}"
        yield Violation(
            (f"{role.parallel_key}.pipeline_parallel_size",),
            f"num_hidden_layers {layers} of {role.path} does not divide by {product}; "
            f"use {either(nearest_divisors(layers, stages))} stages",
        )
        return
    recomputed = role.recomputation.num_layers
    if recomputed is not None and recomputed > layers // stages:
        yield Violation(
            (f"{role.parallel_key.removesuffix('.parallel')}.recompute_num_layers", f"{role.parallel_key}.pipeline_parallel_size"),
            f"recompute_num_layers {recomputed} is more than the {layers // stages} layers of a stage; use fewer, or null for all",
        )


def _lengths_fit(config: RunConfig, architectures: dict[str, Architecture]) -> Violations:
    tokens = max_row_tokens(config)
    for role in model_roles(config):
        if role.name not in architectures or not role.reads_policy_tokens:
            continue
        if tokens <= (limit := architectures[role.name].max_position_embeddings):
            continue
        if isinstance(config, SFTConfig):
            yield Violation(("data.max_length",), f"is {tokens}, more than max_position_embeddings {limit} of {role.path}; use {limit}")
            continue
        prompt, response = config.data.max_prompt_length, config.data.max_response_length
        remedy = f"max_response_length {limit - prompt}" if prompt < limit else "shorter prompts"
        yield Violation(
            ("data.max_prompt_length", "data.max_response_length"),
            f"{prompt} + {response} = {tokens} tokens are more than max_position_embeddings {limit} of {role.path}; use {remedy}",
        )


def _same_vocabulary(config: RunConfig, architectures: dict[str, Architecture]) -> Violations:
    """All models read the policy's token ids; the reference must be a distribution over the same ones."""
    if not isinstance(config, PPOConfig) or "actor" not in architectures:
        return
    policy = architectures["actor"].vocab_size
    if needs_reference(config) and "reference" in architectures and architectures["reference"].vocab_size != policy:
        yield Violation(
            ("reference.path", "model.path"),
            f"the reference has vocab_size {architectures['reference'].vocab_size}, the policy {policy}; their KL needs one vocabulary",
        )
    if "critic" in architectures and architectures["critic"].vocab_size < policy:
        yield Violation(
            ("critic.model.path", "model.path"),
            f"the critic has vocab_size {architectures['critic'].vocab_size}, below the policy's {policy}; it reads the policy's tokens",
        )
