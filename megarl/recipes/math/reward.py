"""Scores a mathematical answer: 1 if it equals the ground truth, otherwise 0.

    reward:
      functions: [{path: reward.py}]

The answer is in the last \\boxed{}; see `final_answer` for responses without one. Exact numbers are compared
exactly; a decimal equals any number that agrees with all of its digits, at least six (`0.333333` and `1/3`).
Formulas are compared by their values at several points, and lists, sets, tuples, intervals, inequalities and
equations by their parts. Math-Verify compares everything else, such as matrices and integrals. A comparison
takes at most two seconds of CPU time. It requires `pip install math-verify` (in requirements/gpu.txt).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from megarl.machine.strict_json import refuse_unencodable
from megarl.recipes.math.equality import normal_form, parsed, same, within_limit
from megarl.recipes.math.reading import Answer, readings, unread_parts
from megarl.rewards.thinking import outside_thinking

_LONGEST = 2000  # maximum characters of an answer, or of a line without a box, that is parsed
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOSEN = re.compile(
    r"(?:(?:(?:[Tt]he )?(?:[Cc]orrect )?[Aa]nswer(?: is|:| is:)|[Oo]ption|[Cc]hoice) )?"
    r'[("\s]*([A-J])(?:[")\s]*$|[").:]+(?=[\s\d\\"(-])(?P<option>.*))',
    re.DOTALL,
)
# A second letter after the chosen one, such as "(B)" or "or B".
_ALSO_CHOSEN = re.compile(
    r"\([A-J]\)|(?<![\w\\])[A-J][).:](?!\w)|(?:\bor\b|\band\b|[,;/])\W*[A-J]\W*$|^\W*[A-J]\W*$"
)
_LETTERS = re.compile(r"[A-H](?:(?:\s|,|;|\band\b)*[A-H])+")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score a response by its final answer.

    Returns:
        score: 1.0 or 0.0.
        answer: The final answer in a normal form, which is the same for equal answers; None if the response
            has none.

    Raises:
        ValueError: The ground truth is not text or a finite number, or it is empty or unreadable.
    """
    text, truths = _truth(ground_truth)
    given = final_answer(solution_str)
    if given is None:
        return {"score": 0.0, "answer": None}
    # Long texts are not parsed, because that could take too long.
    if len(given) > _LONGEST:
        return {"score": float(given == text), "answer": given[:_LONGEST]}
    choice = _chosen(_unwrapped(text), _unwrapped(given))
    if choice is not None:
        return {"score": float(choice[0] == choice[1]), "answer": choice[1]}

    def judged() -> tuple[bool, str]:
        answers = readings(given)
        pairs = itertools.product(truths, answers)
        meant = next((answer for truth, answer in pairs if same(truth, answer)), None)
        return meant is not None, normal_form(meant or answers[0])

    is_right, normal = within_limit(judged) or (False, given)
    return {"score": float(is_right), "answer": normal[:_LONGEST]}


def answer_from_truth(ground_truth: Any) -> str | None:
    """Return a response whose final answer is the ground truth."""
    return f"\\boxed{{{ground_truth}}}"


def check_truth(ground_truth: Any) -> None:
    """Raise ValueError for a ground truth that no response can match.

    Such a value is not text or a finite number, is empty, or cannot be parsed.
    """
    refuse_unencodable(ground_truth, "the ground truth")
    _truth(ground_truth)


@functools.lru_cache(maxsize=1024)
def _read_truth(text: str) -> tuple[Answer, ...]:
    boxed = final_answer(text) if "\\boxed" in text else None
    truths = readings(boxed or text)
    unread = unread_parts(truths[0])

    if (
        not text.strip()
        or text.strip().lower() in ("nan", "null")
        or any(not within_limit(functools.partial(parsed, part.latex)) for part in unread)
    ):
        raise ValueError(
            f"the ground truth {text[:100]!r} is not a mathematical expression; write only the answer, such "
            f"as '18' or '\\frac{{1}}{{2}}'"
        )

    return truths


def _truth(ground_truth: Any) -> tuple[str, tuple[Answer, ...]]:
    is_number = (
        isinstance(ground_truth, int | float)
        and not isinstance(ground_truth, bool)
        and math.isfinite(ground_truth)
    )
    if not is_number and not isinstance(ground_truth, str):
        raise ValueError(
            f"the ground truth {str(ground_truth)[:60]!r} is a {type(ground_truth).__name__}, expected text "
            "or a finite number; write the answer as text, such as '18'"
        )

    text = str(ground_truth).strip()
    return text, _read_truth(text)


def _chosen(truth: str, given: str) -> tuple[str, str] | None:
    """Return the letters of multiple choice of a truth and an answer; None if they are not letters."""
    # Letters are not variables, and several of them, such as ACD, are not a product.
    if _LETTERS.fullmatch(truth) and _LETTERS.fullmatch(given):
        letters = ["".join(each for each in text if each.isupper()) for text in (truth, given)]
        # Letters in alphabetical order are a choice, and two may be a segment; others may be an order.
        if len(letters[0]) == 2 or list(letters[0]) == sorted(letters[0]):
            letters = ["".join(sorted(each)) for each in letters]
        return letters[0], letters[1]
    choice = _CHOICE.fullmatch(truth)
    chosen = _CHOSEN.fullmatch(given) if choice else None
    if choice is None or chosen is None:
        return None
    # Several letters are no choice, even if the first one is right.
    is_one = _ALSO_CHOSEN.search(chosen.group("option") or "") is None

    return choice.group(1), chosen.group(1) if is_one else given


def _unwrapped(text: str) -> str:
    """Return the text without the commands around it."""
    return (
        re.sub(r"\\(?:text|textbf|mathrm|mathbf|boxed|textrm|mbox)\s*\{([^{}]*)\}", r"\1", text)
        .strip()
        .strip("*$.\\ ")
    )


# ---- the final answer of a response


_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=[{\dA-Za-z\\-])")
_SAYS_SO = re.compile(r"(?:answer|result)\s*(?:is|are|=|:)\s*:?|####", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\\d])\$([^$\n]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_QUANTITY = (
    r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:\s*/\s*\d+|\s\d+/\d+|[eE][+-]?\d+)?(?:\s*\\?%)?"
)
_QUANTITIES = re.compile(
    rf"(?<![\w.,]){_QUANTITY}|(?<=[$€£]){_QUANTITY}|\\frac\s*\{{[^{{}}]*\}}\{{[^{{}}]*\}}"
)
_SEPARATORS = re.compile(r"\s*(?:,|,?\s*\bor\b|,?\s*\band\b)\s*")


def final_answer(response: str) -> str | None:
    """Return the answer of a response as LaTeX or plain text; None if it has none.

    Text before `</think>` is ignored. The last box is the answer; a box that is truncated at the end of the
    response is not valid. Without a box, the answer follows the last "answer is" or "####", or is in the last
    line: its last formula, or its only number. Several numbers that are not a list are not an answer, because
    one of them could be correct by chance.
    """
    response = outside_thinking(response)
    boxes = list(_BOX.finditer(response))
    if boxes:
        return _content(response, boxes[-1].end())
    said = list(_SAYS_SO.finditer(response))
    if not said:
        return _without_box(response.strip().rpartition("\n")[2][-_LONGEST:])
    line = response[said[-1].end() :].strip().partition("\n")[0][:_LONGEST]

    return line.strip(" .*") if re.search(r"=.*\b(?:or|and)\b.*=", line) else _without_box(line)


def _content(text: str, start: int) -> str | None:
    """Return the text between the brace at `start` and its closing brace.

    Without a brace, it is the next character or number.
    """
    if text[start] != "{":
        unbraced = re.match(r"-?\d+(?:\.\d+)?|\\?[A-Za-z]+|\\", text[start:])
        return unbraced.group() if unbraced else None

    # Escaped braces are characters of the formula, not its structure.
    braces = list(re.finditer(r"(?s)\\.|[{}]", text[start:]))
    depths = itertools.accumulate((found[0] == "{") - (found[0] == "}") for found in braces)
    ends = [found.start() for found, depth in zip(braces, depths, strict=True) if depth == 0]
    return text[start + 1 : start + ends[0]].strip() or None if ends else None


def _without_box(line: str) -> str | None:
    formulas = list(_FORMULA.finditer(line))
    if formulas:
        parts = [next(filter(None, formula.groups())) for formula in formulas]
        return ", ".join(parts) if _is_list(line, formulas) else parts[-1]

    # The result follows the last equals sign.
    equal = line.rpartition("=")[2]
    numbers = list(_QUANTITIES.finditer(equal))
    if not numbers:
        return line.strip().rstrip(".") or None
    if _is_list(equal, numbers) or len(numbers) == 1 and _stands_alone(equal, numbers[0]):
        return ", ".join(number.group() for number in numbers)
    # A calculation, such as 2 + 3.
    is_calculation = re.fullmatch(r"(?!.*[A-Za-z]{3})(?=.*[+*/^-])[\d\s.+*/^()!=\\{}A-Za-z-]*", equal)
    return equal.strip(" .*") if is_calculation or len(numbers) == 1 else None


def _is_list(text: str, found: Sequence[re.Match[str]]) -> bool:
    """Whether several formulas or numbers are separated only by commas, "and" or "or"."""
    between = [text[left.end() : right.start()] for left, right in zip(found, found[1:], strict=False)]
    return bool(between) and all(_SEPARATORS.fullmatch(each) for each in between)


def _stands_alone(text: str, number: re.Match[str]) -> bool:
    """Whether a number is not part of a formula, such as 2 in "2x+" or "2^n"."""
    before = text[: number.start()].strip()
    after = text[number.end() :].strip(" .*")
    return not re.match(r"[\\(^+*/!_-]", after) and not re.search(r"[\d\\)(^+*/_-]$", before)
