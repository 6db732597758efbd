"""Check that teachers read the policy's token ids as the policy does, and score all samples."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from megarl.config.finding import DATA, Finding, good, wrong
from megarl.config.roles import ModelRole, absent_teacher
from megarl.config.schema import PPOConfig
from megarl.data.files import DataError
from megarl.data.prompts import read_reward_inputs, read_reward_rows
from megarl.machine.wording import counted

_CHECK = "tokenizers"


def judge_data_sources(config: PPOConfig) -> Iterator[Finding]:
    """Check that a teacher scores the samples of each data source of the training files.

    All rows are read, without their prompts. The check of the data reports files that cannot be read.
    """
    sources: set[str] = set()
    for file in dict.fromkeys(config.data.train_files):
        try:
            for row in read_reward_rows([file], config.data.columns):
                sources.add(read_reward_inputs(row, config.data.columns).data_source)
        except DataError:  # reported by the check of the data
            continue
    if (problem := absent_teacher(config, sources)) is not None:
        message, hint = problem
        yield wrong(DATA, f"data.train_files: {message}", hint, data_sources=sorted(sources))


def judge_teacher(
    role: ModelRole, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase | None
) -> Finding:
    """Compare the vocabularies of a teacher's and the policy's tokenizers, with their special tokens.

    Args:
        policy: The policy's tokenizer. None if it has a problem, which is reported elsewhere.
    """
    facts = {"folder": role.path, "tokens": len(tokenizer)}
    if policy is None:
        return good(_CHECK, f"{role.path}: {counted(len(tokenizer), 'token')}", **facts)

    tokens = _by_id(tokenizer)
    expected = _by_id(policy)
    different = sorted(
        index for index in tokens.keys() | expected.keys() if tokens.get(index) != expected.get(index)
    )
    if not different:
        return good(_CHECK, f"{role.path}: {counted(len(tokenizer), 'token')}, those of the policy", **facts)

    first = different[0]
    message = (
        f"{role.path_key}: {role.path}: the tokenizer differs from the policy's in {len(different):,} of "
        f"{len(expected):,} ids, first in id {first}: {_shown(tokens.get(first))}, and the policy's "
        f"{_shown(expected.get(first))}, so the teacher would score other text than the policy writes"
    )
    return wrong(_CHECK, message, "use a teacher of the policy's model family", **facts)


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
