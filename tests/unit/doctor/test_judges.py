"""What `megarl check` and `megarl doctor` say about judges and their servers."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megarl.cli.inspect.check import print_judge_prompts
from megarl.config.finding import Status
from megarl.config.schema import DataConfig, JudgeConfig, JudgeParseConfig, PPOConfig, RewardConfig
from megarl.doctor.agents_and_judges import ask_server, judge_prompts
from tests.judge_server import JudgeServer, serve_judge
from tests.unit.data.chats import prompt_row, write

TEMPLATE = "Question: {{ messages[-1].content }}\nResponse: {{ solution }}"


@pytest.fixture(scope="module")
def running() -> Iterator[JudgeServer]:
    with serve_judge() as server:
        yield server


@pytest.fixture
def server(running: JudgeServer) -> JudgeServer:
    running.reset()
    running.models = ["m", "other"]
    return running


@pytest.fixture
def config(server: JudgeServer, tmp_path: Path) -> PPOConfig:
    (tmp_path / "judge.jinja").write_text(TEMPLATE)
    judge = JudgeConfig(
        name="quality",
        url=server.url,
        model="m",
        prompt=str(tmp_path / "judge.jinja"),
        parse=JudgeParseConfig(regex="(.)"),
    )
    rows = write(tmp_path / "rows.parquet", [prompt_row("what?"), prompt_row("why?")])
    return PPOConfig(data=DataConfig(train_files=[rows]), reward=RewardConfig(judges=[judge]))


def with_judge(config: PPOConfig, **changes: object) -> PPOConfig:
    judges = [replace(config.reward.judges[0], **changes)]  # type: ignore[arg-type]
    return replace(config, reward=replace(config.reward, judges=judges))


def test_the_prompt_of_the_first_row_is_shown(config: PPOConfig, server: JudgeServer) -> None:
    text = io.StringIO()
    print_judge_prompts(config, Console(file=text))
    assert text.getvalue().splitlines() == [
        "prompt of judge quality for the first row:",
        "    Question: what?",
        "    Response: (the response)",
    ]
    (found,) = judge_prompts(config, [])
    assert found.message == (
        f"judge quality: m at {server.url}; the prompt of the first row has 40 characters"
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


QUESTION = "Reply with one word."


def test_a_listed_model_is_not_asked_for_a_reply(config: PPOConfig, server: JudgeServer) -> None:
    assert ask_server(config.reward.judges[0], "reward.judges[0]") is None
    assert server.bodies == []


def test_a_server_without_a_list_is_asked_what_a_run_asks(
    config: PPOConfig, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.models = None
    server.replies[QUESTION] = "yes"
    judge = replace(config.reward.judges[0], request={"temperature": 1})
    assert ask_server(judge, "key") is None
    (body,) = server.bodies
    assert body["model"] == "m"
    assert body["temperature"] == 1

    # A list may be public, so that only a reply shows that the key is accepted.
    server.models = ["m"]
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert ask_server(replace(judge, api_key_env="JUDGE_KEY"), "key") is None
    assert server.keys == [None, "Bearer secret"]


def test_a_key_that_the_server_repeats_is_not_shown(
    config: PPOConfig, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "fault")  # the server's answer contains this word
    server.faults[QUESTION] = [401]
    found = ask_server(replace(config.reward.judges[0], api_key_env="JUDGE_KEY"), "key")
    assert found is not None
    assert "status 401 (... 401)" in found.message


@pytest.mark.parametrize(
    ("changes", "models", "fault", "status", "message", "hint"),
    [
        ({}, None, 401, Status.error, ".api_key_env: http", "name of the environment variable with"),
        (
            {"api_key_env": "JUDGE_KEY"},
            ["m"],
            403,
            Status.error,
            "status 403 (fault 403)",
            "export the key of this server as JUDGE_KEY",
        ),
        (
            {"model": "absent"},
            ["m", "other"],
            404,
            Status.error,
            ".model: http",
            "use a model of the server: m, other",
        ),
        ({}, None, 404, Status.error, "status 404 (fault 404)", "which often ends with /v1"),
        ({}, None, 400, Status.error, "status 400 (fault 400)", "model and request must be those"),
        ({}, None, 429, Status.warning, "status 429 (fault 429)", "overloaded"),
        ({}, None, 503, Status.warning, "status 503 (fault 503)", "overloaded"),
        ({}, None, "drop", Status.warning, ".url: no server answers at http", "before the run"),
        ({}, None, "hang", Status.warning, "does not answer within 0.5 s", "not busy"),
    ],
)
def test_servers_that_would_not_reply(
    config: PPOConfig,
    server: JudgeServer,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    models: list[str] | None,
    fault: int | str,
    status: Status,
    message: str,
    hint: str,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.models = models
    server.faults[QUESTION] = [fault]
    judge = replace(config.reward.judges[0], **changes)
    found = ask_server(judge, "reward.judges[0]", limit_s=0.5 if fault == "hang" else 30.0)
    assert found is not None
    assert found.status is status
    assert found.message.startswith("reward.judges[0]")
    assert message in found.message
    assert server.url in found.message
    assert hint in str(found.hint)
    assert "secret" not in str(found)


@pytest.mark.parametrize("secret", ["secret\n", "s\N{SNOWMAN}cret"])
def test_a_key_that_cannot_be_sent_is_named_and_not_shown(
    config: PPOConfig, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", secret)
    (found,) = judge_prompts(with_judge(config, api_key_env="JUDGE_KEY"), [])
    assert found.status is Status.error
    assert found.message.startswith("reward.judges[0].api_key_env: the value of JUDGE_KEY has characters")
    assert "cret" not in str(found)


def test_no_server_is_a_warning(config: PPOConfig) -> None:
    """The run may start elsewhere, or after its server."""
    # Nobody listens at a port that is bound only.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        (found,) = judge_prompts(with_judge(config, url=url), [])
    assert found.status is Status.warning
    assert found.message.startswith(f"reward.judges[0].url: no server answers at {url} (")
    assert found.hint == (
        "start the server of judge quality before the run, or set reward.judges[0].url to its address"
    )
