"""Which prompts an RL run draws from, and which chats a supervised run learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.schema.keys import MISSING, InputKind, names, prose, ranged


class Overlong(str, Enum):
    refuse = "refuse"  # the run does not start, and says which rows
    filter = "filter"  # left out and counted


class LossyText(str, Enum):
    """What happens to prompts and chats that the tokenizer cannot write: decoded again, their tokens are
    another text."""

    refuse = "refuse"  # the run does not start, and says what is lost
    allow = "allow"  # the model reads what is left of them


@dataclass(frozen=True, kw_only=True)
class PromptColumnsConfig:
    """The columns of the files, where they are called otherwise."""

    prompt: str = "prompt"  # a chat up to the answer, or a text: a message of the user
    # names the kind of task; null: the file's name, without its ending
    data_source: str | None = "data_source"
    # the right answer; null: in the mapping reward_model, or in a column ground_truth
    ground_truth: str | None = None
    # a mapping with ground_truth; not read where ground_truth has a column of its own
    reward_model: str = "reward_model"
    extra_info: str = "extra_info"  # a mapping for reward functions; may be absent


@dataclass(frozen=True, kw_only=True)
class ChatColumnsConfig:
    """The columns of the files, where they are called otherwise, or where prompt and answer stand in two."""

    # a chat that ends with the assistant's answer; not read where prompt and answer are given
    messages: str = "messages"
    # the schemas of what the assistant may call, as a list or as JSON text; may be absent
    tools: str = "tools"
    prompt: str | None = None  # a chat up to the answer, or a text: a message of the user
    answer: str | None = None  # the text of the assistant's answer


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    # files of prompts: .parquet, .jsonl, .csv, or a folder that `datasets` has saved
    train_files: list[str] = field(default=MISSING, metadata=names(InputKind.data))  # type: ignore[arg-type]
    # one for each of train_files: its share of the rows; empty: each row once
    train_weights: list[float] = field(default_factory=list)
    # held-out prompts, for validation
    val_files: list[str] = field(default_factory=list, metadata=names(InputKind.data))
    columns: PromptColumnsConfig = field(default_factory=PromptColumnsConfig)
    system_prompt: str | None = prose(None)  # comes before chats that have none
    max_prompt_length: int = ranged(1024, at_least=1)  # tokens, the chat template's included
    max_response_length: int = ranged(1024, at_least=1)  # tokens
    overlong: Overlong = Overlong.refuse  # what happens to prompts of more tokens than that
    lossy: LossyText = LossyText.refuse  # what happens to prompts that lose text on their way to tokens
    shuffle: bool = True  # a new order in each epoch
    seed: int = ranged(0, at_least=0)  # of that order

    @property
    def longest_row(self) -> int:
        """Tokens that a row of the files may have."""
        return self.max_prompt_length


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig:
    """Rows with `messages`: a chat that ends with the assistant's answer. Its answers are trained, and
    nothing else of it."""

    # files of chats: .parquet, .jsonl, .csv, or a folder that `datasets` has saved
    train_files: list[str] = field(default=MISSING, metadata=names(InputKind.data))  # type: ignore[arg-type]
    # one for each of train_files: its share of the rows; empty: each row once
    train_weights: list[float] = field(default_factory=list)
    # held-out chats, whose loss is logged
    val_files: list[str] = field(default_factory=list, metadata=names(InputKind.data))
    columns: ChatColumnsConfig = field(default_factory=ChatColumnsConfig)
    system_prompt: str | None = prose(None)  # comes before chats that have none
    max_length: int = ranged(2048, at_least=1)  # tokens of a whole chat
    overlong: Overlong = Overlong.refuse  # what happens to chats of more tokens than that
    lossy: LossyText = LossyText.refuse  # what happens to chats that lose text on their way to tokens
    shuffle: bool = True  # a new order in each epoch
    seed: int = ranged(0, at_least=0)  # of that order

    @property
    def longest_row(self) -> int:
        """Tokens that a row of the files may have."""
        return self.max_length
