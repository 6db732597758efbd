"""The engines that generate, how they draw, and how the trained weights reach them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megarl.config.kinds import RolloutEngineKind
from megarl.config.schema.keys import ranged


class SGLangMode(str, Enum):
    engine = "engine"  # in the process of the rollout worker
    server = "server"  # an HTTP server that the worker starts


class OnUpdate(str, Enum):
    continue_ = "continue"  # continue with the new weights where they were
    drain = "drain"  # end first, so that each sample is by one version; the trainer waits for them


class Late(str, Enum):
    wait = "wait"  # each prompt has its step, which waits for it
    # the oldest prompts that are finished go first; tokens older than max_staleness are left out of the loss
    mask = "mask"


class Transport(str, Enum):
    auto = "auto"  # device where every engine works beside trainers, group where none does
    # through memory that a trainer rank and the engine rank on its device share, on any number of nodes
    device = "device"
    group = "group"  # point to point over the network, from the trainers to engines on devices of their own
    folder = "folder"  # through files in `trainer.output_dir`, which all nodes see


class Verify(str, Enum):
    off = "off"  # never
    first = "first"  # after the first push
    always = "always"  # after each push


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    n: int = ranged(1, at_least=1)  # samples per prompt
    temperature: float = ranged(1.0, at_least=0, at_most=100)  # 0 is greedy
    # the most likely tokens with so much probability together; 1: all
    top_p: float = ranged(1.0, above=0, at_most=1)
    top_k: int = -1  # so many of the most likely tokens; -1: all
    min_new_tokens: int = ranged(0, at_least=0)  # before the end token may come


@dataclass(frozen=True, kw_only=True)
class SGLangConfig:
    mode: SGLangMode = SGLangMode.engine  # where SGLang runs
    # on CUDA, kernels that give the same samples for the same seed, slower; on CPU always
    deterministic: bool = False
    # SGLang's own options, by the names of its ServerArgs
    server_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: RolloutEngineKind = RolloutEngineKind.hf  # what generates
    num_replicas: int = ranged(1, at_least=1, at_most=10000)  # engines, each with a whole copy of the model
    tensor_parallel_size: int = ranged(1, at_least=1, at_most=1024)  # devices of one engine
    # groups of these devices that share the experts
    expert_parallel_size: int = ranged(1, at_least=1, at_most=1024)
    n: int = ranged(1, at_least=1)  # samples per prompt
    # above 0; the trainer divides its logits by it too
    temperature: float = ranged(1.0, at_least=0, at_most=100)
    # 1 for training: a cut sampler draws from another distribution
    top_p: float = ranged(1.0, above=0, at_most=1)
    top_k: int = -1  # -1 for training, for the same reason
    max_concurrency: int = ranged(256, at_least=1)  # sequences that one replica generates at the same time
    # steps that generation may run ahead of training; 0: it waits for new weights
    max_staleness: int = ranged(0, at_least=0, at_most=64)
    # what samples in flight do when new weights come; they are where max_staleness is above 0
    on_update: OnUpdate = OnUpdate.continue_
    late: Late = Late.wait  # what becomes of prompts that are not finished when their step begins
    # share of a step's prompts that may be dropped if an engine cannot generate their samples; others replace
    # them
    max_error_rate: float = ranged(0.0, at_least=0, at_most=1)
    restart_limit: int = ranged(3, at_least=0)  # replica restarts that one run allows
    # an engine that makes no progress for so long is taken for hung
    health_limit_s: float = ranged(120.0, at_least=1)
    validation: SamplingConfig = field(default_factory=SamplingConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)

    @property
    def training(self) -> SamplingConfig:
        """How training samples are drawn."""
        return SamplingConfig(n=self.n, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)

    def settings_of(self, engine: RolloutEngineKind) -> SGLangConfig | None:
        """The section of an engine, where it has one."""
        return None if engine.needs.section is None else getattr(self, engine.needs.section)

    def memory_share_of(self, engine: RolloutEngineKind) -> Any:
        """Of a GPU, that an engine takes for weights and cache, whatever it needs; None where nobody says
        so."""
        settings = self.settings_of(engine)
        argument = engine.needs.memory_arg
        return None if settings is None or argument is None else settings.server_args.get(argument)


@dataclass(frozen=True, kw_only=True)
class ReshardingConfig:
    # of weights that a rank sends, or receives, at a time, in 2**20 bytes; a push takes two or three times as
    # much of a device's memory
    bucket_mb: float = ranged(512.0, above=0, at_most=65536)
    transport: Transport = Transport.auto  # how weights go from the trainer to the engines
    verify: Verify = Verify.first  # compare checksums of every tensor, trainer and engine
    # mean |trainer - engine| over the first batch's tokens, above which the run ends
    max_log_prob_difference: float = ranged(0.1, above=0)
