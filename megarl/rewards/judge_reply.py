"""Reads the scores in the replies of judges. This runs in reward processes, which can be killed."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.config.schema import JudgeConfig, JudgeParseConfig
from megarl.machine.user_functions import Expected, last_line, load_function
from megarl.models.thinking import END_THINK
from megarl.rewards.confined_call import finite_number
from megarl.rewards.thinking import outside_thinking

_ARGUMENTS = ("ground_truth", "extra_info")  # passed to functions that have these parameters
_NUM_SHOWN = 200  # characters of a reply in an error


class JudgeReply(NamedTuple):
    """A judge's reply to one sample.

    Attributes:
        text: The reply. Empty with an `error`.
        latency_s: Seconds from the first attempt to the reply.
        error: Why there is no reply.
        opens_thinking: Whether the judge's chat template opened the thinking of the reply.
    """

    text: str
    latency_s: float
    error: str | None = None
    opens_thinking: bool = False


class ReplyError(ValueError):
    """A reply contains no score."""


# A judge, and the user's function that reads its replies, if there is one.
type LoadedJudge = tuple[JudgeConfig, Callable[..., Any] | None]


def judge_numbers(name: str) -> tuple[str, str, str]:
    """Return the names of a judge's numbers: its score, its latency, and whether it failed."""
    return f"judge/{name}", f"judge/{name}/latency_s", f"judge/{name}/failed"


def judge_label(name: str) -> str:
    """Return what the messages of a judge's failures begin with."""
    return f"judge {name}:"


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
    if config.parse.file is None:
        return config, None
    expected = Expected(
        "function of a judge",
        "reward.judges' parse.path",
        "def parse(reply):",
        ("reply",),
        optional=_ARGUMENTS,
    )
    return config, load_function(config.parse.file, config.parse.name, expected)


def read_replies(
    judges: Sequence[LoadedJudge],
    replies: Sequence[JudgeReply],
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    judged: str | None = None,
) -> tuple[tuple[float, ...], dict[str, float], str | None]:
    """Read the scores in the replies to one sample. If a judge failed, the sample has no score.

    Args:
        judged: Everything that the policy wrote, which a judge may quote. None: unknown.

    Returns:
        The judges' scores before their weights, the numbers that are logged, and why there is no score.
    """
    scores = list[float]()
    numbers: dict[str, float] = {}
    errors = list[str]()

    for judge, reply in zip(judges, replies, strict=True):
        name = judge[0].name
        score_name, latency_name, failed_name = judge_numbers(name)
        try:
            if reply.error is not None:
                raise ReplyError(reply.error)
            score = _score_in(judge, reply, ground_truth, extra_info, judged)
        except ReplyError as error:
            errors.append(f"{judge_label(name)} {error}")
            numbers[failed_name] = 1.0
            continue
        scores.append(score)
        numbers |= {score_name: score, latency_name: reply.latency_s, failed_name: 0.0}

    if errors:
        return (), judge_failures(numbers), "; ".join(errors)
    return tuple(scores), numbers, None


def _score_in(
    judge: LoadedJudge,
    reply: JudgeReply,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    judged: str | None,
) -> float:
    """Return the score in a reply. Raises ReplyError."""
    config, function = judge
    parse = config.parse
    text = reply.text
    value: Any
    if function is not None:
        given = {"ground_truth": ground_truth, "extra_info": extra_info}
        parameters = inspect.signature(function).parameters
        try:
            value = function(reply=text, **{name: given[name] for name in _ARGUMENTS if name in parameters})
        except BaseException as error:  # noqa: BLE001  (the user's code may raise anything, even SystemExit)
            raise ReplyError(f"{parse.name} raised {last_line(error)} for {_shown(text)}") from error
    else:
        answer = outside_thinking(text, reply.opens_thinking)
        known = None if judged is None else _squeezed(judged)
        try:
            value = _own_verdict(_verdicts(parse, answer), answer, known)
        except ReplyError as error:
            raise ReplyError(f"{error} {_shown(text)}") from None

    score = finite_number(value)
    if score is None:
        raise ReplyError(f"the score is {repr(value)[:60]}, expected a finite number, in {_shown(text)}")

    return score


def _verdicts(parse: JudgeParseConfig, answer: str) -> list[tuple[slice, Any]]:
    """Return the place and the value of every score in a reply, in order. Raises ReplyError without one."""
    if parse.json is not None:
        return _verdicts_of_key(answer, parse.json)
    assert parse.regex is not None
    matches = [match for match in re.finditer(parse.regex, answer) if match.group(1) is not None]
    if not matches:
        raise ReplyError(f"no match of {parse.regex!r} in")
    return [(slice(*match.span()), match.group(1)) for match in matches]


def _verdicts_of_key(answer: str, key: str) -> list[tuple[slice, Any]]:
    """Return the JSON objects of a reply that have the key. There may be text or code blocks around them."""
    decoder = json.JSONDecoder()
    objects = list[tuple[slice, Any]]()
    start = answer.find("{")

    # Objects inside a decoded object are skipped; a brace that begins none is passed over.
    while start != -1:
        try:
            said, end = decoder.raw_decode(answer, start)
            objects.append((slice(start, end), said))
        except (ValueError, RecursionError):
            end = start + 1
        start = answer.find("{", end)

    if not objects:
        raise ReplyError("no JSON object in")
    found = [(place, said[key]) for place, said in objects if key in said]
    if not found:
        raise ReplyError(f"no key {key!r} in the JSON object of")
    return found


def _own_verdict(verdicts: Sequence[tuple[slice, Any]], answer: str, judged: str | None) -> Any:
    """Return the value of the last verdict that is no quotation.

    A quotation follows a closing tag of thinking on its line, as in the answer that was judged.

    Raises:
        ReplyError: Others have another value, and the judge may have quoted this one, so that the answer
            would choose its own score.
    """
    # A number without words around it is in many answers by chance.
    own = [
        (place, value)
        for place, value in verdicts
        if answer[place] == value or not _is_quoted(answer, place, judged)
    ] or verdicts
    place, last = own[-1]
    text = answer[place]
    others = [answer[other] for other, value in own if _number(value) != _number(last)]
    if others and text != last and judged and _squeezed(text) in judged:
        raise ReplyError(
            f"the scores {others[-1]!r} and {text!r} differ, and the judge may have quoted the "
            "latter from the answer, in"
        )

    return _number(last)


def _is_quoted(answer: str, place: slice, judged: str | None) -> bool:
    tag = answer.rfind(END_THINK, answer.rfind("\n", 0, place.start) + 1, place.start)
    return tag >= 0 and (judged is None or _squeezed(answer[tag : place.stop]) in judged)


def _number(value: Any) -> Any:
    """Return the number in a text, because JSON and regular expressions also give numbers as text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _squeezed(text: str) -> str:
    return " ".join(text.casefold().split())


def _shown(text: str) -> str:
    return repr(text if len(text) <= _NUM_SHOWN else f"...{text[-_NUM_SHOWN:]}")
