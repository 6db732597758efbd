"""The kinds of run, each with its sections, and what the rest of megarl asks of any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from megarl.config.kinds import RolloutEngineKind
from megarl.config.schema.agent import AgentConfig
from megarl.config.schema.algorithm import AlgorithmConfig
from megarl.config.schema.data import DataConfig, SFTDataConfig
from megarl.config.schema.models import (
    ActorConfig,
    CriticConfig,
    ModelConfig,
    ReferenceConfig,
    TrainedModelConfig,
)
from megarl.config.schema.placement import PlacementConfig
from megarl.config.schema.reward import RewardConfig
from megarl.config.schema.rollout import ReshardingConfig, RolloutConfig
from megarl.config.schema.run import (
    CheckpointConfig,
    Device,
    EngineConfig,
    RunKind,
    SFTTrainerConfig,
    TrackingConfig,
    TrainerConfig,
)


class RunConfig(ABC):
    """What every kind of run has: a frozen dataclass of sections that inherits from this.

    The sections that all kinds have are declared here and defined by each kind, in the order in which its
    files and the reference page have them. A property is a question to which the kinds have different
    answers.
    """

    kind: RunKind
    model: ModelConfig
    data: DataConfig | SFTDataConfig
    actor: ActorConfig
    placement: PlacementConfig
    resharding: ReshardingConfig
    engine: EngineConfig
    checkpoint: CheckpointConfig
    trainer: TrainerConfig | SFTTrainerConfig
    tracking: TrackingConfig
    device: Device

    def with_sections(self, **sections: object) -> Self:
        """Return the same run with other sections."""
        return cast(Self, replace(cast(Any, self), **sections))

    # ---- the batch of a step

    @property
    @abstractmethod
    def prompts_per_step(self) -> int:
        """Rows of the data files that a step learns from: prompts, or whole chats."""

    @property
    @abstractmethod
    def samples_per_prompt(self) -> int:
        """Samples that are generated for each of these rows; 1 where nothing is generated."""

    @property
    @abstractmethod
    def updates_per_pass(self) -> int:
        """Mini-batches, and so optimizer steps, of one pass over a step's samples."""

    @property
    @abstractmethod
    def passes_per_step(self) -> int:
        """Passes over a step's samples."""

    @property
    @abstractmethod
    def longest_prompt(self) -> int:
        """Tokens of the longest row that no loss is about."""

    @property
    @abstractmethod
    def longest_response(self) -> int:
        """Tokens of the longest row after its prompt."""

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def max_row_tokens(self) -> int:
        """Tokens of the longest row that the data settings allow, prompt and response together."""
        return self.longest_prompt + self.longest_response

    # ---- models

    @property
    @abstractmethod
    def trained_models(self) -> Mapping[str, TrainedModelConfig]:
        """The sections of models that this kind of run may train, by their key."""

    @property
    def actor_steps(self) -> int:
        """Steps in which the actor is trained."""
        return self.trainer.total_steps

    @property
    def temperature(self) -> float:
        """What the actor's logits are divided by."""
        return 1.0

    # ---- what a run needs on its machines

    @property
    def rollout_engine(self) -> RolloutEngineKind | None:
        """What generates; None if nothing does."""
        return None

    def code_files(self) -> Iterator[tuple[str, str]]:
        """Yield the key and the path of each Python file of the user."""
        yield from ()

    # ---- names of keys, for messages

    @property
    @abstractmethod
    def batch_key(self) -> str:
        """The key of `prompts_per_step`."""

    @property
    @abstractmethod
    def length_keys(self) -> tuple[str, ...]:
        """The keys that limit the length of a row."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RunConfig):
    """Everything of one RL run."""

    kind: RunKind = RunKind.ppo  # what the run is, so that every command knows which keys its file may have
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    resharding: ReshardingConfig = field(default_factory=ReshardingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    device: Device = Device.auto  # what the run's processes compute on

    @property
    def prompts_per_step(self) -> int:
        return self.trainer.prompts_per_step

    @property
    def samples_per_prompt(self) -> int:
        return self.rollout.n

    @property
    def updates_per_pass(self) -> int:
        return self.trainer.updates_per_step

    @property
    def passes_per_step(self) -> int:
        return self.trainer.epochs_per_batch

    @property
    def longest_prompt(self) -> int:
        return self.data.max_prompt_length

    @property
    def longest_response(self) -> int:
        return self.data.max_response_length

    @property
    def trained_models(self) -> Mapping[str, TrainedModelConfig]:
        return {"actor": self.actor, "critic": self.critic}

    @property
    def actor_steps(self) -> int:
        return self.trainer.total_steps - self.trainer.critic_warmup_steps

    @property
    def temperature(self) -> float:
        return self.rollout.temperature

    @property
    def rollout_engine(self) -> RolloutEngineKind:
        return self.rollout.engine

    def code_files(self) -> Iterator[tuple[str, str]]:
        for index, function in enumerate(self.reward.functions):
            yield f"reward.functions[{index}].path", function.path
        for index, tool in enumerate(self.agent.tools):
            if tool.path is not None:
                yield f"agent.tools[{index}].path", tool.path

        if self.agent.environment.path is not None:
            yield "agent.environment.path", self.agent.environment.path
        for key, reference in self.algorithm.own_functions:
            yield key, reference.rpartition(":")[0]

    @property
    def batch_key(self) -> str:
        return "trainer.prompts_per_step"

    @property
    def length_keys(self) -> tuple[str, ...]:
        return "data.max_prompt_length", "data.max_response_length"


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RunConfig):
    """Everything of one supervised run. `actor` is the trained model."""

    kind: RunKind = RunKind.sft  # must be given, but for `megarl sft`
    model: ModelConfig = field(default_factory=ModelConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    resharding: ReshardingConfig = field(default_factory=ReshardingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    device: Device = Device.auto  # what the run's processes compute on

    @property
    def prompts_per_step(self) -> int:
        return self.trainer.samples_per_step

    @property
    def samples_per_prompt(self) -> int:
        return 1

    @property
    def updates_per_pass(self) -> int:
        return 1

    @property
    def passes_per_step(self) -> int:
        return 1

    @property
    def longest_prompt(self) -> int:
        return 1

    @property
    def longest_response(self) -> int:
        return self.data.max_length - 1

    @property
    def trained_models(self) -> Mapping[str, TrainedModelConfig]:
        return {"actor": self.actor}

    @property
    def batch_key(self) -> str:
        return "trainer.samples_per_step"

    @property
    def length_keys(self) -> tuple[str, ...]:
        return ("data.max_length",)


SCHEMAS: Mapping[RunKind, type[RunConfig]] = {RunKind.ppo: PPOConfig, RunKind.sft: SFTConfig}
