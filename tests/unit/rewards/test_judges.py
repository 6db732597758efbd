"""Test judges against a real HTTP server that fails in every way that the documentation names."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import JudgeConfig, JudgeParseConfig, RewardFunctionConfig
from megarl.rewards.judge_reply import JudgeReply
from megarl.rewards.judges import JudgeEndpoint, JudgePanel, JudgePromptError, load_template
from megarl.rewards.process import FIX_THE_FUNCTION, RewardFunctionError, ScoreRequest
from megarl.rewards.scorer import RewardError, RewardScorer
from tests.judge_server import JudgeServer, serve_judge
from tests.unit.rewards.outcome_columns import column, declared, errors

TEMPLATE = """Question: {{ messages[-1].content }}
Right: {{ ground_truth }}, level {{ extra_info.level }}, from {{ data_source }}, {{ turns | length }} turn
{{ solution }}
"""
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise KeyError("nothing")
    return {"score": len(solution_str), "answer": solution_str, "letters": len(solution_str)}

def parse(reply, ground_truth):
    return {"good": 1, "bad": 0}[reply] + ground_truth / 10
"""


@pytest.fixture(scope="module")
def running() -> Iterator[JudgeServer]:
    with serve_judge() as server:
        yield server


@pytest.fixture
def server(running: JudgeServer) -> JudgeServer:
    running.reset()
    return running


@pytest.fixture
def judge(server: JudgeServer, tmp_path: Path) -> JudgeConfig:
    (tmp_path / "judge.jinja").write_text(TEMPLATE)
    (tmp_path / "reward.py").write_text(FUNCTION)
    return JudgeConfig(
        name="quality",
        url=server.url,
        model="large",
        prompt=str(tmp_path / "judge.jinja"),
        parse=JudgeParseConfig(regex=r"Score: (-?[0-9.]+)"),
        max_attempts=3,
        time_limit_s=5.0,
    )


def request(solution: str) -> ScoreRequest:
    messages = [{"role": "user", "content": "2 + 3?"}]
    return ScoreRequest("u", "sums", solution, 5, {"level": 2}, None, messages)


def as_they_are(scored: ScoreRequest, replies: Sequence[JudgeReply]) -> Future[Sequence[JudgeReply]]:
    future = Future[Sequence[JudgeReply]]()
    future.set_result(replies)
    return future


def replies(judge: JudgeConfig, *solutions: str) -> list[Any]:
    panel = JudgePanel([judge], first_pause_s=0.001)
    try:
        asked = [panel.ask(as_they_are, request(solution)) for solution in solutions]
        return [future.result()[0] for future in asked]
    finally:
        panel.close()


def test_requests_are_deterministic_and_hold_the_rendered_prompt(
    server: JudgeServer, judge: JudgeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.replies["5"] = "Score: 1"
    with_fields = replace(judge, api_key_env="JUDGE_KEY", request={"top_p": 0.5})
    first, second = replies(with_fields, "5", "5")
    assert first.text == second.text == "Score: 1"
    expected = {
        "model": "large",
        "messages": [
            {"role": "user", "content": "Question: 2 + 3?\nRight: 5, level 2, from sums, 1 turn\n5"}
        ],
        "temperature": 0.0,
        "seed": 0,
        "max_tokens": 1024,
        "top_p": 0.5,
    }
    assert server.bodies == [expected, expected]
    assert server.keys == ["Bearer secret"] * 2

    replies(replace(judge, request=dict.fromkeys(("temperature", "seed", "max_tokens"))), "5")
    assert server.bodies[-1].keys() == {"model", "messages"}
    assert server.keys[-1] is None


def test_temporary_faults_are_retried(server: JudgeServer, judge: JudgeConfig) -> None:
    server.faults = {"busy": [429, 503], "lost": ["drop", "drop"], "slow": ["hang"], "timeout": [408]}
    server.replies = dict.fromkeys(server.faults, "Score: 1")
    got = replies(replace(judge, time_limit_s=1.0), *server.faults)
    assert [(reply.text, reply.error) for reply in got] == [("Score: 1", None)] * 4
    assert dict(server.num_requests) == {"busy": 3, "lost": 3, "slow": 2, "timeout": 2}
    assert got[2].latency_s >= 1.0  # includes the attempt that was ended


def test_without_a_header_pauses_grow(server: JudgeServer, judge: JudgeConfig) -> None:
    server.retry_after = None
    server.faults = {"down": [500] * 3}
    (got,) = replies(judge, "down")
    assert got.error == f"status 500 (fault 500) after 3 attempts, from {judge.url}/chat/completions"
    server.retry_after = "Wed, 21 Oct 2026 07:28:00 GMT"  # dates are treated like a missing header
    server.faults, server.replies = {"again": [502]}, {"again": "Score: 1"}
    assert replies(judge, "again")[0].text == "Score: 1"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (401, "status 401 (fault 401), from "),
        (404, "status 404 (fault 404), from "),
        ({"choices": []}, "the reply is no chat completion ('{\"choices\":[]}'), from "),
        (["x"], "the reply is no chat completion ('[\"x\"]'), from "),
        (
            {"choices": [{"message": {"content": "Score: 1"}, "finish_reason": "length"}]},
            "the reply was truncated at its token limit (max_tokens=1024), from ",
        ),
        (
            {"choices": [{"message": {"content": None}, "finish_reason": "tool_calls"}]},
            "the reply has no text (finish_reason 'tool_calls'), from ",
        ),
    ],
)
def test_final_faults_are_not_retried(
    server: JudgeServer, judge: JudgeConfig, fault: Any, error: str
) -> None:
    server.faults = {"x": [fault]}
    (got,) = replies(judge, "x")
    assert (got.text, got.error) == ("", f"{error}{judge.url}/chat/completions")
    assert server.num_requests["x"] == 1


def test_exhausted_attempts_name_the_last_fault(server: JudgeServer, judge: JudgeConfig) -> None:
    server.faults = {"slow": ["hang"], "lost": ["drop"] * 3}
    slow, lost = replies(replace(judge, time_limit_s=0.5, max_attempts=1), "slow", "lost")
    assert slow.error is not None
    assert slow.error.startswith("no reply within time_limit_s=0.5 s, from http://")
    assert lost.error is not None
    assert "the connection failed (" in lost.error

    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    (refused,) = replies(replace(judge, url=f"http://127.0.0.1:{port}/v1"), "x")
    assert refused.error is not None
    assert "the connection failed (" in refused.error
    assert "after 3 attempts" in refused.error


def test_servers_of_the_run_are_asked_in_turn_until_one_answers(
    server: JudgeServer, judge: JudgeConfig
) -> None:
    """A server that is gone is restarted, so a lost connection is no attempt; other failures are."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        gone = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
    server.replies = {"5": "Score: 1"}
    server.faults = {"5": ["drop"], "busy": [503]}
    panel = JudgePanel([replace(judge, url=None, path="folder", max_attempts=1)], first_pause_s=0.001)
    panel.use({judge.name: [JudgeEndpoint(gone), JudgeEndpoint(gone), JudgeEndpoint(server.url, "key")]})
    try:
        (reply,) = panel.ask(as_they_are, request("5")).result()
        panel.use({judge.name: [JudgeEndpoint(server.url, "key")]})
        (busy,) = panel.ask(as_they_are, request("busy")).result()
    finally:
        panel.close()
    assert (reply.text, reply.error) == ("Score: 1", None)
    assert busy.error == f"status 503 (fault 503), from {server.url}/chat/completions"
    assert server.keys == ["Bearer key"] * 3
    assert server.bodies[0]["model"] == judge.model


def test_at_most_max_concurrency_requests_run_at_once(server: JudgeServer, judge: JudgeConfig) -> None:
    server.replies = {str(number): "Score: 1" for number in range(12)}
    replies(replace(judge, max_concurrency=3), *server.replies)
    assert (server.most_at_once <= 3, len(server.bodies)) == (True, 12)


def test_a_template_that_cannot_be_rendered_fails_its_sample(
    server: JudgeServer, judge: JudgeConfig, tmp_path: Path
) -> None:
    server.replies = {"5": "Score: 1"}
    (tmp_path / "judge.jinja").write_text("{{ extra_info.rubric }}\n{{ solution }}")
    (got,) = replies(judge, "5")
    assert (
        "judge.jinja cannot be rendered: UndefinedError: 'dict object' has no attribute 'rubric'; its"
        in got.error
    )
    (tmp_path / "judge.jinja").write_text("{{ solution.__class__.__mro__ }}")
    (got,) = replies(judge, "5")
    assert "SecurityError" in got.error
    assert server.bodies == []


def test_a_template_must_be_readable(tmp_path: Path) -> None:
    with pytest.raises(JudgePromptError, match="cannot be read: .*No such file"):
        load_template(str(tmp_path / "absent.jinja"))
    (tmp_path / "bad.jinja").write_text("a\n{% if %}")
    with pytest.raises(
        JudgePromptError, match=r"bad.jinja:2 is not a jinja2 template: Expected an expression"
    ):
        load_template(str(tmp_path / "bad.jinja"))


def test_scores_of_functions_and_judges_are_added_by_weight(
    server: JudgeServer, judge: JudgeConfig, tmp_path: Path
) -> None:
    """The function gives the length: 0.5 x 2 + 0.5 x 3 - 10 x (1 + 5 / 10)."""
    file = str(tmp_path / "reward.py")
    judges = [
        replace(judge, weight=0.5),
        replace(judge, name="second", model="small", weight=-10.0, parse=JudgeParseConfig(path=file)),
    ]
    function = RewardFunctionConfig(path=file, weight=0.5)
    second = tmp_path / "second.jinja"
    second.write_text("Second\nsecond {{ solution }}")
    judges[1] = replace(judges[1], prompt=str(second))
    server.replies = {
        "ab": "Score: 7\nno, Score: 3",
        "second ab": "good",
        "raise": "Score: 1",
        "second raise": "bad",
    }

    with RewardScorer([function], 20.0, 0.5, 1, judges=judges) as scorer:
        report = scorer.score([request("ab"), request("raise")])
        assert column(report, "score") == [1 + 1.5 - 15, 0.0]
        assert column(report, "parts") == [(2.0, 3.0, 1.5), (0.0, 0.0, 0.0)]
        numbers = column(report, "numbers")[0]
        assert numbers.pop("judge/quality/latency_s") > 0
        assert numbers.pop("judge/second/latency_s") > 0
        assert numbers == {
            "compute_score": 2.0,
            "letters": 2.0,
            "judge/quality": 3.0,
            "judge/quality/failed": 0.0,
            "judge/second": 1.5,
            "judge/second/failed": 0.0,
        }
        assert column(report, "numbers")[1] == {}  # the function failed, so the judges' scores are unused
        assert (column(report, "answer"), declared(report)) == (["ab", None], [True, False])
        assert list(errors(report)) == [1]


def test_failed_judgments_are_errors_of_their_samples(server: JudgeServer, judge: JudgeConfig) -> None:
    server.faults = {"down": [400]}
    server.replies = {
        "good": "Score: 0",
        "none": "I like it",
        "text": "Score: ...",
        "huge": f"Score: {'9' * 400}",
    }
    samples = [request(text) for text in ("good", "down", "none", "text", "huge")]
    with RewardScorer([], 20.0, 0.8, 1, judges=[judge]) as scorer:
        report = scorer.score(samples)
        assert column(report, "score") == [0.0] * 5
        assert [error is None for error in column(report, "error")] == [True, False, False, False, False]
        assert [numbers["judge/quality/failed"] for numbers in column(report, "numbers")] == [0, 1, 1, 1, 1]
        assert ["judge/quality" in numbers for numbers in column(report, "numbers")] == [
            True,
            False,
            False,
            False,
            False,
        ]
        assert column(report, "parts") == [(0.0,)] * 5
        messages = list(errors(report).values())
        assert messages[0].startswith("judge quality: status 400 (fault 400), from http://")
        assert messages[1] == "judge quality: no match of 'Score: (-?[0-9.]+)' in 'I like it'"
        assert messages[2] == "judge quality: the score is '...', expected a finite number, in 'Score: ...'"
        assert messages[3].startswith("judge quality: the score is inf, expected a finite number, in '...9")

        # Samples that were begun are judged once.
        asked = len(server.bodies)
        begun = scorer.begin(samples[:1])
        assert begun[0].outcome.result(timeout=20).score == 0.0
        assert column(scorer.score(begun), "error") == [None]
        assert len(server.bodies) == asked + 1

        with pytest.raises(
            RewardError, match=r"(?s)at least 1 of 1 samples.*judge quality: no match.*Fix the judge"
        ):
            scorer.score([request("none")])


def test_the_hint_names_the_server_of_a_judge_and_not_the_function(
    server: JudgeServer, judge: JudgeConfig, tmp_path: Path
) -> None:
    server.faults = {"5": [401], "raise": [401]}
    function = RewardFunctionConfig(path=str(tmp_path / "reward.py"))
    with RewardScorer([function], 20.0, 0.0, 1, judges=[judge]) as scorer:
        with pytest.raises(RewardError) as caught:
            scorer.score([request("5")])
        told = "\n".join(caught.value.hint)
        assert f"if judge quality did not reply, it is its server at {server.url}" in told
        assert "reward.judges[0].time_limit_s (now 5)" in told
        assert "reward.time_limit_s" not in told
        assert "fix the function" not in told

        # A failure of a function has the hint about functions.
        server.reset()
        server.replies = {"raise": "Score: 1"}
        with pytest.raises(RewardError) as caught:
            scorer.score([request("raise")])
        assert caught.value.hint == FIX_THE_FUNCTION


def test_mistakes_are_found_at_the_start(
    judge: JudgeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(
        RewardFunctionError, match=r"judges\[0\].api_key_env: the environment variable JUDGE_KEY is"
    ):
        RewardScorer([], 20.0, 0.0, 1, judges=[replace(judge, api_key_env="JUDGE_KEY")])
    monkeypatch.setenv("JUDGE_KEY", "secret\n")
    with pytest.raises(
        RewardFunctionError, match="the value of JUDGE_KEY has characters that a request"
    ) as caught:
        RewardScorer([], 20.0, 0.0, 1, judges=[replace(judge, api_key_env="JUDGE_KEY")])
    assert "secret" not in str(caught.value)
    absent = JudgeParseConfig(path=f"{tmp_path / 'reward.py'}:absent")
    with pytest.raises(RewardFunctionError, match=r"function of a judge 'absent' is not in"):
        RewardScorer([], 20.0, 0.0, 1, judges=[replace(judge, parse=absent)])
