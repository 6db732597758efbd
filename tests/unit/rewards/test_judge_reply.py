"""Test how scores are read from the replies of judges."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.schema import JudgeConfig, JudgeParseConfig
from megarl.rewards.judge_reply import JudgeReply, judge_failures, load_judge, read_replies


def judged(parse: JudgeParseConfig, text: str) -> tuple[tuple[float, ...], dict[str, float], str | None]:
    return read_replies(
        [load_judge(JudgeConfig(name="j", parse=parse))], [JudgeReply(text, 0.5)], "5", {"a": 1}
    )


@pytest.mark.parametrize(
    ("parse", "text", "score"),
    [
        (JudgeParseConfig(regex=r"(\d+)/10"), "7/10, on reflection 8/10", 8.0),
        (JudgeParseConfig(regex=r"(\d+)"), "<think>9</think>4", 4.0),
        (JudgeParseConfig(regex=r"(\d+)"), "3</think>4", 4.0),
        (JudgeParseConfig(regex=r"Score: (.*)"), "Score: -1e-1", -0.1),
        (JudgeParseConfig(json="score"), '{"score": 0.25}', 0.25),
        (
            JudgeParseConfig(json="score"),
            'So:\n```json\n{"why": {"score": 9}, "score": "3"}\n```\nDone.',
            3.0,
        ),
        (JudgeParseConfig(json="ok"), '{not json} {"ok": false} {"ok": true}', 1.0),
    ],
)
def test_scores_are_read(parse: JudgeParseConfig, text: str, score: float) -> None:
    numbers = {"judge/j": score, "judge/j/latency_s": 0.5, "judge/j/failed": 0.0}
    assert judged(parse, text) == ((score,), numbers, None)


@pytest.mark.parametrize(
    ("parse", "text", "error"),
    [
        (JudgeParseConfig(regex="S(x)?"), "S", "no match of 'S(x)?' in 'S'"),
        (JudgeParseConfig(regex=r"(\d)"), "<think>4", r"no match of '(\\d)' in '<think>4'"),
        (JudgeParseConfig(regex="(.+)"), "nan", "the score is nan, expected a finite number, in 'nan'"),
        (JudgeParseConfig(json="score"), "[1] {", "no JSON object in '[1] {'"),
        (JudgeParseConfig(json="score"), '{"a": 1}', "no key 'score' in the JSON object of '{\"a\": 1}'"),
        (
            JudgeParseConfig(json="a"),
            '{"a": null}',
            "the score is None, expected a finite number, in '{\"a\": null}'",
        ),
    ],
)
def test_replies_without_a_score_are_errors(parse: JudgeParseConfig, text: str, error: str) -> None:
    assert judged(parse, text) == ((), {"judge/j/failed": 1.0}, f"judge j: {error}")


def test_functions_get_the_columns_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(
        "def parse(reply, extra_info):\n    return len(reply) + extra_info['a']\n"
        "def wrong(reply):\n    return 1 / 0\ndef text(reply):\n    return '1'\n"
    )
    path = str(tmp_path / "p.py")
    assert judged(JudgeParseConfig(path=path), "abc")[0] == (4.0,)
    assert judged(JudgeParseConfig(path=f"{path}:wrong"), "abc")[2] == (
        "judge j: wrong raised ZeroDivisionError: division by zero (p.py:4) for 'abc'"
    )
    assert judged(JudgeParseConfig(path=f"{path}:text"), "abc")[2] == (
        "judge j: the score is '1', expected a finite number, in 'abc'"
    )


def test_of_several_judges_each_failure_is_counted() -> None:
    judges = [load_judge(JudgeConfig(name=name, parse=JudgeParseConfig(regex="(.)"))) for name in "ab"]
    found = _, numbers, _ = read_replies(
        judges, [JudgeReply("", 1.0, "down"), JudgeReply("1", 1.0)], None, {}
    )
    assert found == ((), {"judge/a/failed": 1.0, "judge/b/failed": 0.0}, "judge a: down")
    assert judge_failures({"x/failed": 1.0, "judge/a": 2.0, **numbers}) == numbers
