"""Rules for training with products in FP8 (`{role}.megatron.transformer.fp8`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megarl.config.roles import ModelRole
from megarl.config.schema import Device, RunConfig
from megarl.config.violation import Violation, Violations
from megarl.models.architecture import Architecture, LatentAttention

# Transformer Engine multiplies in FP8 only if both dimensions of a weight are multiples of it
# (`assert_dim_for_fp8_exec`).
MULTIPLE = 16
_DELAYED = "delayed"  # Megatron's default


def recipe(config: RunConfig, role: ModelRole) -> Violations:
    """Refuse the recipe whose scales come from earlier batches."""
    options = role.megatron.transformer
    is_delayed = options.get("fp8") and options.get("fp8_recipe", _DELAYED) == _DELAYED
    if not is_delayed or config.device is Device.cpu:  # where FP8 is refused anyway
        return

    key = f"{role.megatron_key}.transformer.fp8_recipe"
    given = "is delayed" if "fp8_recipe" in options else "is not set, so it is delayed"

    yield Violation(
        (key,),
        f"{given}: its scales come from earlier micro-batches, so log-probs would depend on what ran "
        "before, and a recovered or resumed run would differ; use blockwise (Hopper), mxfp8 (Blackwell) or "
        "tensorwise",
    )


def fit_model(role: ModelRole, architecture: Architecture) -> Violations:
    """Check that a rank's part of every projection has sizes that Transformer Engine multiplies in FP8."""
    if not role.megatron.transformer.get("fp8"):
        return
    refused = [width for width in _widths(role, architecture) if width.size % MULTIPLE]
    if not refused:
        return

    sizes = ", ".join(f"{width.size:g} {width.dimension}" for width in refused)
    yield Violation(
        (f"{role.megatron_key}.transformer.fp8", role.parallel_key),
        f"is {role.megatron.transformer['fp8']}, but a rank of {role.path} would have {sizes}, and FP8 needs "
        f"multiples of {MULTIPLE}; use fewer tensor-parallel ranks, or remove fp8",
    )


class _Width(NamedTuple):
    dimension: str
    size: float


def _widths(role: ModelRole, architecture: Architecture) -> Iterator[_Width]:
    """Yield the sizes of the rows and columns of a rank's projections."""
    size = role.parallel.tensor_parallel_size
    yield _Width("numbers of a hidden state", architecture.hidden_size)

    if (latent := architecture.latent) is not None:
        yield from _latent_widths(latent, architecture.num_attention_heads / size)
    else:
        heads = architecture.num_attention_heads / size * architecture.head_dim
        keys = architecture.num_key_value_heads / size * architecture.head_dim
        yield _Width("rows of queries, keys and values", heads + 2 * keys)
        yield _Width("columns of o_proj", heads)

    if architecture.num_dense_layers:
        yield _Width("columns of down_proj", architecture.intermediate_size / size)
    if (experts := architecture.experts) is not None:
        ranks = role.parallel.expert_tensor_parallel_size
        yield _Width("columns of an expert's down_proj", experts.intermediate_size / ranks)
        yield _Width("columns of the shared experts' down_proj", experts.shared_intermediate_size / size)


def _latent_widths(latent: LatentAttention, heads: float) -> Iterator[_Width]:
    if latent.q_lora_rank is not None:
        yield _Width("rows of q_a_proj", latent.q_lora_rank)
    yield _Width("rows of queries", heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim))
    yield _Width("rows of kv_a_proj_with_mqa", latent.kv_lora_rank + latent.qk_rope_head_dim)
    yield _Width("columns of kv_b_proj", latent.kv_lora_rank)
    yield _Width("rows of kv_b_proj", heads * (latent.qk_nope_head_dim + latent.v_head_dim))
    yield _Width("columns of o_proj", heads * latent.v_head_dim)
