"""The section `data`: the prompts of an RL run and the conversations of a supervised run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.kinds import AdvantageEstimator
from megarl.config.schema.keys import MISSING, PathKind, Reader, matters, names, only_with, prose, ranged


class Overlong(str, Enum):
    refuse = "refuse"  # the run does not start; the error lists the rows
    filter = "filter"  # rows are skipped and counted


class LossyText(str, Enum):
    """How to handle prompts and conversations that do not round-trip through the tokenizer."""

    refuse = "refuse"  # the run does not start; the error shows what is lost
    allow = "allow"  # the model reads the text as the tokenizer encodes it


class CurriculumKind(str, Enum):
    epochs = "epochs"  # each prompt once per epoch
    # prompts whose samples differ in score more often than others
    learnability = "learnability"


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """How the prompts of a step are chosen."""

    kind: CurriculumKind = CurriculumKind.epochs  # how often each prompt is used; see Data
    # FILE.py:CLASS of a custom sampler that replaces the kind's; see Data
    sampler: str | None = field(default=None, metadata=names(PathKind.function))
    # share of the prompts that are taken in epochs, so that none is forgotten
    epoch_share: float = only_with(
        ranged(0.25, above=0, at_most=1), Reader(".kind", (CurriculumKind.learnability,)), is_refused=True
    )
    # weight of a prompt's newest samples in the estimates of its score and variance; 1: only the newest
    # samples count
    update_rate: float = only_with(
        ranged(0.5, above=0, at_most=1), Reader(".kind", (CurriculumKind.learnability,)), is_refused=True
    )


_IMAGES = Reader("model.path", architecture="vision")
_DISTILLING = Reader("algorithm.advantage.estimator", (AdvantageEstimator.distillation,))


@dataclass(frozen=True, kw_only=True)
class PromptColumnsConfig:
    """Column names of the files, if they differ from the defaults."""

    prompt: str = "prompt"  # a conversation up to the answer, or a string: one user message
    # name of the kind of task; null: the file name without its suffix
    data_source: str | None = "data_source"
    # the correct answer; null: from the mapping reward_model or the column ground_truth
    ground_truth: str | None = None
    # a mapping with the key ground_truth; ignored if ground_truth names a column; null: the rows have no
    # right answers, as for judges and teachers, and every ground truth is null
    reward_model: str | None = "reward_model"
    extra_info: str = "extra_info"  # a mapping for reward functions; optional
    # the prompt that the teacher sees in its place, such as one with a worked solution: a conversation or a
    # string; null: the teacher sees the same prompt
    teacher_prompt: str | None = only_with(None, _DISTILLING, is_refused=True)
    # images of the prompt, in the order of its placeholders <image>: a path, bytes, a mapping with `bytes` or
    # `path`, or a list of these; optional
    images: str = only_with("images", _IMAGES)


@dataclass(frozen=True, kw_only=True)
class ChatColumnsConfig:
    """Column names of the files, if they differ from the defaults or if prompt and answer are two columns."""

    # a conversation that ends with the assistant's answer; ignored if prompt and answer are set
    messages: str = "messages"
    # schemas of the tools that the assistant may call, as a list or a JSON string; optional
    tools: str = "tools"
    prompt: str | None = None  # a conversation up to the answer, or a string: one user message
    answer: str | None = None  # the assistant's answer, a string


@dataclass(frozen=True, kw_only=True)
class PairColumnsConfig:
    """Column names of the files, if they differ from the defaults."""

    # a conversation up to the answers, or a string: one user message; not read if chosen and rejected are
    # whole conversations
    prompt: str = "prompt"
    # the preferred answer: a string, an assistant's message in a list, or a whole conversation that ends with
    # it
    chosen: str = "chosen"
    rejected: str = "rejected"  # the other answer, in the same form
    # schemas of the tools that the assistant may call, as a list or a JSON string; optional
    tools: str = "tools"


@dataclass(frozen=True, kw_only=True)
class RatedPairColumnsConfig(PairColumnsConfig):
    # how much better the preferred answer is, a number that its score must exceed the other's by; null: 0
    margin: str | None = None


@dataclass(frozen=True, kw_only=True)
class FilesConfig:
    """The keys of `data` that all kinds of run have. A row is a prompt, a conversation, or a pair."""

    # files of rows: .parquet, .jsonl, .csv, or a folder saved by `datasets`
    train_files: list[str] = matters(
        field(default=MISSING, metadata=names(PathKind.data)), "always: your prompts, conversations or pairs"
    )
    # sampling weight of each of train_files, as its share of the rows; empty: each row is used once per epoch
    train_weights: list[float] = field(default_factory=list)
    # held-out rows, for validation
    val_files: list[str] = matters(
        field(default_factory=list, metadata=names(PathKind.data)),
        "to measure the policy on rows that it is not trained on; with `trainer.validate_every_steps`",
    )
    system_prompt: str | None = prose(None)  # added to conversations that have no system message
    # how to handle rows that exceed the limit of their tokens: max_prompt_length of prompts, otherwise
    # max_length
    overlong: Overlong = Overlong.refuse
    lossy: LossyText = LossyText.refuse  # how to handle rows that do not round-trip through the tokenizer
    shuffle: bool = True  # reshuffle the rows in each epoch
    seed: int = ranged(0, at_least=0)  # seed of the shuffling, and of a curriculum


@dataclass(frozen=True, kw_only=True)
class DataConfig(FilesConfig):
    columns: PromptColumnsConfig = field(default_factory=PromptColumnsConfig)
    # maximum prompt tokens, including the chat template
    max_prompt_length: int = matters(ranged(1024, at_least=1), "to the length of your longest prompt")
    # maximum response tokens
    max_response_length: int = matters(
        ranged(1024, at_least=1), "if many responses are cut off; memory and time of a step grow with it"
    )
    # maximum width times height of an image, so that a small file cannot occupy all memory once decoded. Its
    # file has at most as many bytes, or 32 MiB
    max_image_pixels: int = only_with(ranged(2**25, at_least=1), _IMAGES)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)

    @property
    def longest_row(self) -> int:
        """The maximum number of tokens of a row of the files."""
        return self.max_prompt_length


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(FilesConfig):
    """Rows with `messages`: a conversation that ends with the assistant's answer.

    The loss covers the assistant's answers only.
    """

    columns: ChatColumnsConfig = field(default_factory=ChatColumnsConfig)
    max_length: int = ranged(2048, at_least=1)  # maximum tokens of a whole conversation

    @property
    def longest_row(self) -> int:
        """The maximum number of tokens of a row of the files."""
        return self.max_length


@dataclass(frozen=True, kw_only=True)
class PreferenceDataConfig(FilesConfig):
    """Rows with a prompt and two answers to it, of which `chosen` is preferred to `rejected`."""

    columns: PairColumnsConfig = field(default_factory=PairColumnsConfig)
    # maximum tokens of a prompt with its longer answer; a reward model reads its score at one more token
    max_length: int = ranged(2048, at_least=2)

    @property
    def longest_row(self) -> int:
        """The maximum number of tokens of a row of the files."""
        return self.max_length


@dataclass(frozen=True, kw_only=True)
class RatedPreferenceDataConfig(PreferenceDataConfig):
    columns: RatedPairColumnsConfig = field(default_factory=RatedPairColumnsConfig)
