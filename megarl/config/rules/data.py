"""Rules for the section `data`: files, weights of a mixture, and columns."""

from __future__ import annotations

from megarl.config.finding import Finding, Findings, refusals
from megarl.config.rules.reward import has_scores
from megarl.config.schema import CurriculumKind, PPOConfig, RunConfig, SFTConfig
from megarl.config.schema.keys import LARGEST
from megarl.machine.errors import counted

JSON_LINES = (".jsonl", ".json")
FORMATS = (".parquet", *JSON_LINES, ".csv")
# Files in folders saved by `datasets`, of one split and of several splits.
SAVED_TO_DISK = "state.json"
SPLITS = "dataset_dict.json"
_KIND = "data.curriculum.kind"
_SAMPLER = "data.curriculum.sampler"


def train_files(config: RunConfig) -> Findings:
    files = config.data.train_files
    weights = config.data.train_weights
    keys = ("data.train_weights", "data.train_files")
    # Rows are counted by file, so a file that is listed twice would count twice.
    twice = min((file for file in files if files.count(file) > 1), default=None)
    yield from refusals(
        (("data.train_files",), not files, "is empty; list at least one file"),
        (
            keys,
            bool(weights) and len(weights) != len(files),
            f"there are {len(weights)} weights for {counted(len(files), 'file')}; give one for each, or none",
        ),
        (
            ("data.train_weights",),
            not all(0 < weight <= LARGEST for weight in weights),
            f"is {weights}, but every weight must be above 0; remove files that are not to be read",
        ),
        (
            keys,
            bool(weights) and twice is not None,
            f"{twice!r} is listed twice; list it once, with the sum of its weights",
        ),
    )


def curriculum(config: PPOConfig) -> Findings:
    section = config.data.curriculum
    is_learned = section.kind is CurriculumKind.learnability

    yield from refusals(
        (
            (_KIND, _SAMPLER),
            section.sampler is not None and is_learned,
            f"{section.sampler!r} would replace {section.kind.value}; set only one of them",
        ),
        (
            ("data.train_weights", _SAMPLER if section.sampler is not None else _KIND),
            bool(config.data.train_weights) and (is_learned or section.sampler is not None),
            "the weights and the curriculum would both decide how often a prompt is used; remove one of them",
        ),
        (
            (_KIND, "reward.functions"),
            is_learned and not (config.algorithm.reads_rewards or has_scores(config)),
            "learnability samples prompts by the scores of their samples, but nothing scores them; give a "
            "reward function, or use epochs",
        ),
    )


def chat_columns(config: SFTConfig) -> Findings:
    if (config.data.columns.prompt is None) != (config.data.columns.answer is None):
        given = "prompt" if config.data.columns.answer is None else "answer"
        yield Finding(
            ("data.columns.prompt", "data.columns.answer"),
            f"only {given} is set; set both columns, or neither if each row has the whole conversation in "
            f"data.columns.messages",
        )


def too_few_rows(rows_per_step: int, num_rows: int, key: str) -> str | None:
    """Explain that a step needs more rows than there are; None if there are enough.

    Args:
        key: The configuration key of `rows_per_step`.
    """
    if rows_per_step <= num_rows:
        return None
    return (
        f"{key}={rows_per_step} is more than the {counted(num_rows, 'row')} of data.train_files; use "
        f"{num_rows} or less, or more rows"
    )
