"""Rules for FP8: engines with block-scaled weights (`rollout.dtype: fp8`), and training with products in FP8.

Training is configured by `{role}.megatron.transformer.fp8`.
"""

from __future__ import annotations

from megarl.config.finding import Finding, Findings, conflicts, either
from megarl.config.roles import ModelRole
from megarl.config.schema import (
    CorrectionLevel,
    Device,
    EngineDType,
    PPOConfig,
    RunConfig,
)
from megarl.models.architecture import Architecture
from megarl.models.fp8 import BLOCK, unsupported_parts
from megarl.models.layers import kinds_of, linears_of
from megarl.models.tensor_table import dimension_sizes

_DTYPE = "rollout.dtype"
_TP = "rollout.tensor_parallel_size"


def run(config: PPOConfig) -> Findings:
    """Check that the run can send FP8 to its engines, and corrects for the difference."""
    if config.rollout.dtype is not EngineDType.fp8:
        return

    correction = config.algorithm.rollout_correction
    yield from conflicts(
        _DTYPE,
        "is fp8, ",
        (
            ("rollout.engine",),
            not config.rollout.engine.needs.computes_fp8,
            f"but the engine {config.rollout.engine.value} computes in the dtype of the model; use "
            "rollout.dtype=model, or rollout.engine=sglang",
        ),
        (
            ("algorithm.rollout_correction.level",),
            correction.level is CorrectionLevel.none and not correction.bypass,
            "so samples come from rounded weights, not from the trained ones, and no correction is enabled; "
            "use algorithm.rollout_correction.level=token (truncated importance weights) or sequence, or "
            "rollout_correction.bypass=true",
        ),
        (
            ("resharding.transport",),
            config.resharding.transport.needs.through_files,
            "but folders have the dtype of the model; use resharding.transport=auto",
        ),
        (
            ("actor.lora.sync",),
            config.actor.served_adapters is not None,
            "but SGLang gets adapters on top of a model in its own dtype only; use actor.lora.sync=merged",
        ),
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
    if size % groups or not (partial := _partial_blocks(policy, size, groups)):
        return

    # Sizes that shard the heads evenly and leave whole blocks.
    fitting = [
        other
        for other in range(groups, policy.num_attention_heads + 1, groups)
        if policy.num_attention_heads % other == 0 and not _partial_blocks(policy, other, groups)
    ]
    nearest = [
        max((each for each in fitting if each < size), default=0),
        min((each for each in fitting if each > size), default=0),
    ]
    options = [each for each in nearest if each]
    use = f"{_TP}={either(options)}, or rollout.dtype=model" if options else "rollout.dtype=model"
    sizes = ", ".join(f"{length:g} {dimension} of {tensor}" for tensor, dimension, length in partial)
    yield Finding(
        (_DTYPE, _TP),
        f"is fp8, but a rank of an engine of {size} would have {sizes} of {path}, and SGLang requires whole "
        f"blocks of {BLOCK}; use {use}",
    )


def _partial_blocks(policy: Architecture, size: int, expert_groups: int) -> list[tuple[str, str, float]]:
    """Return what does not consist of whole blocks on a rank of an engine of `size` ranks.

    Each is a tensor, its dimension and the length of it. What SGLang merges must be whole blocks also on a
    single rank. The columns of output projections have the size of the rows of input projections.
    """
    sizes = dimension_sizes(policy)
    return [
        part
        for kind in kinds_of(policy)
        if kind.fp8_blocks is not None
        for part in kind.fp8_blocks(sizes, size, size / expert_groups)
        if part[2] % BLOCK
    ]


# Transformer Engine multiplies in FP8 only if both dimensions of a weight are multiples of it
# (`assert_dim_for_fp8_exec`).
MULTIPLE = 16
# The owners of matrices with these names, which the names of the modules do not tell.
_OWNERS = {"mlp.experts.": "an expert's ", "mlp.shared_experts.": "the shared experts' "}
_DELAYED = "delayed"  # Megatron's default


def recipe(config: RunConfig, role: ModelRole) -> Findings:
    """Refuse the recipe whose scales come from earlier batches."""
    options = role.megatron.transformer
    is_delayed = options.get("fp8") and options.get("fp8_recipe", _DELAYED) == _DELAYED
    if not is_delayed or config.device is Device.cpu:  # where FP8 is refused anyway
        return

    given = "is delayed" if "fp8_recipe" in options else "is not set, so it is delayed"
    yield Finding(
        (f"{role.megatron_key}.transformer.fp8_recipe",),
        f"{given}: its scales come from earlier micro-batches, so log-probs would depend on what ran "
        "before, and a recovered or resumed run would differ; use blockwise (Hopper), mxfp8 (Blackwell) or "
        "tensorwise",
    )


def products_fit(_: RunConfig, role: ModelRole, architecture: Architecture) -> Findings:
    """Check that a rank's part of every projection has sizes that Transformer Engine multiplies in FP8."""
    if not role.megatron.transformer.get("fp8"):
        return
    widths = _widths(role, architecture)
    sizes = ", ".join(f"{size:g} {where}" for size, where in widths.items() if size % MULTIPLE)
    if sizes:
        yield Finding(
            (f"{role.megatron_key}.transformer.fp8", role.parallel_key),
            f"is {role.megatron.transformer['fp8']}, but a rank of {role.path} would have {sizes}, and FP8 "
            f"needs multiples of {MULTIPLE}; use fewer tensor-parallel ranks, or remove fp8",
        )


def _widths(role: ModelRole, architecture: Architecture) -> dict[float, str]:
    """Return the sizes of the rows and columns of a rank's linear layers, each with one that has it."""
    parallel = role.parallel
    widths: dict[float, str] = {architecture.hidden_size: "numbers of a hidden state"}
    for matrix in linears_of(architecture):
        owner = next((owner for prefix, owner in _OWNERS.items() if matrix.name.startswith(prefix)), "")
        modules = owner + ", ".join(matrix.modules)
        rows, columns = matrix.shards(parallel.tensor_parallel_size, parallel.expert_tensor_parallel_size)
        widths.setdefault(matrix.inputs / columns, f"columns of {modules}")
        widths.setdefault(matrix.outputs / rows, f"rows of {modules}")
    return widths
