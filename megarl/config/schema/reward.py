"""The section `reward`: functions in files, and a reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.schema.missing import MISSING
from megarl.config.schema.models import MicroBatchConfig, ParallelConfig


class OverlongConversation(str, Enum):
    """What happens to a conversation of more tokens than the reward model reads. Truncated ones are counted in a metric."""

    refuse = "refuse"
    truncate = "truncate"  # the oldest tokens are left out


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """A Python function `(data_source, solution_str, ground_truth, extra_info) -> float` in a file."""

    path: str = MISSING
    name: str = "compute_score"
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A frozen model with a sequence-classification head of one number, of any family, tokenizer and layout: it reads the conversation
    by its own chat template. A sample's score is the functions' sum plus `weight` times the model's."""

    path: str | None = None  # None: functions alone
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch: MicroBatchConfig = field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))
    weight: float = 1.0
    max_length: int | None = None  # of its own tokens; None: as many as it has positions, and a micro-batch has room
    overlong: OverlongConversation = OverlongConversation.refuse


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    time_limit_s: float = 10.0
    max_error_rate: float = 0.0  # share of a batch's samples whose scoring may fail (scored as 0 and reported)
    num_processes: int = 2
