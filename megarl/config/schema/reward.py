"""The section `reward`: functions in files, judges, and a reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.schema.judges import JudgeConfig
from megarl.config.schema.keys import MISSING, InputKind, Reader, names, only_with, ranged
from megarl.config.schema.megatron import FrozenMegatronConfig
from megarl.config.schema.models import MicroBatchConfig, ParallelConfig


class OverlongConversation(str, Enum):
    """How to handle a conversation that exceeds the reward model's maximum length.

    A metric counts truncated conversations.
    """

    refuse = "refuse"  # scoring the sample fails
    truncate = "truncate"  # the oldest tokens are removed


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """A Python function `(data_source, solution_str, ground_truth, extra_info) -> float` in a file."""

    path: str = field(default=MISSING, metadata=names(InputKind.code))  # Python file
    name: str = "compute_score"  # name of the function in the file
    weight: float = 1.0  # factor of its score
    # score each sample in its own sandboxed process, without access to files, the network or other processes;
    # for functions that execute model-written code; see Sandbox
    sandbox: bool = False


_SANDBOXED = Reader("reward.functions[].sandbox", example="true")
_FUNCTIONS = Reader("reward.functions", example="[{path: FILE.py}]")


@dataclass(frozen=True, kw_only=True)
class RewardSandboxConfig:
    """Limits of functions with `sandbox: true`.

    If there is such a function, only the environment variables listed here are passed to any function.
    """

    # memory limit of a sample, in 2**20 bytes, in addition to what the functions' files have loaded
    memory_mb: int = only_with(ranged(512, at_least=1), _SANDBOXED)
    # names of the environment variables to pass on
    environment: list[str] = only_with(field(default_factory=list), _SANDBOXED)


def _of_folder[Value](default: Value) -> Value:
    return only_with(default, Reader(".path", example="FOLDER"), is_refused=True)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A frozen model with a sequence-classification head of one output, of any family, tokenizer and layout.

    It reads the conversation with its own chat template. A sample's score is the sum of the functions' scores
    plus `weight` times the model's score.
    """

    # model folder; null: no reward model
    path: str | None = field(default=None, metadata=names(InputKind.data))
    parallel: ParallelConfig = _of_folder(field(default_factory=ParallelConfig))
    micro_batch: MicroBatchConfig = _of_folder(
        field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))
    )
    weight: float = _of_folder(1.0)  # factor of its score
    # maximum length in the reward model's tokens; null: limited by its positions and by a micro-batch
    max_length: int | None = _of_folder(ranged(None, at_least=1))
    # how to handle longer conversations
    overlong: OverlongConversation = _of_folder(OverlongConversation.refuse)
    megatron: FrozenMegatronConfig = _of_folder(field(default_factory=FrozenMegatronConfig))


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    # reward functions, whose weighted scores are added; see Rewards
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    # models that score through an OpenAI-compatible API, whose weighted scores are added; see Rewards
    judges: list[JudgeConfig] = field(default_factory=list)
    sandbox: RewardSandboxConfig = field(default_factory=RewardSandboxConfig)
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    # minimum score of a sample that passes, for the metric pass@k; null: no pass@k
    pass_score: float | None = 1.0
    # time limit of one sample, from the start of its scoring
    time_limit_s: float = only_with(ranged(10.0, above=0), _FUNCTIONS)
    # fraction of a batch's samples whose scoring may fail. They score 0, are excluded from comparisons with
    # other samples, and are counted
    max_error_rate: float = ranged(0.0, at_least=0, at_most=1)
    # processes that score in parallel
    num_processes: int = only_with(ranged(2, at_least=1, at_most=10000), _FUNCTIONS)
