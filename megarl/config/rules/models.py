"""Rules for the layout, optimizer and micro-batches of each model, without and with its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from megarl.config.batch_arithmetic import room_of_longest_row
from megarl.config.finding import Finding, Findings, either, nearest_divisors, nearest_multiples, refusals
from megarl.config.roles import ModelRole, RoleKind, model_roles
from megarl.config.schema import (
    Device,
    DType,
    OnNonFinite,
    PPOConfig,
    PreferenceConfig,
    Recompute,
    RunConfig,
)
from megarl.config.schema.models import balanced_layout
from megarl.machine.errors import counted
from megarl.machine.folder_kinds import SCORING_MODELS, model_called
from megarl.models.architecture import Architecture
from megarl.models.families import read_fields
from megarl.models.layers import kinds_of, replaces_core
from megarl.models.rope import extended_context
from megarl.models.tensor_table import dimension_sizes


def optimizers(config: RunConfig) -> Findings:
    for section, model in config.trained_models.items():
        key = f"{section}.optim"
        optim = model.optim
        yield from refusals(
            (
                (f"{key}.min_lr", f"{key}.lr"),
                optim.min_lr > optim.lr,
                f"min_lr {optim.min_lr:g} is above lr {optim.lr:g}, from which the learning rate decays; "
                f"use a min_lr of {optim.lr:g} or less",
            ),
            (
                (f"{key}.on_nonfinite", "recovery.enabled"),
                optim.on_nonfinite is OnNonFinite.recover and not config.recovery.enabled,
                "on_nonfinite=recover returns to a snapshot, but recovery.enabled is false, so there is "
                "none; use recovery.enabled=true, or skip or stop",
            ),
        )


def layout(config: RunConfig, role: ModelRole) -> Findings:
    """Check the parallel sizes against each other, without the model."""
    parallel = role.parallel
    if parallel.context_parallel_size > 1 and not config.engine.packing:
        yield Finding(
            (f"{role.parallel_key}.context_parallel_size", "engine.packing"),
            f"context_parallel_size {parallel.context_parallel_size} requires packed rows, but packing is "
            f"false; use engine.packing=true, or context_parallel_size 1",
        )


def micro_batch(config: RunConfig, role: ModelRole) -> Findings:
    limit = role.micro_batch
    key = role.micro_batch_key

    if (limit.sequences is None) == (limit.max_tokens is None):
        given = (
            "neither is set"
            if limit.sequences is None
            else f"both are set ({limit.sequences} and {limit.max_tokens})"
        )
        yield Finding(
            (f"{key}.sequences", f"{key}.max_tokens"),
            f"exactly one must be set, but {given}; set the other to null, such as {key}.max_tokens=null",
        )
    # A reward model has its own tokens, so `rules.reward` checks its rows.
    elif role.reads_policy_tokens and limit.max_tokens is not None:
        yield from _row_fits(config, role, limit.max_tokens)


def _row_fits(config: RunConfig, role: ModelRole, max_tokens: int) -> Findings:
    needed = room_of_longest_row(config, role)
    size = role.parallel.context_parallel_size
    if needed <= max_tokens * size:
        return
    lengths = config.length_keys
    room = f"max_tokens {max_tokens}"
    padded = ""

    # Context-parallel ranks share a row, so the budgets of the ranks are added.
    if size > 1:
        lengths = (f"{role.parallel_key}.context_parallel_size", *lengths)
        room = f"{room} x context_parallel_size {size} = {max_tokens * size}"
        padded = f" ({needed} with the padding of the ranks' chunks)"

    longest = f"a row may have {config.max_row_tokens} tokens{padded}"
    if config.rows_together > 1:
        longest = f"a pair of answers, which stays together, may have {counted(needed, 'token')}"
    yield Finding(
        (f"{role.micro_batch_key}.max_tokens", *lengths),
        f"{longest}, more than {room}; use max_tokens {-(-needed // size)} or more, or shorter rows",
    )


def pairs_fit(config: PreferenceConfig) -> Findings:
    """Check that a micro-batch that is limited by rows has whole pairs of answers."""
    sequences = config.actor.micro_batch.sequences
    if sequences is not None and sequences % config.rows_together:
        yield Finding(
            ("actor.micro_batch.sequences",),
            f"is {sequences}, but the two rows of a pair of answers stay together; use "
            f"{either(nearest_multiples(sequences, config.rows_together))}",
        )


def recomputation(_: RunConfig, role: ModelRole) -> Findings:
    section = role.parallel_key.removesuffix(".parallel")
    selects_nothing = role.recomputation.how is Recompute.selective and not role.recomputation.modules
    if role.optim is not None and selects_nothing:
        yield Finding(
            (f"{section}.recompute_modules", f"{section}.recompute"),
            "selective recomputes nothing, because recompute_modules is empty; list a module, such as "
            "[core_attn], or use recompute=none",
        )


def rows_of_mini_batch(config: RunConfig, role: ModelRole) -> Findings:
    """Check that each replica of a trained model has at least one row of a mini-batch."""
    if role.optim is None:
        return

    # A pair of answers cannot be split, so pairs count.
    rows = config.samples_per_step // config.updates_per_pass // config.rows_together
    what = "row" if config.rows_together == 1 else "pair"
    replicas = role.parallel.data_parallel_size

    if rows < replicas:
        yield Finding(
            (f"{role.parallel_key}.data_parallel_size", config.batch_key),
            f"a mini-batch has {counted(rows, what)}, fewer than data_parallel_size {replicas}, so some "
            f"replicas would have no {what}s; use data_parallel_size {max(rows, 1)} or less, or mini-batches "
            f"of {counted(replicas, what)} or more",
        )


def fit_layout(_: RunConfig, role: ModelRole, architecture: Architecture) -> Findings:
    parallel = role.parallel
    tensor = role.parallel.tensor_parallel_size
    letters = dimension_sizes(architecture)
    kinds = kinds_of(architecture)
    sizes = {
        field: letters[letter]
        for kind in kinds
        if not kind.splits_heads
        for field, letter in (*kind.shared_out, *kind.replicable)
    }

    if left := [f"{field} {size}" for field, size in sizes.items() if size % tensor]:
        yield Finding(
            (f"{role.parallel_key}.tensor_parallel_size",),
            f"{' and '.join(left)} of {role.path} {'does' if len(left) == 1 else 'do'} not divide by "
            f"tensor_parallel_size {tensor}; use {either(nearest_divisors(gcd(*sizes.values()), tensor))}",
        )

    # Context parallelism distributes the heads of some kinds instead of their tokens.
    ranks = tensor * parallel.context_parallel_size
    for field, letter in (each for kind in kinds if kind.splits_heads for each in kind.shared_out):
        if letters[letter] % ranks:
            yield Finding(
                (f"{role.parallel_key}.tensor_parallel_size", f"{role.parallel_key}.context_parallel_size"),
                f"{field} {letters[letter]} of {role.path} does not divide by tensor_parallel_size {tensor} "
                f"x context_parallel_size {parallel.context_parallel_size} = {ranks}; use "
                f"{either(nearest_divisors(letters[letter], ranks))} ranks",
            )

    yield from _layers_of_stages(role, architecture)


def _layers_of_stages(role: ModelRole, architecture: Architecture) -> Findings:
    """Check that the (virtual) pipeline stages have all layers, and recompute no more than they have."""
    parallel = role.parallel
    stages = parallel.num_virtual_stages
    layers = architecture.num_hidden_layers
    product = f"pipeline_parallel_size {parallel.pipeline_parallel_size}"
    if parallel.virtual_pipeline_parallel_size is not None:
        product += f" x virtual_pipeline_parallel_size {parallel.virtual_pipeline_parallel_size} = {stages}"
    counts = parallel.pipeline_layout
    if counts is not None and parallel.virtual_pipeline_parallel_size is not None:
        yield Finding(
            (f"{role.parallel_key}.pipeline_layout", f"{role.parallel_key}.virtual_pipeline_parallel_size"),
            f"is {counts}, but megarl has no test of it with virtual stages; use null for one of them",
        )
        return
    # The example is one way to divide the layers.
    example = f"pipeline_layout={balanced_layout(layers, stages)}" if layers >= stages else ""

    if counts is None and layers % stages:
        choice = f", or {example}" if example and stages == parallel.pipeline_parallel_size else ""
        yield Finding(
            (f"{role.parallel_key}.pipeline_parallel_size",),
            f"num_hidden_layers {layers} of {role.path} does not divide by {product}; use "
            f"{either(nearest_divisors(layers, stages))} stages{choice}",
        )
        return
    if counts is not None and (len(counts) != stages or sum(counts) != layers or min(counts) < 1):
        yield Finding(
            (f"{role.parallel_key}.pipeline_layout",),
            f"is {counts}, but must have {counted(stages, 'number')} of at least 1 ({product}) whose sum is "
            f"the {counted(layers, 'layer')} of {role.path}{f'; use {example}' if example else ''}",
        )
        return

    most = max(counts) if counts else layers // stages
    recomputed = role.recomputation.num_layers
    if recomputed is not None and recomputed > most:
        yield Finding(
            (
                f"{role.parallel_key.removesuffix('.parallel')}.recompute_num_layers",
                f"{role.parallel_key}.pipeline_parallel_size",
            ),
            f"recompute_num_layers {recomputed} is more than the {counted(most, 'layer')} of a stage; use "
            "fewer, or null for all",
        )


def kernels_fit(config: RunConfig, role: ModelRole, architecture: Architecture) -> Findings:
    """Check that attention with sinks or windows is not float32 on CUDA, where it has no kernels."""
    is_float32 = config.device is Device.cuda and config.model.dtype is DType.float32
    if is_float32 and replaces_core(architecture):
        yield Finding(
            ("model.dtype", "device"),
            f"is float32, but the attention of {role.path} ({architecture.model_type}) has sinks or "
            "windows, for which there are no float32 kernels on CUDA; use bfloat16",
        )


def selections_fit(config: RunConfig, role: ModelRole, architecture: Architecture) -> Findings:
    """Check that layers that share the selection of an earlier one receive it, if rows are long enough."""
    indexer = architecture.indexer
    layers = architecture.num_hidden_layers
    if indexer is None or len(indexer.layers) == layers or config.max_row_tokens <= indexer.topk:
        return
    named = f"{role.path} ({architecture.model_type}) has layers that share the selection of an earlier layer"
    if not config.engine.packing:
        yield Finding(("engine.packing",), f"is false, but {named}, which needs packed rows; use true")

    stages = range(role.parallel.pipeline_parallel_size)
    chunks = [chunk for stage in stages for chunk in role.parallel.chunks_of_stage(layers, stage)]
    lacking = [chunk[0] for chunk in chunks if chunk and chunk[0] not in indexer.layers]
    if lacking:
        yield Finding(
            (role.parallel_key,),
            f"a (virtual) pipeline stage begins with layer {lacking[0]}, but {named}, and stages do not pass "
            f"selections on; let stages begin with layers among {list(indexer.layers)}, by pipeline_layout "
            "or another number of stages",
        )


def head_fits(_: RunConfig, role: ModelRole, architecture: Architecture) -> Findings:
    """Check that a model whose tokens count is a language model. A critic may start from any model."""
    called = model_called(read_fields(role.path))
    if not role.with_value_head and called.startswith(SCORING_MODELS):
        yield Finding(
            (role.path_key,),
            f"{role.path!r} is {called}, which returns a score instead of tokens; give the folder of a "
            "language model (a reward model belongs to reward.model.path)",
        )


def rows_fit(config: RunConfig, role: ModelRole, architecture: Architecture) -> Findings:
    """Check that a model that reads the policy's tokens takes the longest row."""
    most = architecture.max_position_embeddings
    tokens = config.max_row_tokens
    if not role.reads_policy_tokens or tokens <= most:
        return

    said = f"is {tokens}, above"
    hint = f"{most}"
    if isinstance(config, PPOConfig):
        prompt = config.longest_prompt
        said = f"{prompt} + {config.longest_response} = {tokens} tokens exceed"
        hint = f"max_response_length {most - prompt}" if prompt < most else "shorter prompts"
    yield Finding(
        config.length_keys,
        f"{said} max_position_embeddings {most} of {role.path}; use {hint}{_extension(architecture)}",
    )


def _extension(architecture: Architecture) -> str:
    """Return a hint if YaRN extends the context beyond `max_position_embeddings`.

    Model cards tell users to add the scaling to `config.json`, and not the new length.
    """
    extended = extended_context(architecture.rope_scaling)
    positions = architecture.max_position_embeddings
    if extended <= positions:
        return ""
    return f", or set max_position_embeddings to {extended} in config.json, to which YaRN extends the context"


def top_k_fits(config: PPOConfig, architectures: Mapping[str, Architecture]) -> Findings:
    """Check that the policy has as many tokens as the loss top_k_kl reads at each position."""
    k = config.algorithm.teacher_top_k
    if k is None or "actor" not in architectures:
        return
    if k > (size := architectures["actor"].vocab_size):
        yield Finding(
            ("algorithm.advantage.distillation.top_k", "model.path"),
            f"is {k:,}, but the policy has vocab_size {size:,}; use at most {size:,}, typically 16 to 256",
        )


def same_vocabulary(
    config: PPOConfig | PreferenceConfig, architectures: Mapping[str, Architecture]
) -> Findings:
    """Check that all models can read the policy's token ids.

    Frozen policies must have the same vocabulary. Models of one family and several sizes may pad it to
    several sizes, so a teacher may have more rows; `megarl.doctor` compares the tokenizers.
    """
    if "actor" not in architectures:
        return
    policy = architectures["actor"].vocab_size

    for role in model_roles(config):
        if role.kind not in (RoleKind.scorer, RoleKind.teacher) or role.name not in architectures:
            continue
        vocab_size = architectures[role.name].vocab_size
        if vocab_size != policy and not (role.kind is RoleKind.teacher and vocab_size > policy):
            yield Finding(
                tuple(dict.fromkeys((role.path_keys[0], "model.path"))),
                f"the {role.name} has vocab_size {vocab_size}, the policy {policy}, but comparing their "
                f"log-probs requires the same vocabulary; use models of one family",
            )

    # The critic only embeds the policy's tokens, so a larger vocabulary does no harm.
    if "critic" in architectures and architectures["critic"].vocab_size < policy:
        yield Finding(
            ("critic.model.path", "model.path"),
            f"the critic has vocab_size {architectures['critic'].vocab_size}, below the policy's {policy}, "
            "but it reads the policy's tokens; use a critic with the policy's vocabulary",
        )
