"""Rules for engines with weights in block-scaled FP8 (`rollout.dtype: fp8`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megarl.config.schema import CorrectionLevel, EngineDType, PPOConfig
from megarl.config.finding import Finding, Findings, either
from megarl.models.architecture import Architecture, LatentAttention
from megarl.models.fp8 import BLOCK, unsupported_parts

_DTYPE = "rollout.dtype"
_TP = "rollout.tensor_parallel_size"


def run(config: PPOConfig) -> Findings:
    """Check that the run can send FP8 to its engines, and corrects for the difference."""
    if config.rollout.dtype is not EngineDType.fp8:
        return

    if not config.rollout.engine.needs.computes_fp8:
        yield Finding(
            (_DTYPE, "rollout.engine"),
            f"is fp8, but the engine {config.rollout.engine.value} computes in the dtype of the model; use "
            "rollout.dtype=model, or rollout.engine=sglang",
        )

    correction = config.algorithm.rollout_correction
    if correction.level is CorrectionLevel.none and not correction.bypass:
        yield Finding(
            (_DTYPE, "algorithm.rollout_correction.level"),
            "is fp8, so samples come from rounded weights, not from the trained ones, and no correction is "
            "enabled; use algorithm.rollout_correction.level=token (truncated importance weights) or "
            "sequence, or rollout_correction.bypass=true",
        )

    if config.resharding.transport.needs.through_files:
        yield Finding(
            (_DTYPE, "resharding.transport"),
            "is fp8, but folders have the dtype of the model; use resharding.transport=auto",
        )

    if config.actor.served_adapters is not None:
        yield Finding(
            (_DTYPE, "actor.lora.sync"),
            "is fp8, but SGLang gets adapters on top of a model in its own dtype only; use "
            "actor.lora.sync=merged",
        )


def fits_model(config: PPOConfig, policy: Architecture) -> Findings:
    """Check that SGLang has FP8 layers for the model, and that every rank has whole blocks."""
    if config.rollout.dtype is not EngineDType.fp8:
        return

    path = config.model.path
    if parts := unsupported_parts(policy):
        yield Finding(
            (_DTYPE,),
            f"is fp8, but {path} ({policy.model_type}) has {' and '.join(parts)}, which are not supported in "
            "FP8; use rollout.dtype=model",
        )
        return
    size = config.rollout.tensor_parallel_size
    groups = config.rollout.expert_parallel_size
    if size % groups or not (partial := [part for part in _parts(policy, size, groups) if not part.is_whole]):
        return

    # Sizes that shard the heads evenly and leave whole blocks.
    fitting = [
        other
        for other in range(groups, policy.num_attention_heads + 1, groups)
        if policy.num_attention_heads % other == 0
        and all(part.is_whole for part in _parts(policy, other, groups))
    ]
    nearest = [
        max((each for each in fitting if each < size), default=0),
        min((each for each in fitting if each > size), default=0),
    ]
    options = [each for each in nearest if each]
    use = f"{_TP}={either(options)}, or rollout.dtype=model" if options else "rollout.dtype=model"
    sizes = ", ".join(f"{part.size:g} {part.dimension} of {part.tensor}" for part in partial)
    yield Finding(
        (_DTYPE, _TP),
        f"is fp8, but a rank of an engine of {size} would have {sizes} of {path}, and SGLang requires whole "
        f"blocks of {BLOCK}; use {use}",
    )


class _Part(NamedTuple):
    """A rank's part of a projection, or of several that SGLang merges."""

    tensor: str
    dimension: str  # rows or columns
    size: float

    @property
    def is_whole(self) -> bool:
        return self.size % BLOCK == 0


def _parts(policy: Architecture, size: int, expert_groups: int) -> Iterator[_Part]:
    """Yield what must consist of whole blocks on a rank of an engine of `size` ranks.

    What SGLang merges must be whole blocks also on a single rank. The columns of output projections have the
    size of the rows of input projections.
    """
    if policy.latent is not None:
        yield from _latent_parts(policy, policy.latent, size)
    else:
        # With more ranks than key-value heads, SGLang replicates the heads.
        kv_heads = max(1.0, policy.num_key_value_heads / size)
        yield _Part("q_proj", "rows", policy.num_attention_heads / size * policy.head_dim)
        yield _Part("k_proj and v_proj", "rows", kv_heads * policy.head_dim)

    if policy.num_dense_layers:
        yield _Part("gate_proj and up_proj", "rows", policy.intermediate_size / size)
    if (experts := policy.experts) is not None:
        ranks = size / expert_groups
        yield _Part("gate_proj and up_proj of an expert", "rows", experts.intermediate_size / ranks)
        yield _Part(
            "gate_proj and up_proj of shared experts", "rows", experts.shared_intermediate_size / size
        )


def _latent_parts(policy: Architecture, latent: LatentAttention, size: int) -> Iterator[_Part]:
    # SGLang merges q_a_proj with kv_a_proj_with_mqa, on every rank.
    if latent.q_lora_rank is not None:
        yield _Part("q_a_proj", "rows", latent.q_lora_rank)

    if size > 1:
        heads = policy.num_attention_heads / size
        queries = "q_b_proj" if latent.q_lora_rank is not None else "q_proj"
        yield _Part(queries, "rows", heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim))
        yield _Part("kv_b_proj", "rows", heads * (latent.qk_nope_head_dim + latent.v_head_dim))
        yield _Part("o_proj", "columns", heads * latent.v_head_dim)
