"""The section `reward`: functions in files, and a reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.schema.keys import MISSING, InputKind, names, ranged
from megarl.config.schema.models import MicroBatchConfig, ParallelConfig


class OverlongConversation(str, Enum):
    """What happens to a conversation of more tokens than the reward model reads. Truncated ones are counted
    in a metric."""

    refuse = "refuse"  # it is an error of that sample
    truncate = "truncate"  # the oldest tokens are left out


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """A Python function `(data_source, solution_str, ground_truth, extra_info) -> float` in a file."""

    path: str = field(default=MISSING, metadata=names(InputKind.code))  # of the file
    name: str = "compute_score"  # of the function in it
    weight: float = 1.0  # what its score is multiplied by
    # True: each sample in a process of its own that reads no file, reaches no network, starts no process and
    # leaves nothing behind: for functions that run what a model wrote; see the page on the sandbox
    sandbox: bool = False


@dataclass(frozen=True, kw_only=True)
class RewardSandboxConfig:
    """What functions with `sandbox` may have. Where one has it, no function sees a variable that is not named
    here."""

    memory_mb: int = ranged(512, at_least=1)  # of a sample, beside what the functions' files have loaded
    environment: list[str] = field(default_factory=list)  # names of the variables that are passed on


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A frozen model with a sequence-classification head of one number, of any family, tokenizer and layout:
    it reads the conversation by its own chat template. A sample's score is the functions' sum plus `weight`
    times the model's."""

    path: str | None = field(default=None, metadata=names(InputKind.data))  # None: functions alone
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch: MicroBatchConfig = field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))
    weight: float = 1.0  # what its score is multiplied by
    # of its own tokens; None: as many as it has positions, and a micro-batch has room
    max_length: int | None = ranged(None, at_least=1)
    overlong: OverlongConversation = OverlongConversation.refuse  # what happens to longer conversations


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    # their weighted scores are added; see the page on rewards
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    sandbox: RewardSandboxConfig = field(default_factory=RewardSandboxConfig)
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    # a sample with this score or more passes, for the metric pass@k; null: no pass@k
    pass_score: float | None = 1.0
    time_limit_s: float = ranged(10.0, above=0)  # of one sample, from when its scoring begins
    # share of a batch's samples whose scoring may fail: they score 0, are compared with no other sample, and
    # are counted
    max_error_rate: float = ranged(0.0, at_least=0, at_most=1)
    num_processes: int = ranged(2, at_least=1, at_most=10000)  # that score at the same time
