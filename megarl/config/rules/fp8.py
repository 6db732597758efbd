"""Rules for engines with weights in block-scaled FP8 (`rollout.dtype: fp8`)."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.schema import CorrectionLevel, EngineDType, PPOConfig, RolloutEngineKind, Transport
from megarl.config.violation import Violation, Violations, either
from megarl.models.architecture import Architecture
from megarl.weights.fp8 import BLOCK

_DTYPE = "rollout.dtype"
_TP = "rollout.tensor_parallel_size"


def run(config: PPOConfig) -> Violations:
    """Check that the run can send FP8 to its engines, and corrects for the difference."""
    if config.rollout.dtype is not EngineDType.fp8:
        return

    if config.rollout.engine is not RolloutEngineKind.sglang:
        yield Violation(
            (_DTYPE, "rollout.engine"),
            f"is fp8, but the engine {config.rollout.engine.value} computes in the dtype of the model; use "
            "rollout.dtype=model, or rollout.engine=sglang",
        )

    correction = config.algorithm.rollout_correction
    if correction.level is CorrectionLevel.none and not correction.bypass:
        yield Violation(
            (_DTYPE, "algorithm.rollout_correction.level"),
            "is fp8, so samples come from rounded weights, not from the trained ones, and no correction is "
            "enabled; use algorithm.rollout_correction.level=token (truncated importance weights) or "
            "sequence, or rollout_correction.bypass=true",
        )

    if config.resharding.transport is Transport.folder:
        yield Violation(
            (_DTYPE, "resharding.transport"),
            "is fp8, but folders have the dtype of the model; use resharding.transport=auto",
        )

    if config.actor.served_adapters is not None:
        yield Violation(
            (_DTYPE, "actor.lora.sync"),
            "is fp8, but SGLang gets adapters on top of a model in its own dtype only; use "
            "actor.lora.sync=merged",
        )


def fits_model(config: PPOConfig, policy: Architecture) -> Violations:
    """Check that an engine has every matrix in whole blocks."""
    if config.rollout.dtype is not EngineDType.fp8:
        return
    path = config.model.path
    unsupported = {
        "a vision tower": policy.vision,
        "gated delta nets": policy.delta_net,
        "latent attention": policy.latent,
        "experts": policy.experts,
    }
    if parts := [name for name, part in unsupported.items() if part is not None]:
        yield Violation(
            (_DTYPE,),
            f"is fp8, but {path} ({policy.model_type}) has {' and '.join(parts)}, which are not supported in "
            "FP8; use rollout.dtype=model",
        )
        return

    size = config.rollout.tensor_parallel_size
    if faults := list(_partial_blocks(policy, size)):
        fitting = [
            other
            for other in range(1, policy.num_attention_heads + 1)
            if policy.num_attention_heads % other == 0 and not any(_partial_blocks(policy, other))
        ]
        nearest = [max((each for each in fitting if each < size), default=0)]
        nearest += [min((each for each in fitting if each > size), default=0)]
        options = [each for each in nearest if each]
        use = f"{_TP}={either(options)}, or rollout.dtype=model" if options else "rollout.dtype=model"
        yield Violation(
            (_DTYPE, _TP),
            f"is fp8, but of {path} a rank of {size} would have {', '.join(faults)}, not multiples of the "
            f"block of {BLOCK}; use {use}",
        )


def _partial_blocks(policy: Architecture, size: int) -> Iterator[str]:
    """Yield the sizes on a rank of an engine of `size` ranks that are not whole blocks.

    Projections that SGLang merges must be whole blocks also on one rank; the others only if they are divided.
    """
    heads = {
        "queries": policy.num_attention_heads / size,
        "keys": max(1.0, policy.num_key_value_heads / size),
    }
    sizes = {f"{count:g} heads of {name}": count * policy.head_dim for name, count in heads.items()}
    sizes["a feed-forward"] = policy.intermediate_size / size
    yield from (f"{name} with {rows:g} rows" for name, rows in sizes.items() if rows % BLOCK)
