"""How much a run keeps: the state of a model on a rank, the logits of a chunk, and checkpoints on the disk.
Pure."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import DType, EngineConfig, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.counts import num_expert_parameters, num_parameters


def state_bytes(dtype: DType, role: ModelRole, architecture: Architecture) -> int:
    """Return the bytes of weights, gradients and optimizer state on a rank.

    Weights are in `dtype`. A model that trains has float32 gradients and, divided by the ranks that hold the
    same parameters (ZeRO 1), two float32 Adam moments and a float32 master copy of bfloat16 weights.
    """
    parallel = role.parallel
    of_experts = num_expert_parameters(architecture)
    dense = num_parameters(architecture, with_value_head=role.with_value_head) - of_experts
    dense_cut = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    expert_cut = (
        parallel.expert_parallel_size * parallel.expert_tensor_parallel_size * parallel.pipeline_parallel_size
    )
    # Float32 weights are their own master copy.
    weight_bytes, master_bytes = (4, 0) if dtype is DType.float32 else (2, 4)
    total = 0

    # Experts are divided over other ranks than the rest, and have fewer copies for ZeRO 1.
    for parameters, copies in (
        (-(-dense // dense_cut), parallel.num_copies),
        (-(-of_experts // expert_cut), parallel.expert_data_parallel_size),
    ):
        total += parameters * weight_bytes
        if role.optim is not None:
            total += parameters * 4 + parameters * (8 + master_bytes) // copies

    return total


def logit_chunk_tokens(config: EngineConfig, architecture: Architecture) -> int:
    """Return for how many tokens logits exist at a time.

    The default is 1,024, or as many as have 2**24 logits, which are 64 MiB in float32: those of a small
    vocabulary take less memory to keep than time to compute again.
    """
    return config.log_prob_chunk_tokens or max(1024, 2**24 // architecture.vocab_size)


def checkpoint_bytes(config: RunConfig, architectures: Mapping[str, Architecture]) -> int:
    """Return the bytes of one checkpoint, without what is small.

    Each model that trains has its weights, float32 masters and two float32 moments in it; with `save_hf` the
    policy's weights are there twice.
    """
    weight_bytes = 4 if config.model.dtype is DType.float32 else 2
    total = 0

    for role in model_roles(config):
        if role.optim is not None:
            parameters = num_parameters(architectures[role.name], with_value_head=role.with_value_head)
            # Twelve bytes: the float32 master and the two float32 moments.
            total += parameters * (weight_bytes + 12)
            total += parameters * weight_bytes * (role.name == "actor" and config.checkpoint.save_hf)

    return total


def most_checkpoints(config: RunConfig) -> int:
    """Return how many checkpoints are on the disk at one time: a new one is written before an old one is
    removed."""
    checkpoint = config.checkpoint
    steps = config.trainer.total_steps
    keeps_best = checkpoint.keep_best.metric is not None
    made = steps // checkpoint.every_steps if checkpoint.every_steps else 0

    if checkpoint.every_minutes or keeps_best:
        made = steps  # nobody knows which of them
    # The last step may already have a checkpoint, as a multiple of every_steps.
    elif checkpoint.at_end and not (checkpoint.every_steps and steps % checkpoint.every_steps == 0):
        made += 1

    # keep=0 keeps all; otherwise the new one is beside those kept, and perhaps beside the best.
    return made if checkpoint.keep == 0 else min(made, checkpoint.keep + 1 + keeps_best)
