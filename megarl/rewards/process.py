"""The code of a reward process: it loads the functions once and scores one sample at a time.

It does not import torch.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import multiprocessing
import os
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.schema import JudgeConfig, RewardFunctionConfig, RewardSandboxConfig
from megarl.machine.confined import ProcessLimits, landlock_abi
from megarl.machine.errors import HintedError, in_short
from megarl.machine.reaper import OWNER, start_reaper
from megarl.machine.user_functions import Expected, UserFunctionError, last_line, load_function
from megarl.rewards.confined_call import (
    ConfinedCallError,
    NotAScoreError,
    call_confined,
    finite_number,
    set_sample_limit,
    shown,
)
from megarl.rewards.judge_reply import JudgeReply, LoadedJudge, load_judge, read_replies
from megarl.rewards.thinking import set_opens_thinking

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
MOST_NUMBERS = 64  # that a function may return for a sample, including its score
RewardFunction = Callable[..., Any]
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
TURNS = "turns"  # passed to functions that have this parameter
_RESERVED = {"model", "functions"}  # metrics of runs with a reward model
# The value of the key "answer" as a list with one element; None if there is no such key.
Answer = list[str | None] | None
EXAMPLE = "def compute_score(data_source, solution_str, ground_truth, extra_info):"


LET_SAMPLES_FAIL = "or let some samples fail, scored as 0: {reward.max_error_rate}"
FIX_THE_FUNCTION = (
    "fix the function, and try it on the data without training: `megarl eval CONFIG --rows ROWS.parquet`",
    "or let some samples fail, scored as 0: {reward.max_error_rate, reward.time_limit_s}",
)


class RewardFunctionError(HintedError, UserFunctionError):
    """A reward function cannot be used. The message names the file, the function and the fix."""

    hint = FIX_THE_FUNCTION


def load_reward_function(path: str, name: str) -> RewardFunction:
    """Load a reward function.

    It will be called with the four keywords of ARGUMENTS, and with TURNS if it has that parameter.

    Raises:
        RewardFunctionError: See load_function.
    """
    what = "reward function", "reward.functions' path", EXAMPLE, ARGUMENTS
    return load_function(path, name, Expected(*what, optional=(TURNS,), error=RewardFunctionError))


class ScoreRequest(NamedTuple):
    """A sample to score.

    Attributes:
        ground_truth, extra_info: Columns of the data set; they must be picklable.
        turns: The turns after the prompt and their authors, as returned by decode_turns. None:
            `solution_str` is the only turn.
        messages: The prompt's messages, which judges read.
        opens_thinking: Whether the text before `solution_str` opens its thinking, as some chat templates do.
    """

    uid: str
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    turns: list[dict[str, str]] | None = None
    messages: Sequence[dict[str, Any]] = ()
    opens_thinking: bool = False


class Outcome(NamedTuple):
    """The result of all functions and judges for one sample.

    With an `error`, the score is a meaningless 0, `numbers` has only the judges' failures, and all other
    fields are empty.

    Attributes:
        score: The weighted sum of the scores of functions and judges.
        numbers: The numbers logged as `reward/<name>/mean`, by name: the other numbers that a function
            returned, and with several functions or judges also the score of each function, under its label
            (see `function_labels`), and those of judges (see `judge_numbers`).
        parts: The score of each function and of each judge, in order, before its weight; NaN for a function
            that has no opinion on the sample.
        answer: The text under "answer" in the dict of the first function that has this key; None if the
            sample has no answer.
        has_answer: For each function, whether its dict has the key "answer"; None if it has no opinion.
    """

    score: float
    numbers: dict[str, float]
    error: str | None = None
    parts: tuple[float, ...] = ()
    answer: str | None = None
    has_answer: tuple[bool | None, ...] = ()


class LoadedFunction(NamedTuple):
    config: RewardFunctionConfig
    call: RewardFunction

    def arguments(self, request: ScoreRequest) -> dict[str, Any]:
        fields = request._asdict()
        given = {name: fields[name] for name in ARGUMENTS}
        if TURNS in inspect.signature(self.call).parameters:
            given[TURNS] = request.turns or [{"role": "assistant", "content": request.solution_str}]
        return given


# The state of the process, set by `start`: what was loaded, or why it could not be loaded.
_functions: list[LoadedFunction] = []
_judges: list[LoadedJudge] = []
_limits = ProcessLimits(0, 0)
_scored_elsewhere = False  # see RewardScorer
_load_error: str | None = None


def start(
    configs: Sequence[RewardFunctionConfig],
    judges: Sequence[JudgeConfig],
    sandbox: RewardSandboxConfig,
    time_limit_s: float,
    scored_elsewhere: bool = False,
) -> None:
    """Initialize a process of the pool.

    This never raises, because the pool would then start processes forever; see `load_error`.
    """
    global _limits, _load_error, _scored_elsewhere
    _die_with_parent()
    set_sample_limit(time_limit_s)
    _scored_elsewhere = scored_elsewhere
    _limits = ProcessLimits(sandbox.memory_mb, cpu_s=math.ceil(time_limit_s))

    if any(config.sandbox for config in configs) and not landlock_abi():
        _load_error = (
            "reward.functions' sandbox: this kernel has no Landlock (Linux 5.13), or it is disabled; set "
            "sandbox to false"
        )
        return

    # Processes started by a function end with this process, even if it is killed because a sample took too
    # long. They are identified by a mark and by their process group.
    os.setpgid(0, 0)
    os.environ[OWNER] = owner = f"{os.environ.get(OWNER, '')}reward.{uuid.uuid4().hex}/"
    start_reaper(owner, whole_group=True)

    # The pool's own handler is Python code, which never runs while a function hangs in C, for example in a
    # regular expression.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _functions[:] = [
            LoadedFunction(config, load_reward_function(config.file, config.name)) for config in configs
        ]
        _judges[:] = [load_judge(judge) for judge in judges]
    except UserFunctionError as error:
        _load_error = str(error)


def _die_with_parent() -> None:
    """Let the kernel send SIGKILL to this process when the thread that started it ends.

    This happens whenever the owner of the pool ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():  # it ended before the call above
            os._exit(1)


def load_error() -> str | None:
    return _load_error


def loaded_functions() -> list[LoadedFunction]:
    """Return the functions of this process, or none if they could not be loaded."""
    return _functions


def score(request: ScoreRequest, replies: Sequence[JudgeReply] = ()) -> Outcome:
    """Call all functions for one sample, and read the replies of the judges.

    This never raises: a failure is the outcome's `error`.
    """
    if _load_error is not None:
        return Outcome(0.0, {}, _load_error)
    set_opens_thinking(request.opens_thinking)
    scores, judge_numbers, error = read_replies(
        _judges, replies, request.ground_truth, request.extra_info, _written_by_policy(request)
    )
    if error is not None:
        return Outcome(0.0, judge_numbers, error)

    total = sum(judge.weight * score for (judge, _), score in zip(_judges, scores, strict=True))
    numbers: dict[str, float] = {}
    parts = list[float]()
    answers = list[Answer]()
    has_answer = list[bool | None]()
    labels = function_labels([each.config for each in _functions])

    for function, name in zip(_functions, labels, strict=True):
        try:
            if function.config.sandbox:
                values, answer = _checked(call_confined(partial(_evaluate, function, request), _limits))
            else:
                values, answer = _evaluate(function, request)
        except ConfinedCallError as error:
            return Outcome(0.0, {}, f"{name} {error}")
        except BaseException as error:  # noqa: BLE001
            # This is the boundary of the process: the user's code may raise anything, even SystemExit.
            return Outcome(0.0, {}, f"{name} raised {last_line(error)}")
        given = values.pop("score", None)
        parts.append(math.nan if given is None else given)
        answers.append(answer)
        has_answer.append(None if given is None and answer is None else answer is not None)
        # A function without an opinion is left out of the sum, and of its metric.
        if given is not None:
            total += function.config.weight * given
            # A score that is not the only one is a metric.
            if len(_functions) + len(_judges) > 1:
                numbers[name] = given
        # If there are several functions, each number is named after its function.
        if len(_functions) > 1:
            values = {f"{name}/{key}": value for key, value in values.items()}
        numbers |= values

    if all(map(math.isnan, parts)) and not (_judges or _scored_elsewhere):
        return Outcome(
            0.0, {}, f"{' and '.join(labels)} returned None (no opinion), and nothing else scores the sample"
        )

    # The first function that returns an answer provides the sample's vote.
    vote = next((answer for answer in answers if answer is not None), [None])
    return Outcome(
        total,
        numbers | judge_numbers,
        parts=(*parts, *scores),
        answer=vote[0],
        has_answer=tuple(has_answer),
    )


def _written_by_policy(request: ScoreRequest) -> str:
    turns = [turn["content"] for turn in request.turns or () if turn["role"] == "assistant"]
    return "\n".join([*turns, request.solution_str])


def function_labels(configs: Sequence[RewardFunctionConfig]) -> list[str]:
    """Return the name of each function in messages and metrics.

    If there are several functions, the name is `<file>.<name>`, followed by its position if that is not
    unique.
    """
    if len(configs) == 1:
        return [configs[0].name]
    labels = [f"{Path(config.file).stem}.{config.name}" for config in configs]
    return [
        label if labels.count(label) == 1 else f"{label}.{position}" for position, label in enumerate(labels)
    ]


def _evaluate(function: LoadedFunction, request: ScoreRequest) -> tuple[dict[str, float], Answer]:
    """Return the numbers that a function returns, without a score if it has no opinion, and its answer.

    Raises:
        NotAScoreError: The function returned something else.
    """
    returned = function.call(**function.arguments(request))
    numbers = _numbers(returned)
    if not isinstance(returned, dict) or "answer" not in returned:
        return numbers, None
    answer = returned["answer"]

    if answer is not None and not isinstance(answer, str):
        raise NotAScoreError(
            f"returned the {type(answer).__name__} {repr(answer)[:60]} as its answer, expected a normalized "
            "string, or None for a sample without an answer"
        )

    return numbers, [answer]


def _checked(said: Any) -> tuple[dict[str, float], Answer]:
    """Check the answer of a process in which a model's program ran and may have written arbitrary data.

    Raises:
        NotAScoreError: It is not what a function returns.
    """
    match said:
        case [dict() as numbers, None | [None | str()] as answer]:
            return _numbers({"score": None} | numbers), answer
    raise NotAScoreError(f"returned {str(said)[:60]!r}, which is not what a function returns")


def _numbers(returned: Any) -> dict[str, float]:
    """Return `score`, unless it is None, and the other numbers that a function returned.

    Raises:
        NotAScoreError: The score is neither a finite number nor None.
    """
    if not isinstance(returned, dict):
        returned = {"score": returned}
    if "score" not in returned:
        raise NotAScoreError(
            f"returned a dict without 'score', with the keys {in_short(sorted(map(str, returned)))}; "
            f"expected a number or such a dict"
        )

    if reserved := _RESERVED & set(map(str, returned)):
        name = min(reserved)
        raise NotAScoreError(
            f"returned {name!r}, but reward/{name}/mean is a metric of the reward model; give it another name"
        )

    # Values that are not finite numbers, such as an answer, are not logged.
    numbers = {
        str(key): number for key, value in returned.items() if (number := finite_number(value)) is not None
    }
    value = returned["score"]
    if "score" not in numbers and value is not None:
        raise NotAScoreError(
            f"returned the {type(value).__name__} {shown(value)} as its score, expected a finite number"
        )

    if len(numbers) > MOST_NUMBERS:
        raise NotAScoreError(
            f"returned {len(numbers)} numbers, at most {MOST_NUMBERS} can become metrics; return fewer"
        )

    return numbers
