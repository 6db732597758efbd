"""The sections of Megatron-Core's options, which megarl passes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Options of Megatron-Core for a trained model, by Megatron's names; see Options of Megatron-Core.

    `base` selects one of the presets in `configs/megatron`, or a list of them, which are combined.
    """

    # fields of TransformerConfig and ModelParallelConfig
    transformer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)  # fields of DistributedDataParallelConfig
    optimizer: dict[str, Any] = field(default_factory=dict)  # fields of OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class ReferenceMegatronConfig:
    """Options of Megatron-Core for the reference, which needs no others than those of its layers."""

    # fields of TransformerConfig; null: those of the actor, so that both compute with the same numerics
    transformer: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class FrozenMegatronConfig:
    """Options of Megatron-Core for a model that does not train."""

    transformer: dict[str, Any] = field(default_factory=dict)  # fields of TransformerConfig
