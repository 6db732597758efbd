"""Which prompts an RL run draws from, and which chats a supervised run learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.schema.keys import MISSING, ranged


class Overlong(str, Enum):
    refuse = "refuse"  # the run does not start, and says which rows
    filter = "filter"  # left out and counted


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    # parquet files of prompts
    train_files: list[str] = MISSING  # type: ignore[assignment]
    val_files: list[str] = field(default_factory=list)  # held-out prompts, for validation
    max_prompt_length: int = ranged(1024, at_least=1)  # tokens, the chat template's included
    max_response_length: int = ranged(1024, at_least=1)  # tokens
    overlong: Overlong = Overlong.refuse  # what happens to prompts of more tokens than that
    shuffle: bool = True  # a new order in each epoch
    seed: int = ranged(0, at_least=0)  # of that order


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig:
    """Parquet rows with `messages`: a chat that ends with the assistant's answer, the only part that is trained."""

    # parquet files of chats
    train_files: list[str] = MISSING  # type: ignore[assignment]
    val_files: list[str] = field(default_factory=list)  # held-out chats, whose loss is logged
    max_length: int = ranged(2048, at_least=1)  # tokens of a whole chat
    overlong: Overlong = Overlong.refuse  # what happens to chats of more tokens than that
    shuffle: bool = True  # a new order in each epoch
    seed: int = ranged(0, at_least=0)  # of that order
