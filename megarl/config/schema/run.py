"""The course of a run: its steps, its checkpoints, what it writes down, and the device that it runs on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    packing: bool = True  # False: right-padded batches, kept as the reference
    log_prob_chunk_tokens: int = 1024  # logits are made for so many tokens at a time


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run's whole state is saved, where, and what a run that starts does with what is there."""

    dir: str | None = None  # None: `checkpoints` in `trainer.output_dir`
    every_steps: int = 0  # and after the last step; 0: only where SIGTERM ends the run
    keep: int = 2  # complete checkpoints; 0: all
    save_hf: bool = True  # the policy as a Hugging Face folder, in each checkpoint and at the end in `output_dir/huggingface`
    asynchronous: bool = True  # files are written while training goes on
    resume: str = "auto"  # auto: from the latest checkpoint, where there is one; disable; or the path of one


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    total_steps: int = 100
    prompts_per_step: int = 256
    updates_per_step: int = 1  # optimizer steps in one pass over a step's samples
    epochs_per_batch: int = 1
    critic_warmup_steps: int = 0
    validate_every_steps: int = 0  # 0: only where `validate_before` and the end ask for it
    validate_before: bool = True
    phase_time_limit_s: float = 1800.0
    seed: int = 0
    output_dir: str = "outputs/run"


@dataclass(frozen=True, kw_only=True)
class SFTTrainerConfig:
    total_steps: int = 100
    samples_per_step: int = 256
    validate_every_steps: int = 0
    phase_time_limit_s: float = 1800.0
    seed: int = 0
    output_dir: str = "outputs/sft"


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    loggers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    project: str = "megarl"
    run_name: str | None = None
    log_generations: int = 8  # samples written per validation
