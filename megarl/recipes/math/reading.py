"""Parses an answer as a mathematical object.

It is a formula, a list, a set, a tuple, intervals, an equation or words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megarl.recipes.math.answers import (
    EMPTY,
    Answer,
    Equation,
    Formula,
    Interval,
    Items,
    Union,
    Unread,
    Words,
)
from megarl.recipes.math.decimals import UnreadableError
from megarl.recipes.math.expression import Expression, parse
from megarl.recipes.math.numbers import NoNumberError
from megarl.recipes.math.plain_latex import plain_latex
from megarl.recipes.math.units import APPROXIMATELY, readings_of_units

_NOTHING = re.compile(
    r"(?:there (?:is|are|exists?) )?(?:none|no(?: such)?(?: "
    r"(?:real|integer|positive|rational|valid|possible))*"
    r" (?:solutions?|roots?|values?|numbers?|integers?|answers?)(?: (?:exists?|in (?:the )?reals?))?)"
    r"|(?:the )?empty set|\\emptyset|\\\{ *\\\}|\{ *\}"
)
_SAME_WORDS = {
    "dne": "does not exist",
    "doesn't exist": "does not exist",
    "infinite": "infinitely many",
    "infinitely many solutions": "infinitely many",
}
_INTRODUCTION = re.compile(
    r"^(?:[A-Za-z',]+ )*?(?:is|are|equals|to be)(?: (?:approximately|about|exactly|equal to|simply))? *:? "
    r"*(?=\S)|^[A-Za-z ]+: *",
    re.IGNORECASE,
)
_RELATIONS = re.compile(
    r"(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\in(?![A-Za-z])|\\approx|<=|>=|!=|<|>|=)"
)
_LESS = {"<": False, "\\le": True, "<=": True}
_MORE = {">": False, "\\ge": True, ">=": True}
_OR = re.compile(r'\s*(?:"\s*,?or\s*"|\bor\b|\\lor|\\vee)\s*')
_AND = re.compile(r'\s*(?:,\s*)?(?:"\s*,?and\s*"|\band\b|\\land|\\wedge|\\&)\s*')
_VARIABLE = re.compile(
    r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'?|[A-Za-z]+(?:_\{?\w+\}?)?'*\s*\([A-Za-z0-9, "
    r"]*\)|\|?[A-Z]{1,3}\|?|\\angle [A-Z]+"
)
_ALL_REALS = re.compile(
    r"(?:x \\in )?\\mathbb\{R\}|all real(?: number)?s?|(?:the )?set of(?: all)? real numbers|all reals",
    re.IGNORECASE,
)


def read(text: str) -> Answer:
    """Parse an answer. It never raises: an answer that it cannot parse is Unread."""
    try:
        return _read(plain_latex(text))
    except RecursionError:
        return Unread(text)


def _read(text: str) -> Answer:
    # First check fixed phrases: no solution, all real numbers.
    words = _as_words(text)
    if _NOTHING.fullmatch(words.lower()):
        return EMPTY
    if _ALL_REALS.fullmatch(words):
        return Union((Interval(None, None, False, False),))
    if "\\forall" in text or "\\exists" in text:
        return Words(re.sub(r"\s+", "", text))  # a quantifier changes the meaning of its formula

    # Parse from the loosest binding to the tightest: lists, relations, brackets, a single formula.
    for parsed in (_several(text), _relation(text), _brackets(text), _formula(text)):
        if parsed is not None:
            return parsed

    # Remove introductions such as "the answer is", and parse the rest.
    shorter = APPROXIMATELY.sub("", _INTRODUCTION.sub("", words)) if " " in words else words
    if shorter != words and re.search(r"[\d\\]", shorter):
        return _read(plain_latex(shorter))

    if re.fullmatch(r"[A-Za-z][A-Za-z ,.'()-]*", words):
        lower = words.lower().strip(" .")
        return Words(_SAME_WORDS.get(lower, lower))

    return Unread(text)


def _as_words(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace('"', " ")).strip()


# ---- lists, sets, tuples and intervals


def split(text: str, separator: str = ",") -> list[str]:
    """Split text at commas outside brackets and outside numbers such as 1,000."""
    parts = []
    depth = 0
    start = 0
    # Commas within a number such as 1,000 are not separators.
    thousands = (
        {
            at
            for found in re.finditer(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", text)
            for at in range(*found.span())
        }
        if separator == ","
        else set()
    )

    for at, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and at not in thousands and text.startswith(separator, at):
            parts.append(text[start:at])
            start = at + len(separator)

    return [*parts, text[start:]]


def _several(text: str) -> Answer | None:
    """Parse several answers joined by commas, "and", "or", a union sign or plus-minus."""
    if "\\cup" in text:
        unions = [as_union(_read(part.strip())) for part in text.split("\\cup")]
        if all(union is not None for union in unions):
            return Union(tuple(each for union in unions if union is not None for each in union.parts))
        return None

    for pattern in (_OR, _AND):
        joined = pattern.split(text)
        if len(joined) > 1 and all(joined):
            return _joined(
                [_read(part) for each in joined for part in split(each) if part.strip()], pattern is _OR
            )

    parts = split(text)
    if len(parts) > 1 and all(part.strip() for part in parts):
        return _joined([_read(part.strip()) for part in parts], False)

    # In brackets, these signs belong to one answer, such as a tuple.
    if len(split(text, ";")) > 1 and text[:1] not in "([":
        return _joined([_read(part.strip()) for part in split(text, ";")], False)
    if text.count("\\pm") == 1 and "=" not in text and text[:1] not in "([":
        return Items("list", tuple(_read(text.replace("\\pm", sign)) for sign in ("+", "-")))

    return None


def _joined(answers: Sequence[Answer], is_or: bool) -> Answer | None:
    unions = [as_union(answer) if isinstance(answer, Union) else None for answer in answers]
    if all(union is not None for union in unions):
        if is_or:
            return Union(tuple(part for union in unions if union for part in union.parts))
        return _intersection([part for union in unions if union for part in union.parts])

    items: list[Answer] = []
    for answer in answers:
        items += answer.items if _is_list(answer) else (answer,)  # pyrefly: ignore[missing-attribute]

    return Items("list", tuple(items))


def _is_list(answer: Answer) -> bool:
    return isinstance(answer, Items) and answer.kind == "list"


def _intersection(parts: Sequence[Interval]) -> Union | None:
    # One part is bounded below and the other above, as in 1 < x and x < 3.
    if len(parts) == 2 and {part.low is None for part in parts} == {part.high is None for part in parts} == {
        True,
        False,
    }:
        below, above = sorted(parts, key=lambda part: part.low is None)
        return Union((Interval(below.low, above.high, below.has_low, above.has_high),))
    return None


def _brackets(text: str) -> Answer | None:
    opening = "\\{" if text.startswith("\\{") else text[:1]
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    if opening not in ("(", "[", "{", "\\{") or closing not in (")", "]", "}", "\\}"):
        return None
    inner = text[len(opening) : len(text) - len(closing)]
    is_set = opening.endswith("{") and closing.endswith("}")
    # In a tuple such as (1,000) a comma is a separator, although it looks like a thousands separator.
    parts = re.sub(r"(?<=\d),(?=\d)", ", ", inner) if not is_set else inner
    items = split(parts)
    if not is_set and len(items) == 1 and ";" in inner:
        items = split(inner, ";")
    if _unbalanced(inner) or (len(items) == 1 and not (is_set and opening == "\\{")):
        return None
    builder = re.fullmatch(r"\s*\w+\s*(?:\\in\s*\\mathbb\{R\})?\s*[|:](.*)", inner) if is_set else None
    if builder:
        return _relation(builder.group(1).strip())

    if is_set:
        elements: list[Answer] = []
        for part in items:
            element = _read(part.strip())
            elements += element.items if isinstance(element, Items) and _is_list(element) else (element,)
        return Items("set", tuple(elements))

    # Half-open brackets or an infinite end indicate an interval; (1, 2) may be a point.
    if len(items) == 2 and (opening + closing not in ("()", "[]") or "\\infty" in inner):
        low, high = (_end(item) for item in items)
        if low is not None and high is not None:
            return Union(
                (
                    Interval(
                        low[0],
                        high[0],
                        opening == "[" and low[0] is not None,
                        closing == "]" and high[0] is not None,
                    ),
                )
            )

    return Items(opening + closing, tuple(_read(part.strip()) for part in items))


def _unbalanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return True
    return depth != 0


def _end(text: str) -> tuple[Expression | None] | None:
    """Return one end of an interval, in a tuple with None for infinity; None if it is not a number."""
    text = text.strip()
    if re.fullmatch(r"[+-]?\s*(?:\\infty|oo|inf|infinity)", text):
        return (None,)
    formula = _formula(text)
    return (formula.expression,) if isinstance(formula, Formula) and not formula.unit else None


def as_union(answer: Answer) -> Union | None:
    match answer:
        case Union():
            return answer
        case Items(kind="()" | "[]" as kind, items=(Formula(low), Formula(high))):
            return Union((Interval(low, high, kind[0] == "[", kind[1] == "]"),))
        case Items(kind="set", items=items) if all(isinstance(item, Formula) for item in items):
            return Union(
                tuple(
                    Interval(item.expression, item.expression, True, True)
                    for item in items
                    if isinstance(item, Formula)
                )
            )
    return None


# ---- equations and inequalities


def _relation(text: str) -> Answer | None:
    parts = _RELATIONS.split(text)
    if len(parts) == 1 or _unbalanced(parts[0]) or text.startswith("\\{"):
        return None
    sides = [part.strip() for part in parts[::2]]
    signs = parts[1::2]
    # An answer such as `= 5` has no left side.
    if not sides[0] and signs[0] in ("=", "\\approx") and len(sides) == 2:
        return _read(sides[1])
    if not all(sides):
        return None

    # Parse equations; `x = a \pm b` is a list of two values.
    if set(signs) <= {"=", "\\approx"}:
        if signs == ["="] and sides[1].count("\\pm") == 1 and _VARIABLE.fullmatch(sides[0]):
            return _several(sides[1])
        return Equation(tuple(_side(side) for side in sides))

    if signs == ["\\in"] and _VARIABLE.fullmatch(sides[0]):
        inner = _read(sides[1])
        return inner if isinstance(inner, Items) and inner.kind == "set" else as_union(inner) or inner

    return _inequality(sides, signs)


def _side(text: str) -> Answer:
    return Words(re.sub(r"\s+", "", text)) if _VARIABLE.fullmatch(text) and "(" in text else _read(text)


def _inequality(sides: Sequence[str], signs: Sequence[str]) -> Answer | None:
    """Parse inequalities between one variable and numbers."""
    ends = [
        None if _VARIABLE.fullmatch(side) and side not in ("\\infty", "\\pi", "e") else _end(side)
        for side in sides
    ]
    if sum(end is None for end in ends) != 1:
        return None

    if len(sides) == 2:
        at = ends.index(None)
        value = ends[1 - at]
        assert value is not None
        if signs[0] in ("\\ne", "!="):
            return Union((Interval(None, value[0], False, False), Interval(value[0], None, False, False)))
        is_below = signs[0] in _LESS
        if not is_below and signs[0] not in _MORE:
            return None
        includes = (_LESS | _MORE)[signs[0]]
        # `x < 3` and `3 > x` both bound the variable from above.
        upper = is_below == (at == 0)
        return Union(
            (
                Interval(None, value[0], False, includes)
                if upper
                else Interval(value[0], None, includes, False),
            )
        )

    if len(sides) == 3 and ends[1] is None:
        left = ends[0]
        right = ends[2]
        assert left is not None
        assert right is not None
        # A chain such as `1 < x \le 3` is an interval.
        if all(sign in _LESS for sign in signs):
            return Union(
                (
                    Interval(
                        left[0],
                        right[0],
                        _LESS[signs[0]] and left[0] is not None,
                        _LESS[signs[1]] and right[0] is not None,
                    ),
                )
            )
        if all(sign in _MORE for sign in signs):
            return Union(
                (
                    Interval(
                        right[0],
                        left[0],
                        _MORE[signs[1]] and right[0] is not None,
                        _MORE[signs[0]] and left[0] is not None,
                    ),
                )
            )

    return None


# ---- formulas and their units


def _formula(text: str) -> Formula | None:
    for without, unit in readings_of_units(text):
        try:
            expression = parse(without)
        except (UnreadableError, NoNumberError):
            continue
        if unit == "%":
            return Formula(expression._replace(percent=True))
        if unit and expression.names:
            continue
        return Formula(expression, unit)
    return None
