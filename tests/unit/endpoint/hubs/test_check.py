"""Test what `megarl check` says about the environment of a hub: it plays the first row."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.config.finding import Finding, Status
from megarl.config.kinds import Hub
from megarl.config.schema import AgentConfig, DataConfig, EnvironmentConfig, LossyText, PPOConfig
from megarl.doctor.agents_and_judges import judge_agent
from tests.unit.endpoint.hubs.played import TOKENIZER, rows_of


def check(environment: EnvironmentConfig, file: Path) -> Finding:
    data = DataConfig(train_files=[str(file)], max_prompt_length=200, lossy=LossyText.allow)
    config = PPOConfig(data=data, agent=AgentConfig(environment=environment))
    found, tools = judge_agent(config, TOKENIZER)
    assert tools is None
    return found


def test_the_first_row_is_played_and_its_tokens_are_those_of_the_model(tmp_path: Path) -> None:
    environment = EnvironmentConfig(
        hub=Hub.reasoning_gym, name="basic_arithmetic", arguments={"min_terms": 2}
    )
    rows = rows_of(environment, size=2)
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = check(environment, file)
    assert found.status is Status.ok, found.message
    count = len("I do not know.") + 1
    for said in (
        "reasoning_gym/basic_arithmetic (0.1.25) gives the reward 0",
        f"to the first row of {file} with the answer 'I do not know.', in 1 turn",
        f"The {count} tokens with a loss are exactly those that the model wrote",
        f"<|start|>user\n{rows[0]['prompt'][0]['content']}<|end|>\n<|start|>assistant\nI do not know.<|end|>",
    ):
        assert said in found.message

    # A row of another environment has nothing that this one could find.
    file.write_text(json.dumps({**rows[0], "extra_info": {}}) + "\n")
    found = check(environment, file)
    assert found.status is Status.error
    assert "KeyError: 'task' (reasoning_gym.py:" in found.message


def test_an_environment_without_rows_is_told_how_to_write_them(tmp_path: Path) -> None:
    found = check(EnvironmentConfig(hub=Hub.openenv, name="http://10.0.0.1"), tmp_path / "absent.jsonl")
    assert found.status is Status.error
    assert "megarl data openenv/http://10.0.0.1 --output" in (found.hint or "")
