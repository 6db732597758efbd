"""The specification that one model of a run is built from."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.batch_arithmetic import optimizer_steps
from megarl.config.roles import ModelRole
from megarl.config.schema import (
    Device,
    DType,
    EngineConfig,
    EngineDType,
    ExpertsConfig,
    MegatronConfig,
    OptimConfig,
    ParallelConfig,
    PPOConfig,
    Recomputation,
    RunConfig,
)
from megarl.engine.offload import StatePart
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Head

# The time between the driver's limit of a phase, which shows every rank's stack, and NCCL's, which ends the
# process.
_GRACE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model of a role: its weights, its kind, and the layout of its processes.

    Attributes:
        path: A Hugging Face folder.
        head: "lm" scores tokens; "value" is a critic.
        temperature: Log-probs are those of softmax(logits / temperature), as the rollout engine samples.
        optim: The optimizer. None: the model is frozen.
        total_optimizer_steps: The end of the learning-rate decay.
        recomputation: What is recomputed in the backward pass.
        routers: How the routers of a mixture-of-experts model are trained (the section `experts`).
        lora_path: The folder of the adapters to start from, in PEFT's format. None: new adapters.
        runs_base: Whether the model also runs without its adapters, as another role.
        pushes_adapters: Whether engines get the adapters separately, not merged.
        pushes_fp8: Whether engines get block-scaled FP8.
        freeze_vision: Whether a vision tower is not trained.
        indexer_loss: The weight of the loss that trains indexers; 0: they are frozen.
        megatron: Options that are passed on to Megatron.
        offloaded_at_first: State that is offloaded when the model has been built, because others need its
            memory.
        device_peak_tflops: The peak rate of a device, if the device is not in the table.
        check_replicas_every: The updates between comparisons of weights that several ranks hold; 0: never.
        measures_speed: Whether each update measures how fast the device is (`platform.SpeedProbe`).
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
    routers: ExpertsConfig = ExpertsConfig()
    lora_path: str | None = None
    runs_base: bool = False
    pushes_adapters: bool = False
    pushes_fp8: bool = False
    freeze_vision: bool = False
    indexer_loss: float = 0.0
    megatron: MegatronConfig = MegatronConfig()
    offloaded_at_first: tuple[StatePart, ...] = ()
    collective_limit_s: float = 1800.0
    device_peak_tflops: float | None = None
    check_replicas_every: int = 0
    measures_speed: bool = False


def spec_of(
    config: RunConfig,
    role: ModelRole,
    architecture: Architecture,
    device: Device,
    offloaded_at_first: tuple[StatePart, ...] = (),
) -> ModelSpec:
    """Return the specification of one role of a run."""
    return ModelSpec(
        path=role.path,
        architecture=role.trained(architecture),
        head="value" if role.with_value_head else "lm",
        dtype=config.model.dtype,
        parallel=role.parallel,
        engine=config.engine,
        device=device,
        seed=config.trainer.seed,
        temperature=1.0 if role.with_value_head else config.temperature,
        optim=role.optim,
        total_optimizer_steps=optimizer_steps(config, role),
        recomputation=role.recomputation,
        routers=role.routers,
        lora_path=role.lora_path,
        runs_base=role.runs_base,
        pushes_adapters=role.serves_adapters,
        pushes_fp8=isinstance(config, PPOConfig) and config.rollout.dtype is EngineDType.fp8,
        freeze_vision=role.freeze_vision,
        indexer_loss=role.indexer_loss,
        megatron=role.megatron,
        offloaded_at_first=offloaded_at_first,
        collective_limit_s=config.trainer.phase_time_limit_s + _GRACE_S,
        device_peak_tflops=config.placement.device_peak_tflops,
        check_replicas_every=config.recovery.check_replicas_every,
        measures_speed=config.recovery.straggler_factor > 0 and role.parallel.world_size > 1,
    )
