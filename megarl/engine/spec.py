"""What one model of a run is built from."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.architecture import Architecture
from megarl.config.schema import Device, DType, EngineConfig, OptimConfig, ParallelConfig, Recomputation
from megarl.engine.offload import StatePart
from megarl.weights.name_mapping import Head


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model of a role: where its weights are, what it is, and how its processes are laid out.

    path: a Hugging Face folder. head: "lm" scores tokens, "value" is a critic. optim None: the model is frozen.
    temperature: log-probs are of softmax(logits / temperature), as the rollout engine samples.
    total_optimizer_steps: where the learning-rate decay ends.
    offloaded_at_first: leaves memory when the model is built: others need its place.
    collective_limit_s: how long ranks wait for each other.
    """

    path: str
    architecture: Architecture
    head: Head
    dtype: DType
    parallel: ParallelConfig
    engine: EngineConfig
    device: Device
    seed: int
    temperature: float = 1.0
    optim: OptimConfig | None = None
    total_optimizer_steps: int = 1
    recomputation: Recomputation = Recomputation()
    offloaded_at_first: tuple[StatePart, ...] = ()
    collective_limit_s: float = 1800.0
