"""Parses an answer as a mathematical object.

It is a formula, a list, a set, a tuple, intervals, an equation or inequality, or words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from megarl.recipes.math.answers import (
    EMPTY,
    Answer,
    Formula,
    Interval,
    Items,
    Relation,
    Union,
    Unread,
    Words,
)
from megarl.recipes.math.expression import Expression, is_at_least, parse
from megarl.recipes.math.formulas import is_label, is_name, is_variable, same_value
from megarl.recipes.math.notation import (
    AND,
    APPROXIMATELY,
    OR,
    SCALES,
    is_balanced,
    listed,
    plain_latex,
    readings_of_units,
    sides_of,
    split,
    with_wide_commas,
)
from megarl.recipes.math.numbers import NoNumberError, UnreadableError

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
_LESS = {"<": False, "\\le": True}
_MORE = {">": "<", "\\ge": "\\le"}
_DERIVATIVE = re.compile(
    r"\\frac\s*\{\s*(?:d|\\partial)(?![^{}]*[+-])[^{}]*\}\s*"
    r"\{\s*(?:d|\\partial)\s*(?:[A-Za-z]|\\[a-z]+)\s*(?:\^\s*\{?\d\}?)?\s*\}"
)
_OF_POWER_OF_TEN = re.compile(r"\\log(?=\s*[({]?\s*10+\s*[)}]?(?![\d.^]))")
_DOTS = re.compile(r"\\[lcv]?dots|\.\.\.")
_ALL_REALS = re.compile(
    r"(?:x \\in )?\\mathbb\{R\}|all real(?: number)?s?|(?:the )?set of(?: all)? real numbers|all reals",
    re.IGNORECASE,
)


def readings(text: str) -> tuple[Answer, ...]:
    """Parse an answer, also in its other meaning if it has one.

    `100,200` is a number or a list of two, and the logarithm of a power of ten may have the base 10.

    It never raises: an answer that it cannot parse is Unread.
    """
    plain = plain_latex(text)
    meanings = (plain, with_wide_commas(plain), _OF_POWER_OF_TEN.sub(r"\\log_{10} ", plain))
    try:
        return tuple(_read(each) for each in dict.fromkeys(meanings))
    except RecursionError:
        return (Unread(text),)


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
    for read in (_several, _relation, _brackets, _formula):
        parsed = read(text)
        if parsed is not None:
            return parsed

    # Remove introductions such as "the answer is", and parse the rest.
    shorter = APPROXIMATELY.sub("", _INTRODUCTION.sub("", words)) if " " in words else words
    if shorter != words and re.search(r"[\d\\]", shorter):
        return _read(plain_latex(shorter))

    if is_label(text) or _DERIVATIVE.search(text):
        return Words(re.sub(r"\s+", "", text))
    if _DOTS.fullmatch(text):
        return Words("...")
    if re.fullmatch(r"[A-Za-z][A-Za-z ,.'()!-]*", words):
        lower = re.sub(r"^(?:an?|the) ", "", words.lower().strip(" .!"))
        return Words(_SAME_WORDS.get(lower, lower))

    return Unread(text)


def _as_words(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace('"', " ")).strip()


# ---- lists, sets, tuples and intervals


def _several(text: str) -> Answer | None:
    """Parse several answers joined by commas, "and", "or", a union sign or plus-minus."""
    if "\\cup" in text:
        unions = [as_union(_read(part.strip())) for part in text.split("\\cup")]
        if all(union is not None for union in unions):
            return _union([each for union in unions if union is not None for each in union.parts])
        return None

    # Alternatives of several named values are groups: `x = 1, y = 2 or x = 3, y = 4` are two points.
    alternatives = OR.split(text)
    word = "or"
    if len(alternatives) == 1 and text[:1] not in "([":
        alternatives = split(text, ";")
        word = ","
    if len(alternatives) > 1 and all(part.strip() for part in alternatives):
        groups = [[_read(part.strip()) for part in listed(each)] for each in alternatives]
        if all(len({item.left for item in group if isinstance(item, Relation)}) > 1 for group in groups):
            return Items("list", tuple(Items("list", tuple(group)) for group in groups))
        return _joined([item for group in groups for item in group], word)

    parts = listed(text)
    if len(parts) > 1:
        return _joined([_read(part.strip()) for part in parts], "and" if AND.search(text) else ",")

    # In brackets, a sign belongs to one answer, such as a tuple.
    if text.count("\\pm") == 1 and "=" not in text and text[:1] not in "([":
        return Items("list", tuple(_read(text.replace("\\pm", sign)) for sign in ("+", "-")))

    return None


def _joined(answers: Sequence[Answer], word: str) -> Answer | None:
    unions = [as_union(answer) if isinstance(answer, Union) else None for answer in answers]
    if all(union is not None for union in unions):
        parts = [part for union in unions if union for part in union.parts]
        common = None if word == "or" else _intersection(parts)
        # A comma may mean "or": no number is in `x < 1, x > 3`.
        if word != "and" and (common is None or _is_empty(common)):
            return _union(parts)
        return Union((common,)) if common else None

    items: list[Answer] = []
    for answer in answers:
        items += answer.items if _is_list(answer) else (answer,)  # pyrefly: ignore[missing-attribute]

    return Items("list", tuple(items))


def _union(parts: Sequence[Interval]) -> Union:
    """Return the union of intervals. Two that touch are one: (0,1] and (1,2) are (0,2)."""
    kept: list[Interval] = []
    for part in parts:
        for other in list(kept):
            joined = _touching(other, part) or _touching(part, other)
            if joined is not None:
                kept.remove(other)
                part = joined
        kept.append(part)
    return Union(tuple(kept))


def _touching(first: Interval, second: Interval) -> Interval | None:
    """Return both intervals as one if the second one begins where the first one ends."""
    if first.high is None or second.low is None or not (first.has_high or second.has_low):
        return None
    if not same_value(first.high, second.low):
        return None
    return Interval(first.low, second.high, first.has_low, second.has_high)


def _is_list(answer: Answer) -> bool:
    return isinstance(answer, Items) and answer.kind == "list"


def _intersection(parts: Sequence[Interval]) -> Interval | None:
    # One part is bounded below and the other above, as in 1 < x and x < 3.
    if len(parts) == 2 and {part.low is None for part in parts} == {part.high is None for part in parts} == {
        True,
        False,
    }:
        below, above = sorted(parts, key=lambda part: part.low is None)
        return Interval(below.low, above.high, below.has_low, above.has_high)
    return None


def _is_empty(interval: Interval) -> bool:
    return interval.low is not None and interval.high is not None and is_at_least(interval.low, interval.high)


def _brackets(text: str) -> Answer | None:
    opening = "\\{" if text.startswith("\\{") else text[:1]
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    if opening not in ("(", "[", "{", "\\{") or closing not in (")", "]", "}", "\\}"):
        return None
    inner = text[len(opening) : len(text) - len(closing)]
    is_set = opening.endswith("{") and closing.endswith("}")
    # In a tuple or set such as (1,234) a comma is a separator, unless others separate the items.
    items = split(inner)
    if len(items) == 1:
        items = split(with_wide_commas(inner))
    if not is_set and len(items) == 1 and ";" in inner:
        items = split(inner, ";")
    if not is_balanced(inner) or (len(items) == 1 and not (is_set and opening == "\\{")):
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
        case Items(kind="()" | "[]" as kind, items=(Formula(low), Formula(high))) if not is_at_least(
            low, high
        ):
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
    sides, signs = sides_of(text)
    if not signs or text.startswith("\\{"):
        return None
    # Answers such as `= 5` and `> 5` have no left side.
    if not sides[0] and len(sides) == 2 and sides[1]:
        return _read(sides[1]) if signs[0] in ("=", "\\approx") else _relation(f"x {signs[0]} {sides[1]}")
    if not all(sides):
        return None

    if signs == ["\\in"] and is_name(sides[0]):
        inner = _read(sides[1])
        return inner if isinstance(inner, Items) and inner.kind == "set" else as_union(inner) or inner
    if "\\in" in signs:
        return None

    # `x = a \pm b` is a list of two values, and `5 = x` is `x = 5`.
    if signs == ["="]:
        if is_name(sides[1]) and not is_name(sides[0]):
            sides = sides[::-1]
        if sides[1].count("\\pm") == 1 and is_name(sides[0]):
            return _several(sides[1])

    # Chains point to the larger side: `3 > x \ge 1` is `1 \le x < 3`.
    if set(signs) <= _MORE.keys():
        sides = sides[::-1]
        signs = [_MORE[sign] for sign in signs[::-1]]
    if not (set(signs) <= {"=", "\\approx"} or set(signs) <= _LESS.keys() or signs == ["\\ne"]):
        return None

    read = tuple(map(_side, sides))
    if signs[0] in ("=", "\\approx"):
        return Relation(sides[0], read, tuple(signs))
    interval = _interval(sides, signs)
    if interval is not None or not all(isinstance(side, Formula) for side in read):
        return interval
    return Relation(sides[0], read, tuple(signs))


def _side(text: str) -> Answer:
    side = _read(text)
    # A function is not a product with its argument.
    is_function = is_name(text) and not is_variable(text) and ("(" in text or '"' in text)
    return Words(re.sub(r'[\s"]+', "", text)) if is_function and isinstance(side, Formula | Unread) else side


def _interval(sides: Sequence[str], signs: Sequence[str]) -> Union | None:
    """Return the interval of an inequality between one variable and numbers; None for other inequalities."""
    # Words on a side may change the meaning, as in `concave when x < 3`.
    if any('"' in side or re.search("[A-Za-z]{2} ", side) for side in sides):
        return None
    # `-1 < -x` is `x < 1`.
    if not any(map(_is_unknown, sides)) and any(map(_is_negative_unknown, sides)):
        sides = [side[1:].strip() if _is_negative_unknown(side) else f"-({side})" for side in sides[::-1]]
        signs = signs[::-1]
    ends = [None if _is_unknown(side) else _end(side) for side in sides]
    if sum(end is None for end in ends) != 1:
        return None
    # The end of an interval may be a parameter, but `y > 2x` is a region of the plane.
    if any(end and end[0] and end[0].names & {"x", "y", "z"} for end in ends):
        return None

    if signs == ["\\ne"]:
        value = ends[0] or ends[1]
        assert value is not None
        return Union((Interval(None, value[0], False, False), Interval(value[0], None, False, False)))

    match ends:
        case [None, (high,)]:
            return Union((Interval(None, high, False, high is not None and _LESS[signs[0]]),))
        case [(low,), None]:
            return Union((Interval(low, None, low is not None and _LESS[signs[0]], False),))
        case [(low,), None, (high,)]:
            includes = low is not None and _LESS[signs[0]], high is not None and _LESS[signs[1]]
            return Union((Interval(low, high, *includes),))

    return None


def _is_unknown(side: str) -> bool:
    return is_name(side) and side not in ("\\infty", "\\pi", "e")


def _is_negative_unknown(side: str) -> bool:
    return side.startswith("-") and _is_unknown(side[1:].strip())


# ---- formulas and their units


def _formula(text: str) -> Formula | None:
    # A derivative is not a quotient of products with d.
    if "\\frac" in text and _DERIVATIVE.search(text):
        return None
    for without, unit in readings_of_units(text):
        try:
            expression = parse(without)
        except (UnreadableError, NoNumberError):
            continue
        if unit == "%":
            return Formula(expression._replace(percent=True))
        if unit and expression.names:
            continue
        scale, _, rest = unit.partition(" ")
        if scale in SCALES:
            return Formula(expression.times(Fraction(SCALES[scale])), rest.removeprefix("of "))
        return Formula(expression, unit)
    return None
