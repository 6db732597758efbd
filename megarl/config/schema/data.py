"""Which prompts an RL run draws from, and which chats a supervised run learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.schema.missing import MISSING


class Overlong(str, Enum):
    refuse = "refuse"
    filter = "filter"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train_files: list[str] = MISSING  # type: ignore[assignment]
    val_files: list[str] = field(default_factory=list)
    max_prompt_length: int = 1024
    max_response_length: int = 1024
    overlong: Overlong = Overlong.refuse
    shuffle: bool = True
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig:
    """Parquet rows with `messages`: a chat that ends with the assistant's answer, the only part that is trained."""

    train_files: list[str] = MISSING  # type: ignore[assignment]
    val_files: list[str] = field(default_factory=list)
    max_length: int = 2048
    overlong: Overlong = Overlong.refuse
    shuffle: bool = True
    seed: int = 0
