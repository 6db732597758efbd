"""Parses an answer as a formula, a list, a set, a tuple, intervals, an equation or inequality, or words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from megarl.recipes.math.formula import Formula, context, is_below, parse, same_value
from megarl.recipes.math.notation import (
    AND,
    APPROXIMATELY,
    LABEL,
    OR,
    RELATIONS,
    SCALES,
    SEMICOLONS,
    VARIABLE,
    depth_after,
    is_name,
    listed,
    plain_latex,
    readings_of_units,
    split,
    with_matrices,
    with_wide_commas,
)


class Items(NamedTuple):
    """Several answers.

    `kind` is "list" without brackets, "set" for braces, the two brackets, such as "(]", or "union" of
    intervals, which are items with brackets. A union without items is the empty set.
    """

    kind: str
    items: tuple[Any, ...]
    latex: str = ""


class Relation(NamedTuple):
    """An equation or an inequality, or a chain of them, with at least two sides.

    `signs` are between the sides: "=", "\\approx", "\\ne", "<" or "\\le".
    """

    sides: tuple[Any, ...]
    signs: tuple[str, ...]
    latex: str = ""

    @property
    def left(self) -> str:
        """The text of the first side, which may be only the name of the value after it."""
        return self.sides[0].latex


class Words(NamedTuple):
    """Words, or text that only Math-Verify may be able to parse."""

    text: str
    is_read: bool = True
    latex: str = ""


Answer = Formula | Items | Relation | Words
_INFINITY = Formula((context.inf,))
_MINUS_INFINITY = Formula((-context.inf,))

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

    `100,200` is a number or a list of two, a column in brackets is a tuple or a matrix, and the logarithm of
    a power of ten may have the base 10.

    It never raises: an answer that it cannot parse is Words that are not read.
    """
    plain = plain_latex(text)
    meanings = (
        plain,
        with_wide_commas(plain),
        _OF_POWER_OF_TEN.sub(r"\\log_{10} ", plain),
        plain_latex(with_matrices(text)),
    )
    try:
        return tuple(_read(each) for each in dict.fromkeys(meanings))
    except RecursionError:
        return (Words(text, is_read=False, latex=text),)


def is_unread(answer: Answer) -> bool:
    return isinstance(answer, Words) and not answer.is_read


def unread_parts(answer: Answer) -> list[Answer]:
    """Return the parts of an answer that only Math-Verify may be able to parse."""
    if isinstance(answer, Items):
        return [part for item in answer.items for part in unread_parts(item)]
    return [answer] if is_unread(answer) else []


def _read(text: str) -> Answer:
    answer = _without_text(text)
    return answer._replace(latex=answer.latex or text)


def _without_text(text: str) -> Answer:
    # First check fixed phrases: no solution, all real numbers.
    words = re.sub(r"\s+", " ", text.replace('"', " ")).strip()
    if _NOTHING.fullmatch(words.lower()):
        return Items("union", ())
    if _ALL_REALS.fullmatch(words):
        return Items("union", (Items("()", (_MINUS_INFINITY, _INFINITY)),))
    if "\\forall" in text or "\\exists" in text:
        return Words(re.sub(r"\s+", "", text))  # a quantifier changes the meaning of its formula

    # Parse from the loosest binding to the tightest: lists, relations, brackets, a single formula.
    for read in (_several, _relation, _brackets, _formula):
        parsed = read(text)
        if parsed is not None:
            return parsed

    # Remove introductions such as "the answer is", and parse the rest.
    shorter = APPROXIMATELY.sub("", _INTRODUCTION.sub("", words) if " " in words else words)
    if shorter != words and re.search(r"[\d\\]", shorter):
        return _read(plain_latex(shorter))

    if LABEL.fullmatch(text) or _DERIVATIVE.search(text):
        return Words(re.sub(r"\s+", "", text))
    if _DOTS.fullmatch(text):
        return Words("...")
    if re.fullmatch(r"[A-Za-z][A-Za-z ,.'()!-]*", words):
        lower = re.sub(r"^(?:an?|the) ", "", words.lower().strip(" .!"))
        return Words(_SAME_WORDS.get(lower, lower))

    return Words(text, is_read=False)


# ---- lists, sets, tuples and intervals


def _several(text: str) -> Answer | None:
    """Parse several answers joined by commas, "and", "or", a union sign or plus-minus."""
    if "\\cup" in text:
        unions = [as_union(_read(part.strip())) for part in text.split("\\cup")]
        return None if None in unions else _joined(unions, "or")

    # Alternatives of several named values are groups: `x = 1, y = 2 or x = 3, y = 4` are two points.
    alternatives = OR.split(text)
    word = "or" if len(alternatives) > 1 else ","
    if word == "," and text[:1] not in "([":
        alternatives = split(text, SEMICOLONS)[0]
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


def _joined(answers: Sequence[Any], word: str) -> Answer | None:
    if not all(isinstance(answer, Items) and answer.kind == "union" for answer in answers):
        return Items("list", _without_lists(answers))
    parts = [part for union in answers for part in union.items]
    common = None if word == "or" else _intersection(parts)
    # A comma may mean "or": no number is in `x < 1, x > 3`.
    if word != "and" and (common is None or not is_below(*common.items)):
        return _union(parts)
    return Items("union", (common,)) if common else None


def _without_lists(answers: Sequence[Answer]) -> tuple[Answer, ...]:
    parts = (
        answer.items if isinstance(answer, Items) and answer.kind == "list" else (answer,)
        for answer in answers
    )
    return tuple(item for part in parts for item in part)


def _union(parts: Sequence[Items]) -> Items:
    """Return the union of intervals. Two that touch are one: (0,1] and (1,2) are (0,2)."""
    kept: list[Items] = []
    for part in sorted(parts, key=lambda part: context.convert(part.items[0].values[0] or 0).real):
        last = kept[-1] if kept else None
        is_closed = last is not None and (last.kind[1] == "]" or part.kind[0] == "[")
        if last and is_closed and same_value(last.items[1], part.items[0]):
            part = Items(last.kind[0] + part.kind[1], (last.items[0], part.items[1]))
            kept.pop()
        kept.append(part)
    return Items("union", tuple(kept))


def _intersection(parts: Sequence[Items]) -> Items | None:
    """Return the interval between a lower and an upper bound, as in 1 < x and x < 3."""
    for below, above in (parts, parts[::-1]) if len(parts) == 2 else ():
        if below.items[1].values == _INFINITY.values and above.items[0].values == _MINUS_INFINITY.values:
            return Items(below.kind[0] + above.kind[1], (below.items[0], above.items[1]))
    return None


def _brackets(text: str) -> Answer | None:
    found = re.fullmatch(r"(\\\{|[(\[{])(.*?)(\\\}|[)\]}])", text, re.DOTALL)
    if found is None:
        return None
    opening, inner, closing = found.groups()
    is_set = opening.endswith("{") and closing.endswith("}")
    # In a tuple or set such as (1,234) a comma is a separator, unless others separate the items.
    ways = (split(inner)[0], split(with_wide_commas(inner))[0], split(inner, SEMICOLONS)[0])
    items = next((way for way in ways if len(way) > 1), ways[0])
    if depth_after(inner) or (len(items) == 1 and not (is_set and opening == "\\{")):
        return None

    builder = re.fullmatch(r"\s*\w+\s*(?:\\in\s*\\mathbb\{R\})?\s*[|:](.*)", inner) if is_set else None
    if builder:
        return _relation(builder.group(1).strip())
    read = [_read(item.strip()) for item in items]
    return Items("set", _without_lists(read)) if is_set else Items(opening + closing, tuple(read))


def as_union(answer: Answer) -> Items | None:
    """Return an answer as a union; a tuple of two numbers may have been meant as an open interval."""
    match answer:
        case Items(kind="union"):
            return answer
        case Items(kind="set", items=items) if all(isinstance(item, Formula) for item in items):
            return Items("union", tuple(Items("[]", (item, item)) for item in items))
        case Items(kind=kind, items=(Formula() as low, Formula() as high)) if len(kind) == 2 and is_below(
            low, high
        ):
            return Items("union", (answer,))
    return None


# ---- equations and inequalities


def _relation(text: str) -> Answer | None:
    sides, signs = split(text, RELATIONS)
    if not signs or text.startswith("\\{"):
        return None
    # An answer such as `> 5` has no left side.
    if not all(sides):
        is_bound = signs[0] not in ("=", "\\approx") and all(sides[1:])
        return _relation(f"x {text}") if is_bound else None

    if signs == ["\\in"] and is_name(sides[0]):
        inner = _read(sides[1])
        return inner if isinstance(inner, Items) and inner.kind == "set" else as_union(inner) or inner

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
    if not (set(signs) <= {"=", "\\approx"} or set(signs) <= {"<", "\\le"} or signs == ["\\ne"]):
        return None

    read = tuple(map(_side, sides))
    is_equation = signs[0] in ("=", "\\approx")
    interval = None if is_equation else _interval(sides, signs)
    if interval is None and (is_equation or all(isinstance(side, Formula) for side in read)):
        return Relation(read, tuple(signs))
    return interval


def _side(text: str) -> Answer:
    side = _read(text)
    # A function is not a product with its argument.
    is_function = is_name(text) and not VARIABLE.fullmatch(text) and ("(" in text or '"' in text)
    if is_function and (isinstance(side, Formula) or is_unread(side)):
        side = Words(re.sub(r'[\s"]+', "", text))
    return side._replace(latex=text)


def _interval(sides: Sequence[str], signs: Sequence[str]) -> Items | None:
    """Return the interval of an inequality between one variable and numbers; None for other inequalities."""
    # Words on a side may change the meaning, as in `concave when x < 3`.
    if any('"' in side or re.search("[A-Za-z]{2} ", side) for side in sides):
        return None
    # `-1 < -x` is `x < 1`.
    unsigned = [re.sub(r"^-\s*", "", side) for side in sides[::-1]]
    if not any(map(_is_unknown, sides)) and any(map(_is_unknown, unsigned)):
        pairs = zip(sides[::-1], unsigned, strict=True)
        sides = [opposite if _is_unknown(opposite) else f"-({side})" for side, opposite in pairs]
        signs = signs[::-1]
    ends = [None if _is_unknown(side) else _formula(side) for side in sides]
    known = [end for end in ends if end is not None]
    # The end of an interval may be a parameter, but `y > 2x` is a region of the plane.
    if len(known) != len(ends) - 1 or any(end.unit or end.names & {"x", "y", "z"} for end in known):
        return None

    if signs == ["\\ne"]:
        return Items("union", (Items("()", (_MINUS_INFINITY, known[0])), Items("()", (known[0], _INFINITY))))
    # A missing bound is infinite.
    if len(ends) == 2:
        signs = ["<", *signs] if ends[0] is None else [*signs, "<"]
        ends = [_MINUS_INFINITY, *ends] if ends[0] is None else [*ends, _INFINITY]
    if len(ends) != 3 or ends[0] is None or ends[2] is None:
        return None
    brackets = ("[" if signs[0] == "\\le" else "(") + ("]" if signs[1] == "\\le" else ")")
    return Items("union", (Items(brackets, (ends[0], ends[2])),))


def _is_unknown(side: str) -> bool:
    return is_name(side) and side not in ("\\infty", "\\pi", "e")


# ---- formulas and their units


def _formula(text: str) -> Formula | None:
    infinite = re.fullmatch(r"\s*([+-]?)\s*(?:\\infty|oo|inf|infinity)\s*", text)
    if infinite:
        return _MINUS_INFINITY if infinite.group(1) == "-" else _INFINITY
    # A derivative is not a quotient of products with d.
    if "\\frac" in text and _DERIVATIVE.search(text):
        return None
    for without, unit in readings_of_units(text):
        try:
            formula = parse(without)
        except ValueError:
            continue
        if unit and unit != "%" and formula.names:
            continue
        scale, _, rest = unit.partition(" ")
        if scale in SCALES:
            return formula.times(Fraction(SCALES[scale]), rest.removeprefix("of "))
        return formula._replace(unit=unit)
    return None
