"""What `megarl check` and `megarl doctor` say about judges, without a server."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megarl.cli.inspect.check import print_judge_prompts
from megarl.config.finding import Status
from megarl.config.schema import DataConfig, JudgeConfig, JudgeParseConfig, PPOConfig, RewardConfig
from megarl.doctor.agents_and_judges import judge_prompts
from tests.unit.data.chats import prompt_row, write

TEMPLATE = "Question: {{ messages[-1].content }}\nResponse: {{ solution }}"


@pytest.fixture
def config(tmp_path: Path) -> PPOConfig:
    (tmp_path / "judge.jinja").write_text(TEMPLATE)
    judge = JudgeConfig(
        name="quality",
        url="http://localhost:1/v1",
        model="m",
        prompt=str(tmp_path / "judge.jinja"),
        parse=JudgeParseConfig(regex="(.)"),
    )
    rows = write(tmp_path / "rows.parquet", [prompt_row("what?"), prompt_row("why?")])
    return PPOConfig(data=DataConfig(train_files=[rows]), reward=RewardConfig(judges=[judge]))


def with_judge(config: PPOConfig, **changes: object) -> PPOConfig:
    judges = [replace(config.reward.judges[0], **changes)]  # type: ignore[arg-type]
    return replace(config, reward=replace(config.reward, judges=judges))


def test_the_prompt_of_the_first_row_is_shown(config: PPOConfig) -> None:
    text = io.StringIO()
    print_judge_prompts(config, Console(file=text))
    assert text.getvalue().splitlines() == [
        "prompt of judge quality for the first row:",
        "    Question: what?",
        "    Response: (the response)",
    ]
    (found,) = judge_prompts(config, [])
    assert found.message == (
        "judge quality: m at http://localhost:1/v1; the prompt of the first row has 40 characters"
    )
    served = with_judge(config, url=None, model=None, path="models/judge", num_replicas=2)
    (found,) = judge_prompts(served, ["data.train_files"])
    assert found.message == "judge quality: models/judge on 2 servers of the run"


def test_mistakes_are_errors(config: PPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    (found,) = judge_prompts(with_judge(config, api_key_env="JUDGE_KEY"), [])
    assert found.status is Status.warning
    assert "api_key_env: the environment variable JUDGE_KEY is not set here" in found.message
    (found,) = judge_prompts(with_judge(config, parse=JudgeParseConfig(path=str(tmp_path / "no.py"))), [])
    assert found.status is Status.error
    assert found.message.startswith("reward.judges[0]: function of a judge file")
    (tmp_path / "judge.jinja").write_text("{{ answer }}")
    (found,) = judge_prompts(config, [])
    assert found.status is Status.error
    assert "UndefinedError: 'answer' is undefined; its variables are messages, solution" in found.message
