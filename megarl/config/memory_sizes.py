"""Sizes of model state, logits and checkpoints. All functions are pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.config.megatron_options import element_bytes
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import DType, EngineConfig, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.counts import (
    num_expert_parameters,
    num_parameters,
    padded_vocab_size,
    without_saved_modules,
)


def state_bytes(dtype: DType, role: ModelRole, architecture: Architecture) -> int:
    """Return the bytes of weights, gradients and optimizer state on a rank.

    Weights are in `dtype`. A trained model also has gradients and, sharded over the ranks with the same
    parameters (ZeRO 1), the optimizer's moments and a float32 master copy of bfloat16 weights. Gradients and
    moments are float32, unless the options of Megatron say otherwise. A role that is another one's model
    without its adapters has no state.
    """
    if role.base_of is not None:
        return 0
    parallel = role.parallel
    dense_cut = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    expert_cut = (
        parallel.expert_parallel_size * parallel.expert_tensor_parallel_size * parallel.pipeline_parallel_size
    )
    weight_bytes = 4 if dtype is DType.float32 else 2

    # Experts are sharded over other ranks than the rest.
    dense, of_experts = _counts(role, architecture, trained_only=False)
    total = (-(-dense // dense_cut) + -(-of_experts // expert_cut)) * weight_bytes
    if role.optim is None:
        return total

    # A reference that is the model without its adapters has saved modules of its own.
    if role.runs_base:
        kinds = (architecture, without_saved_modules(architecture))
        trained, adapters = (_counts(role, kind, trained_only=True)[0] for kind in kinds)
        total += -(-(trained - adapters) // dense_cut) * weight_bytes

    # They also have fewer copies for ZeRO 1. Frozen parameters have neither gradients nor state.
    dense, of_experts = _counts(role, architecture, trained_only=architecture.is_partly_frozen)
    of_element = element_bytes(dtype, role.megatron, role.optim.kind)
    state = of_element.moments + of_element.master
    for parameters, copies in (
        (-(-dense // dense_cut), parallel.num_copies),
        (-(-of_experts // expert_cut), parallel.expert_data_parallel_size),
    ):
        total += parameters * of_element.gradient + parameters * state // copies

    return total


def _counts(role: ModelRole, architecture: Architecture, *, trained_only: bool) -> tuple[int, int]:
    """Return the numbers of parameters outside experts, and of experts."""
    of_experts = num_expert_parameters(architecture, trained_only=trained_only)
    with_head = role.with_value_head
    return num_parameters(architecture, with_head, trained_only=trained_only) - of_experts, of_experts


def logit_chunk_tokens(config: EngineConfig, architecture: Architecture) -> int:
    """Return the number of tokens whose logits are materialized at a time.

    The default is 1,024, or more for a small vocabulary: as many tokens as have 2**24 logits, which take
    64 MiB in float32.
    """
    return config.log_prob_chunk_tokens or max(1024, 2**24 // architecture.vocab_size)


def checkpoint_bytes(config: RunConfig, architectures: Mapping[str, Architecture]) -> int:
    """Return the bytes of one checkpoint, without small files, headers and tensors that are kept.

    A checkpoint contains the weights, float32 master weights and moments of each trained model; with
    adapters, those of the adapters. The vocabulary is padded as in training. With `save_hf` it also contains
    the policy as a Hugging Face folder, without padding.
    """
    weight_bytes = 4 if config.model.dtype is DType.float32 else 2
    total = 0

    for role in model_roles(config):
        if role.optim is not None:
            architecture = architectures[role.name]
            has_adapters = architecture.lora is not None
            padded = replace(
                architecture,
                vocab_size=padded_vocab_size(architecture.vocab_size, role.parallel.tensor_parallel_size),
            )
            parameters = num_parameters(padded, role.with_value_head, trained_only=has_adapters)
            # Four bytes for the float32 master, in addition to the moments.
            moments = element_bytes(config.model.dtype, role.megatron, role.optim.kind).moments
            total += parameters * (weight_bytes + 4 + moments)
            exported = num_parameters(architecture.base, role.with_value_head)
            total += exported * weight_bytes * (role.name == "actor" and config.checkpoint.save_hf)

    return total


def most_checkpoints(config: RunConfig) -> int:
    """Return the maximum number of checkpoints on disk at a time.

    A new one is written before an old one is removed.
    """
    checkpoint = config.checkpoint
    steps = config.trainer.total_steps
    keeps_best = checkpoint.keep_best.metric is not None
    made = steps // checkpoint.every_steps if checkpoint.every_steps else 0

    if checkpoint.every_minutes or keeps_best:
        made = steps  # Any step may have one.
    # The last step may already have a checkpoint, as a multiple of every_steps.
    elif checkpoint.at_end and not (checkpoint.every_steps and steps % checkpoint.every_steps == 0):
        made += 1

    # keep=0 keeps all. Otherwise there are the new one, those kept, and possibly the best one.
    return made if checkpoint.keep == 0 else min(made, checkpoint.keep + 1 + keeps_best)
