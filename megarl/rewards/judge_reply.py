"""Reads the scores in the replies of judges. This runs in reward processes, which can be killed."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.config.schema import JudgeConfig
from megarl.machine.user_functions import Expected, last_line, load_function
from megarl.rewards.returned_numbers import finite_number
from megarl.rewards.thinking import outside_thinking

_ARGUMENTS = ("ground_truth", "extra_info")  # passed to functions that have these parameters
_NUM_SHOWN = 200  # characters of a reply in an error


class JudgeReply(NamedTuple):
    """A judge's reply to one sample.

    Attributes:
        text: The reply. Empty with an `error`.
        latency_s: Seconds from the first attempt to the reply.
        error: Why there is no reply.
    """

    text: str
    latency_s: float
    error: str | None = None


class ReplyError(ValueError):
    """A reply contains no score."""


class LoadedJudge(NamedTuple):
    config: JudgeConfig
    parse: Callable[..., Any] | None  # the user's function

    def arguments(self, ground_truth: Any, extra_info: Mapping[str, Any]) -> dict[str, Any]:
        assert self.parse is not None
        given = {"ground_truth": ground_truth, "extra_info": extra_info}
        parameters = inspect.signature(self.parse).parameters
        return {name: value for name, value in given.items() if name in parameters}


class Judged(NamedTuple):
    """The judges' scores of one sample, before their weights; none with an `error`."""

    scores: tuple[float, ...]
    numbers: dict[str, float]
    error: str | None = None


def judge_numbers(name: str) -> tuple[str, str, str]:
    """Return the names of a judge's numbers: its score, its latency, and whether it failed."""
    return f"judge/{name}", f"judge/{name}/latency_s", f"judge/{name}/failed"


def judge_failures(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers that also samples without a score have: whether each judge failed."""
    return {
        name: value
        for name, value in numbers.items()
        if name.startswith("judge/") and name.endswith("/failed")
    }


def load_judge(config: JudgeConfig) -> LoadedJudge:
    """Load the judge's function, if it has one.

    Raises:
        UserFunctionError: See load_function.
    """
    if config.parse.path is None:
        return LoadedJudge(config, None)
    expected = Expected(
        "function of a judge",
        "reward.judges' parse.name",
        "def parse(reply):",
        ("reply",),
        optional=_ARGUMENTS,
    )
    return LoadedJudge(config, load_function(config.parse.path, config.parse.name, expected))


def read_replies(
    judges: Sequence[LoadedJudge],
    replies: Sequence[JudgeReply],
    ground_truth: Any,
    extra_info: Mapping[str, Any],
) -> Judged:
    """Read the scores in the replies to one sample. If a judge failed, the sample has no score."""
    scores = list[float]()
    numbers: dict[str, float] = {}
    errors = list[str]()

    for judge, reply in zip(judges, replies, strict=True):
        score_name, latency_name, failed_name = judge_numbers(judge.config.name)
        try:
            if reply.error is not None:
                raise ReplyError(reply.error)
            score = _score_in(judge, reply.text, ground_truth, extra_info)
        except ReplyError as error:
            errors.append(f"judge {judge.config.name}: {error}")
            numbers[failed_name] = 1.0
            continue
        scores.append(score)
        numbers |= {score_name: score, latency_name: reply.latency_s, failed_name: 0.0}

    if errors:
        return Judged((), judge_failures(numbers), "; ".join(errors))
    return Judged(tuple(scores), numbers)


def _score_in(judge: LoadedJudge, text: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """Return the score in a reply. Raises ReplyError."""
    parse = judge.config.parse
    value: Any
    if judge.parse is not None:
        try:
            value = judge.parse(reply=text, **judge.arguments(ground_truth, extra_info))
        except BaseException as error:  # noqa: BLE001  (the user's code may raise anything, even SystemExit)
            raise ReplyError(f"{parse.name} raised {last_line(error)} for {_shown(text)}") from error
    elif parse.json is not None:
        value = _value_of_key(text, parse.json)
    else:
        assert parse.regex is not None
        value = _last_match(text, parse.regex)

    # JSON and regular expressions also give numbers as text.
    if isinstance(value, str) and judge.parse is None:
        with contextlib.suppress(ValueError):
            value = float(value)
    score = finite_number(value)
    if score is None:
        raise ReplyError(f"the score is {repr(value)[:60]}, expected a finite number, in {_shown(text)}")

    return score


def _last_match(text: str, regex: str) -> str:
    found = None
    for found in re.finditer(regex, outside_thinking(text)):  # noqa: B007
        pass
    if found is None or found.group(1) is None:
        raise ReplyError(f"no match of {regex!r} in {_shown(text)}")
    return found.group(1)


def _value_of_key(text: str, key: str) -> Any:
    """Return the value in the last JSON object of a reply, which may have text or a code block around it."""
    answer = outside_thinking(text)
    decoder = json.JSONDecoder()
    last: dict[str, Any] | None = None
    start = answer.find("{")

    # Objects inside a decoded object are skipped; a brace that begins none is passed over.
    while start != -1:
        try:
            last, end = decoder.raw_decode(answer, start)
        except (ValueError, RecursionError):
            end = start + 1
        start = answer.find("{", end)

    if last is None:
        raise ReplyError(f"no JSON object in {_shown(text)}")
    if key not in last:
        raise ReplyError(f"no key {key!r} in the JSON object of {_shown(text)}")
    return last[key]


def _shown(text: str) -> str:
    return repr(text if len(text) <= _NUM_SHOWN else f"...{text[-_NUM_SHOWN:]}")
