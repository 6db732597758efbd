"""Tries the ground truths of the data: each is scored as a response, next to an empty response.

A reward file may define two functions in addition to its reward function:

    def check_truth(ground_truth) -> None:                 raises ValueError for a ground truth that no
                                                           response can match
    def answer_from_truth(ground_truth) -> str | None:     returns a correct response; None: it cannot be
                                                           derived, as from tests of code

Without the second one, the text of the ground truth is used as the response, and it is unknown whether it
should get the full score.
"""

from __future__ import annotations

import dis
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from pebble import ProcessExpired

from megarl.config.validation_metrics import RewardKeys
from megarl.machine.user_functions import companion, last_line
from megarl.rewards.process import (
    LoadedFunction,
    Outcome,
    ScoreRequest,
    function_labels,
    load_error,
    loaded_functions,
    score,
)
from megarl.rewards.scorer import RewardScorer

NUM_SHOWN = 5
TRUTH_FORM_HINT = (
    "the function may expect the answer in another form, such as \\boxed{...}: define "
    "answer_from_truth(ground_truth) in its file, which "
    "returns such a response (see docs/rewards.md); otherwise correct the data or the function"
)


class TruthRow(NamedTuple):
    """A row of the data: its location, and the inputs of the reward functions."""

    file: str
    number: int  # in the file, from 0
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]

    def request(self, response: str = "") -> ScoreRequest:
        return ScoreRequest(
            f"row {self.number}", self.data_source, response, self.ground_truth, self.extra_info
        )


class Response(NamedTuple):
    """A ground truth as a response, and its outcome.

    Attributes:
        text: None if no response can be derived.
        form_of: The position of the function whose `answer_from_truth` created the text; None: it is the text
            of the ground truth.
        refusal: Why the ground truth is refused before it is scored.
        outcome: Its error says why the text, or finding it, did not finish.
        is_late: Whether the time limit ended it.
    """

    text: str | None = None
    form_of: int | None = None
    refusal: str | None = None
    outcome: Outcome | None = None
    is_late: bool = False


class Trial(NamedTuple):
    """The results of scoring one ground truth, and an empty response to the same row."""

    row: TruthRow
    response: Response
    empty: Outcome

    @property
    def is_underivable(self) -> bool:
        """Whether the ground truth seems valid, but no response can be derived from it."""
        response = self.response
        return response.text is None and response.refusal is None and response.outcome is None

    @property
    def error(self) -> str | None:
        """The reason why scoring the ground truth failed."""
        outcome = self.response.outcome
        return None if outcome is None else outcome.error

    @property
    def gain(self) -> float | None:
        """The score of the ground truth minus that of an empty response; None if it is unknown.

        The score is that of the function whose form the response has.
        """
        outcome = self.response.outcome
        if outcome is None or outcome.error or self.empty.error:
            return None

        # Only the function that defined the form of the text can be expected to recognize it.
        position = self.response.form_of
        if position is None:
            return outcome.score - self.empty.score
        gain = outcome.parts[position] - self.empty.parts[position]
        return None if math.isnan(gain) else gain  # the function has no opinion on one of them


def as_response(request: ScoreRequest) -> Response:
    """Score the ground truth of a request as a response, in a reward process. `solution_str` is not used."""
    if (problem := load_error()) is not None:
        return Response(refusal=problem)
    functions = loaded_functions()
    truth = request.ground_truth
    labels = function_labels([function.config for function in functions])

    # A ground truth that one function refuses is invalid for all of them.
    for function, label in zip(functions, labels, strict=True):
        if (refusal := _refusal(function, label, truth)) is not None:
            return Response(refusal=refusal)

    # The first function that can format the ground truth as a response decides for all.
    text = truth if isinstance(truth, str) else str(truth)
    form_of = None

    for position, (function, label) in enumerate(zip(functions, labels, strict=True)):
        if (shown := companion(function.config.file, function.call, "answer_from_truth")) is None:
            continue
        try:
            derived = shown(truth)
        except Exception as error:  # noqa: BLE001
            # This is the boundary of the process: the user's code may raise anything.
            return Response(refusal=f"answer_from_truth, defined next to {label}, raised {last_line(error)}")
        if derived is None:
            return Response(form_of=position)
        text = derived
        form_of = position
        break

    return Response(text, form_of, outcome=score(request._replace(solution_str=text)))


def _refusal(function: LoadedFunction, label: str, truth: Any) -> str | None:
    if is_null(truth) and reads_truth(function.call):
        return (
            f"it is {'null' if truth is None else 'NaN'}, and {label} reads it; provide the right answer, "
            f"or remove the row"
        )

    # A function that does not read the ground truth has no requirements for it.
    if (check := companion(function.config.file, function.call, "check_truth")) is None or not reads_truth(
        function.call
    ):
        return None

    try:
        check(truth)
    except ValueError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001
        # This is the boundary of the process: the user's code may raise anything.
        return f"check_truth, defined next to {label}, raised {last_line(error)}"

    return None


def is_null(truth: Any) -> bool:
    return truth is None or (isinstance(truth, float) and math.isnan(truth))


def reads_truth(function: Callable[..., Any]) -> bool:
    """Return whether the code of a function uses its argument `ground_truth`.

    The result is True if that cannot be determined.
    """
    code = getattr(function, "__code__", None)
    if code is None or "ground_truth" not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return True  # one of its keyword arguments
    # One instruction may load two variables; its value is then a tuple of names.
    loaded = (each.argval for each in dis.get_instructions(code) if "LOAD" in each.opname)

    return "ground_truth" in code.co_cellvars or any(
        "ground_truth" in (value if isinstance(value, tuple) else [value]) for value in loaded
    )


def try_truths(scorer: RewardScorer, rows: Sequence[TruthRow], limit_s: float | None = None) -> list[Trial]:
    """Score the ground truth of each row as a response, and an empty response.

    Args:
        limit_s: For all rows together, so that slow or hanging functions are tried on some rows only. None:
            no limit.

    Returns:
        A trial for each row, in order. Fewer, but at least one, if `limit_s` seconds have passed or the first
        row does not finish.
    """
    end_s = None if limit_s is None else time.monotonic() + limit_s
    trials: list[Trial] = []

    # Try one row first, so that a hanging function is noticed before all rows are queued.
    for part in (rows[:1], rows[1:]):
        requests = [row.request() for row in part]
        begun: list[tuple[Future[Any], Future[Any]]] = [
            (scorer.run(as_response, each), scorer.run(score, each)) for each in requests
        ]
        for row, futures in zip(part, begun, strict=True):
            if (
                trials
                and end_s is not None
                and wait(futures, timeout=max(0.0, end_s - time.monotonic())).not_done
            ):
                return trials
            response, empty = (_result_of(future, scorer) for future in futures)
            if isinstance(response, Outcome):
                is_late = isinstance(futures[0].exception(), TimeoutError)
                response = Response(outcome=response, is_late=is_late)
            trials.append(Trial(row, response, empty))
        if end_s is not None and any(future.exception() for futures in begun for future in futures):
            break

    return trials


def _result_of(future: Future[Any], scorer: RewardScorer) -> Any:
    """Return the result of a call in a reward process, or an outcome that names why it did not finish."""
    try:
        return future.result()
    except (TimeoutError, ProcessExpired) as error:
        return Outcome(0.0, {}, scorer.failure(error))


def refused(trials: Iterable[Trial]) -> dict[str, list[str]]:
    """Return the reasons why ground truths are refused, by file: a line for each row.

    Scoring failures are not included.
    """
    lines: dict[str, list[str]] = {}
    for trial in trials:
        if (refusal := _refusal_of(trial)) is not None:
            lines.setdefault(trial.row.file, []).append(_line(trial, refusal))

    return lines


def _refusal_of(trial: Trial) -> str | None:
    """Return why no response can match the ground truth of a trial, or None if one may."""
    response = trial.response
    if response.form_of is None or trial.gain is None or trial.gain > 0:
        return response.refusal
    assert response.outcome is not None
    return (
        f"as the response {short(response.text)} it scores {response.outcome.parts[response.form_of]:g}, no "
        f"better than an empty one, so no response can be right"
    )


def problem_with(trial: Trial, full_marks: float) -> str | None:
    """Return a line about a problem with a ground truth, or None.

    The ground truth does not get the full score as a response, or its empty response scores above 0.

    A ground truth from which no response can be derived must only be readable.
    """
    problem = _refusal_of(trial) or trial.error or trial.empty.error
    outcome = trial.response.outcome
    if problem is None and trial.empty.score > 0:
        problem = f"an empty response scores {trial.empty.score:g}"
    elif problem is None and outcome is not None and outcome.score < full_marks:
        problem = f"as a response it scores {outcome.score:g}"

    return None if problem is None else _line(trial, problem)


def _line(trial: Trial, problem: str) -> str:
    return f"row {trial.row.number}: the ground truth {short(trial.row.ground_truth)}: {problem}"


def worthless(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials in which the text of the ground truth scores no better than an empty response."""
    return [
        trial
        for trial in trials
        if trial.response.form_of is None and trial.gain is not None and trial.gain <= 0
    ]


def keys_by_source(trials: Iterable[Trial]) -> dict[str, RewardKeys]:
    """Return the keys that the functions returned in addition to the score, by data source."""
    found: dict[str, RewardKeys] = {}
    for trial in trials:
        for outcome in (trial.response.outcome, trial.empty):
            if outcome is not None and outcome.error is None:
                before = found.get(trial.row.data_source, RewardKeys())
                found[trial.row.data_source] = RewardKeys(
                    before.has_answer or any(outcome.has_answer), before.numbers | frozenset(outcome.numbers)
                )

    return found


def mixed_answers(trials: Iterable[Trial]) -> dict[str, tuple[str, str]]:
    """Return the data sources for which functions return the key "answer" for only some samples.

    Each is returned with a sample that has it and one that does not.
    """
    seen: dict[str, dict[tuple[bool | None, ...], str]] = {}
    for trial in trials:
        for outcome, what in ((trial.response.outcome, "ground truth"), (trial.empty, "empty response")):
            if outcome is not None and outcome.error is None and None not in outcome.has_answer:
                place = f"the {what} of {trial.row.file}, row {trial.row.number}"
                seen.setdefault(trial.row.data_source, {}).setdefault(outcome.has_answer, place)

    mixed: dict[str, tuple[str, str]] = {}
    for source, places in seen.items():
        if len(places) > 1:
            # Order by the number of functions that returned an answer, ascending.
            by_number = sorted(places, key=lambda has: sum(map(bool, has)))
            mixed[source] = places[by_number[-1]], places[by_number[0]]

    return mixed


def listed(lines: Sequence[str]) -> str:
    """Return the first lines, and the number of further ones."""
    more = f"; and {len(lines) - NUM_SHOWN:,} more" if len(lines) > NUM_SHOWN else ""
    return "; ".join(lines[:NUM_SHOWN]) + more


def in_files(lines: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{file}: {listed(of_file)}" for file, of_file in lines.items())


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
