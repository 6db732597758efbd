"""Chooses the reward that `megarl init` writes by the answers in the data, and tries it on them first."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from megarl.config.schema import DataConfig, RewardConfig, RewardFunctionConfig
from megarl.data.prompts import GROUND_TRUTH, read_reward_inputs, read_reward_rows
from megarl.doctor.reward_functions import choose_truths, try_reward
from megarl.rewards.truths import TruthRow, in_files, is_null, problem_with, short

STARTER = Path(__file__).resolve().parents[2] / "recipes" / "starter"
_PASS_SHARE = 0.9  # minimum fraction of answers that a fitting reward passes
_CHOICES_LINE = 'CHOICES = ["A", "B", "C", "D"]\n'

LOOKS_SHARE = 0.8  # minimum fraction of answers that look like one kind
_MOST_CHOICES = 10
_ROWS_PER_CHOICE = 4
# Lengths in characters.
_LONGEST_CHOICE = 40
_LONGEST_TEXT = 100
_LETTER = re.compile(r"[A-J]", re.IGNORECASE)
_NUMBER = re.compile(r"-?[$€£]?-?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+)(?:[eE][+-]?\d+)?\s*%?")
_DATE_OR_TIME = re.compile(r"\d+[-/.]\d+[-/.]\d+|\d:\d\d")
_MATH_WORDS = re.compile(
    r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+|\b(?:sin|cos|tan|log|ln|exp|sqrt|and|or)\b"
)
_TESTS = re.compile(r"\bassert\b.*\(|\"(?:stdin|call)\"\s*:")
_PROGRAM = re.compile(r"^\s*(?:(?:def|class) .*:|(?:from|import) [\w.]+.*|#include\b.*)\s*$", re.MULTILINE)

_WITHOUT_ANSWERS = (
    "reward: yours, because the rows have no answers (data.columns.reward_model=null): write "
    "compute_score in reward.py, which raises NotImplementedError for now, or let a reward model score "
    "responses (below); `--kind judge` writes the files of a run with a judge"
)


class RewardKind(NamedTuple):
    """A reward in `megarl/recipes/starter`.

    Attributes:
        answers: The kind of answers that it scores.
        rule: What it compares.
        prompt: A system prompt that asks for such answers.
    """

    name: str
    answers: str
    rule: str
    prompt: str

    def source(self) -> str:
        return (STARTER / f"{self.name}_reward.py").read_text(encoding="utf-8")


NUMBER = RewardKind(
    "number", "numbers", "the last number of a response is compared with the answer", "Answer with a number."
)
MATH = RewardKind(
    "math",
    "mathematical expressions",
    "the last \\boxed{} of a response is compared with the answer by its value",
    "Put the final answer into \\boxed{}.",
)
CHOICE = RewardKind(
    "choice",
    "choices",
    "the choice that a response names is compared with the answer",
    "Answer with your choice alone.",
)
TEXT = RewardKind(
    "text",
    "free texts",
    'what follows "the answer is" in a response, otherwise the whole response, must equal the answer, '
    "except for case, spaces and the punctuation around it",
    "End with the answer alone, after the words the answer is.",
)
CODE = RewardKind(
    "code",
    "tests of programs",
    "the score is the share of the tests that the program of a response passes in a sandbox",
    "Write a Python program in a Markdown code block.",
)
OWN = RewardKind("own", "", "", "Answer the question.")


class ChosenReward(NamedTuple):
    """The reward of a run.

    Attributes:
        source: The text of its file.
        prompt: The system prompt that goes with it.
        lines: The lines that `megarl init` prints about it.
    """

    source: str
    prompt: str
    lines: Sequence[str]


class _Proof(NamedTuple):
    """A reward that was tried on answers.

    Attributes:
        problems: By file, a line for each answer without the full score, or whose empty response has a score
            above 0.
        has_responses: Whether correct responses can be derived from the answers, unlike from tests of
            programs.
    """

    kind: RewardKind
    source: str
    num_tried: int
    problems: Mapping[str, Sequence[str]]
    has_responses: bool

    @property
    def num_failed(self) -> int:
        return sum(map(len, self.problems.values()))

    @property
    def pass_share(self) -> float:
        return 1 - self.num_failed / self.num_tried


def choose_reward(data: DataConfig) -> ChosenReward:
    """Choose a reward by the form of the ground truths in the data, and score the ground truths with it.

    The first reward that all of them pass is chosen. Otherwise it is the one that most of them pass, if at
    least 9 of 10 do. Free text, which nearly everything passes, comes last.

    Raises:
        ValueError: The answers are mathematical expressions, and Math-Verify is not installed.
    """
    if data.columns.reward_model is None and data.columns.ground_truth is None:
        return ChosenReward(OWN.source(), OWN.prompt, [_WITHOUT_ANSWERS])
    rows, _ = choose_truths(data)
    answers = [row.ground_truth for row in rows if not is_null(row.ground_truth)]
    proofs: list[_Proof] = []

    if choices := find_choices(data):
        written = CHOICE.source().replace(
            _CHOICES_LINE, f"CHOICES = {json.dumps(choices, ensure_ascii=False)}\n"
        )
        proofs.append(_prove(CHOICE, written, rows))

    is_plain = all(looks_like_number(answer) or not looks_mathematical(answer) for answer in answers)
    # Classifying the answers is cheap and avoids most trials of rewards.
    for kind, looks_like in (
        (CODE, looks_like_tests),
        (NUMBER, looks_like_number),
        (MATH, looks_mathematical),
    ):
        best_share = max((proof.pass_share for proof in proofs), default=0.0)
        if best_share == 1 or share(looks_like, answers) < LOOKS_SHARE:
            continue
        if kind is MATH and best_share >= _PASS_SHARE and (is_plain or not _has_math_verify()):
            continue  # The answers that the other reward does not pass, such as "N/A", are not mathematics.
        if kind is MATH and not _has_math_verify():
            raise ValueError(
                f"the answers, such as {short(answers[0])}, are mathematical expressions, whose reward "
                f"requires Math-Verify: pip install math-verify, then run this command again"
            )
        proofs.append(_prove(kind, kind.source(), rows))

    best = max(proofs, key=lambda proof: proof.pass_share, default=None)
    if best is not None and best.pass_share >= _PASS_SHARE:
        return _chosen(best)

    # Tests are never compared as text, however many of them fail.
    if best is not None and best.kind is CODE:
        return _unknown(
            f"they look like tests of programs, but most cannot be executed: {in_files(best.problems)}"
        )

    if (reason := why_not_text(answers)) is not None:
        return _unknown(reason)
    as_text = _prove(TEXT, TEXT.source(), rows)
    if as_text.pass_share >= _PASS_SHARE:
        return _chosen(as_text)

    return _unknown(f"too many do not match their own text: {in_files(as_text.problems)}")


def _has_math_verify() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def _prove(kind: RewardKind, source: str, rows: Sequence[TruthRow]) -> _Proof:
    """Score the ground truths of the rows and empty responses with a reward from a temporary file."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "reward.py"
        file.write_text(source, encoding="utf-8")
        trials = try_reward(
            RewardConfig(functions=[RewardFunctionConfig(path=str(file))], num_processes=2), rows
        )

    # Collect by file why ground truths do not have the full score.
    problems: dict[str, list[str]] = {}
    for trial in trials:
        if (problem := problem_with(trial, full_marks=1.0)) is not None:
            problems.setdefault(trial.row.file, []).append(problem)

    return _Proof(
        kind, source, len(trials), problems, any(trial.response.text is not None for trial in trials)
    )


def _chosen(proof: _Proof) -> ChosenReward:
    num_passed = proof.num_tried - proof.num_failed
    what = "score 1 as a response" if proof.has_responses else "are executable tests"
    lines = [
        f"reward: the answers are {proof.kind.answers}, so {proof.kind.rule}",
        f"tested: {num_passed:,} of {proof.num_tried:,} answers {what}, empty responses score 0",
    ]

    if proof.problems:
        lines.append(
            f"warning: {proof.num_failed:,} of the answers fail, and `megarl check` refuses such rows: "
            f"{in_files(proof.problems)}. Correct or remove these rows, or change reward.py"
        )

    return ChosenReward(proof.source, proof.kind.prompt, lines)


def _unknown(reason: str) -> ChosenReward:
    lines = [
        f"warning: no reward fits the answers, because {reason}",
        "implement compute_score in reward.py, which raises NotImplementedError for now: it receives a "
        "response and its ground truth, and returns a score, such as 1.0 for a correct response and 0.0 "
        "for a wrong one. If no rule can judge the responses, use a reward model (reward.functions=[] "
        "reward.model.path=FOLDER); see docs/rewards.md",
    ]
    return ChosenReward(OWN.source(), OWN.prompt, lines)


def share(looks_like: Callable[[Any], bool], answers: Sequence[Any]) -> float:
    return sum(map(looks_like, answers)) / max(len(answers), 1)


def looks_like_number(answer: Any) -> bool:
    if isinstance(answer, int | float):
        return not isinstance(answer, bool)
    return isinstance(answer, str) and _NUMBER.fullmatch(answer.rpartition("####")[2].strip()) is not None


def looks_mathematical(answer: Any) -> bool:
    if looks_like_number(answer):
        return True
    if not isinstance(answer, str):
        return False
    answer = answer.rpartition("####")[2]
    if "\\boxed" in answer:
        return True
    # LaTeX commands and function names are allowed; any other word makes it prose.
    return (
        re.search(r"[A-Za-z]{3,}", _MATH_WORDS.sub(" ", answer)) is None
        and not _DATE_OR_TIME.search(answer)
        and re.search(r"[\d\\^=]|^\W*[A-Za-z]\W*$", answer) is not None
    )


def looks_like_tests(answer: Any) -> bool:
    if isinstance(answer, list):
        return bool(answer) and all(
            isinstance(test, dict) or (isinstance(test, str) and "assert" in test) for test in answer
        )
    return isinstance(answer, str) and _TESTS.search(answer) is not None


def find_choices(data: DataConfig) -> list[str]:
    """Return the distinct answers if there are only a few in many rows; otherwise an empty list."""
    labels: dict[str, str] = {}
    num_rows = 0

    # A long answer or too many labels rule out choices, so the remaining rows need not be read.
    for row in read_reward_rows([*data.train_files, *data.val_files], data.columns):
        answer = read_reward_inputs(row, data.columns).reward_model[GROUND_TRUTH]
        if is_null(answer):
            continue
        label = answer.strip(" ().") if isinstance(answer, str) else str(answer)
        labels.setdefault(label.casefold(), label)
        num_rows += 1
        if (
            not isinstance(answer, str | bool)
            or not 0 < len(label) <= _LONGEST_CHOICE
            or len(labels) > _MOST_CHOICES
        ):
            return []

    # Letters are choices in a file of any length, and a letter that no row has may be a choice too.
    if labels and all(_LETTER.fullmatch(label) for label in labels.values()):
        last = max(label.upper() for label in labels.values())
        return [chr(code) for code in range(ord("A"), max(ord(last), ord("B")) + 1)]

    if (
        len(labels) < 2
        or num_rows < _ROWS_PER_CHOICE * len(labels)
        or all(map(looks_like_number, labels.values()))
    ):
        return []

    return sorted(labels.values())


def why_not_text(answers: Sequence[Any]) -> str | None:
    """Explain why responses cannot be compared with these answers as text; None if they can."""
    if not answers:
        return "all of them are null"
    if share(lambda answer: isinstance(answer, list | dict), answers) >= LOOKS_SHARE:
        return f"they are lists or mappings, such as {short(answers[0])}"

    if (
        share(lambda answer: isinstance(answer, str) and _PROGRAM.search(answer) is not None, answers)
        >= LOOKS_SHARE
    ):
        return (
            "they are programs, and many programs solve the same task; give tests in a column `tests`, "
            "as docs/rewards.md describes"
        )

    # Models do not repeat long texts word for word.
    length = int(median(len(str(answer)) for answer in answers))
    if length > _LONGEST_TEXT:
        return f"they are texts of {length:,} characters (the median), which no response will repeat"
    return None
