"""Checks the judges of a run, without sending a request."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from megarl.config.finding import Finding, doubtful, good, refused
from megarl.config.schema import DataConfig, JudgeConfig, PPOConfig
from megarl.data.files import DataError
from megarl.data.prompts import read_prompt_rows, read_reward_inputs
from megarl.data.tables import chat_messages
from megarl.doctor.reward_functions import REWARDS
from megarl.machine.user_functions import UserFunctionError
from megarl.rewards.judge_reply import load_judge
from megarl.rewards.judges import load_template, prompt_variables, render
from megarl.rewards.process import ScoreRequest

SOLUTION = "(the response)"  # a row of the data has none


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
