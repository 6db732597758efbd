"""Check the other models of a run: its judges, without sending a request, and its teachers."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from transformers import PreTrainedTokenizerBase

from megarl.config.finding import DATA, Finding, doubtful, good, refused, wrong
from megarl.config.roles import ModelRole, absent_teacher
from megarl.config.schema import DataConfig, JudgeConfig, PPOConfig
from megarl.data.files import DataError
from megarl.data.prompts import read_prompt_rows, read_reward_inputs, read_reward_rows
from megarl.data.tables import chat_messages
from megarl.doctor.reward_functions import REWARDS
from megarl.machine.user_functions import UserFunctionError
from megarl.machine.wording import counted
from megarl.rewards.judge_reply import load_judge
from megarl.rewards.judges import load_template, prompt_variables, render
from megarl.rewards.process import ScoreRequest

SOLUTION = "(the response)"  # a row of the data has none
_CHECK = "tokenizers"


def judge_prompts(config: PPOConfig, skipped: Collection[str]) -> Iterator[Finding]:
    """Load the template and the function of each judge, and render its prompt for the first row."""
    sample = None if "data.train_files" in skipped else first_sample(config.data)
    for index, judge in enumerate(config.reward.judges):
        key = f"reward.judges[{index}]"
        try:
            load_judge(judge)
            shown = (
                ""
                if sample is None
                else f"; the prompt of the first row has {len(prompt(judge, sample)):,} characters"
            )
        except UserFunctionError as error:
            yield refused(REWARDS, key, error, f"fix the files of judge {judge.name}", judge=judge.name)
            continue

        # The run's reward worker may be on another machine.
        if judge.api_key_env is not None and not os.environ.get(judge.api_key_env):
            yield doubtful(
                REWARDS,
                f"{key}.api_key_env: the environment variable {judge.api_key_env} is not set here",
                "export it where the run's processes start",
                judge=judge.name,
            )
        else:
            yield good(REWARDS, f"judge {judge.name}: {judge.served_by}{shown}", judge=judge.name)


def first_sample(data: DataConfig) -> ScoreRequest | None:
    """Return the first row of the training data with SOLUTION as its response.

    None if it cannot be read, which is reported elsewhere.
    """
    try:
        for row in read_prompt_rows(data.train_files, data.columns):
            inputs = read_reward_inputs(row, data.columns)
            return ScoreRequest(
                "",
                inputs.data_source,
                SOLUTION,
                inputs.reward_model["ground_truth"],
                inputs.extra_info,
                messages=chat_messages(row, data.columns.prompt, data.system_prompt),
            )
    except DataError:  # reported by the check of the data
        return None
    return None


def prompt(judge: JudgeConfig, sample: ScoreRequest) -> str:
    """Render a judge's prompt for a sample.

    Raises:
        JudgePromptError: The template cannot be read or rendered.
    """
    return render(load_template(judge.prompt), judge.prompt, prompt_variables(sample))


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
    return wrong(
        _CHECK,
        f"{role.path_key}: {role.path}: the tokenizer differs from the policy's in {len(different):,} of "
        f"{len(expected):,} ids, first in id {first}: {_shown(tokens.get(first))}, and the policy's "
        f"{_shown(expected.get(first))}, so the teacher would score other text than the policy writes",
        "use a teacher of the policy's model family",
        **facts,
    )


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
