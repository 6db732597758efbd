"""Extracts the final answer of a response from its last box, or from its last line if there is no box."""

from __future__ import annotations

import re

from megarl.rewards.thinking import outside_thinking

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=[{\dA-Za-z\\-])")
_SAYS_SO = re.compile(r"(?:answer|result)\s*(?:is|are|=|:)\s*:?|####", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\\d])\$([^$\n]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_QUANTITY = (
    r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:\s*/\s*\d+|\s\d+/\d+|[eE][+-]?\d+)?(?:\s*\\?%)?"
)
_QUANTITIES = re.compile(
    rf"(?<![\w.,]){_QUANTITY}|(?<=[$€£]){_QUANTITY}|\\frac\s*\{{[^{{}}]*\}}\{{[^{{}}]*\}}"
)
_LONGEST_LINE = 2000  # maximum characters that are read of a line without a box
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
        return _without_box(response.strip().rpartition("\n")[2][-_LONGEST_LINE:])
    line = response[said[-1].end() :].strip().partition("\n")[0][:_LONGEST_LINE]

    return line.strip(" .*") if re.search(r"=.*\b(?:or|and)\b.*=", line) else _without_box(line)


def _content(text: str, start: int) -> str | None:
    """Return the text between the brace at `start` and its closing brace.

    Without a brace, it is the next character or number.
    """
    if text[start] != "{":
        unbraced = re.match(r"-?\d+(?:\.\d+)?|\\?[A-Za-z]+|\\", text[start:])
        return unbraced.group() if unbraced else None

    depth = 0
    for end in range(start, len(text)):
        # Escaped braces are characters of the formula, not its structure.
        if text[end] in "{}" and (end == 0 or text[end - 1] != "\\" or text[end - 2 : end] == "\\\\"):
            depth += 1 if text[end] == "{" else -1
            if depth == 0:
                return text[start + 1 : end].strip() or None

    return None


def _without_box(line: str) -> str | None:
    formulas = list(_FORMULA.finditer(line))
    if formulas:
        parts = [next(filter(None, formula.groups())) for formula in formulas]
        between = [
            line[left.end() : right.start()] for left, right in zip(formulas, formulas[1:], strict=False)
        ]
        # Formulas that are separated only by commas or "and" are a list.
        if between and all(_SEPARATORS.fullmatch(each) for each in between):
            return ", ".join(parts)
        return parts[-1]

    # The result follows the last equals sign.
    equal = line.rpartition("=")[2]
    numbers = list(_QUANTITIES.finditer(equal))
    if not numbers:
        return line.strip().rstrip(".") or None
    if len(numbers) == 1:
        return numbers[0].group() if _stands_alone(equal, numbers[0]) else equal.strip(" .*")
    between = [equal[left.end() : right.start()] for left, right in zip(numbers, numbers[1:], strict=False)]
    if all(_SEPARATORS.fullmatch(each) for each in between):
        return ", ".join(number.group() for number in numbers)

    if (
        re.fullmatch(r"[\d\s.+*/^()!=\\{}A-Za-z-]*", equal)
        and re.search(r"[+*/^-]", equal)
        and not re.search(r"[A-Za-z]{3,}", equal)
    ):
        return equal.strip(" .")

    return None


def _stands_alone(text: str, number: re.Match[str]) -> bool:
    """Whether a number is not part of a formula, such as 2 in "2x+" or "2^n"."""
    before = text[: number.start()].strip()
    after = text[number.end() :].strip(" .*")
    if re.match(r"[\\(^+*/!_-]", after):
        return False
    return re.search(r"[\d\\)(^+*/_-]$", before) is None
