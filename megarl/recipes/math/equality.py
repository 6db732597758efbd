"""Decides whether two answers are equal, and returns the same text for equal answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import islice

from megarl.recipes.math.formula import (
    POINTS,
    Formula,
    Number,
    Point,
    context,
    is_real,
    is_rounded,
    over,
    same_number,
    same_value,
)
from megarl.recipes.math.names import is_asked_for, is_name
from megarl.recipes.math.notation import sides_of
from megarl.recipes.math.reading import Answer, Items, Relation, Words, as_union

_FUNCTION = re.compile(r"y|[A-Za-z]\s*\(\s*x\s*\)")
_NEGATION = re.compile(r"\b(?:not|never|nor|unless)\b|n't\b")
_FACTORS = {
    "%": Fraction(1, 100),
    "degree": context.pi / 180,
}  # 50% is 50 or 0.5, and an angle may be in radians


def same(truth: Answer, answer: Answer) -> bool | None:
    """Whether an answer equals the truth; None if only Math-Verify may be able to decide."""
    # `x = 5` answers a question whose truth is `5`, and vice versa.
    if isinstance(answer, Relation) and not isinstance(truth, Relation):
        return _any(same(truth, value) for value in stated_values(answer, lenient=True))
    if isinstance(truth, Relation) and not isinstance(answer, Relation):
        if isinstance(answer, Words) and not answer.is_read and len(sides_of(answer.text)[0]) > 1:
            return None
        return _any(same(value, answer) for value in stated_values(truth, lenient=False))

    # If one of the two could not be parsed, only equal texts are certain.
    unread = [each.text for each in (truth, answer) if isinstance(each, Words) and not each.is_read]
    if unread:
        texts = {"".join(text.split()).replace('"', "") for text in unread}
        return True if len(unread) == 2 and len(texts) == 1 else None

    match truth, answer:
        case Formula(), Formula():
            return _same_formula(truth, answer)
        case Relation(), Relation():
            return _any(
                _same_sides(left, right) for left in _without_steps(truth) for right in _without_steps(answer)
            )
        case Words(), Words():
            return truth.text == answer.text
        case (Items(kind="union"), _) | (_, Items(kind="union")):
            left = as_union(truth)
            right = as_union(answer)
            return left is not None and right is not None and _match(left.items, right.items)
        case Items(), Items():
            return _same_items(truth, answer)
        case Items(items=(single,), kind="set" | "list"), _:
            return same(single, answer)
        case _, Items(items=(single,), kind="set" | "list"):
            return same(truth, single)

    return False


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether all verdicts are true; None if none is false and Math-Verify has to decide one."""
    verdict: bool | None = True
    for each in verdicts:
        if each is False:
            return False
        verdict = verdict and each
    return verdict


def _any(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether a verdict is true; None if none is and Math-Verify has to decide one."""
    verdict: bool | None = False
    for each in verdicts:
        if each:
            return True
        verdict = None if each is None else verdict
    return verdict


def _same_formula(truth: Formula, answer: Formula) -> bool:
    units = {truth.unit, answer.unit} - {""}
    if len(units) > 1:
        return False
    if same_value(truth, answer):
        return True
    scaled = [each.times(_FACTORS.get(each.unit, Fraction(1))) for each in (truth, answer)]
    return truth.unit != answer.unit and same_value(*scaled)


# ---- lists, sets, tuples and intervals


def _same_items(truth: Items, answer: Items) -> bool | None:
    # A set has each element once; a list may repeat the elements of a set.
    truths = _distinct(truth.items) if truth.kind == "set" else list(truth.items)
    answers = _distinct(answer.items) if "set" in (truth.kind, answer.kind) else list(answer.items)
    if len(truths) != len(answers):
        return len(truths) == 1 and same(truths[0], answer)
    # A plain list has no brackets, so it agrees with either kind; but [1, 2] is an interval.
    brackets = {truth.kind, answer.kind} - {"list"}
    is_interval = truth.kind != answer.kind and "()" not in brackets and (as_union(truth) or as_union(answer))
    if len(brackets) > 1 or is_interval and brackets != {"set"}:
        return False

    # The order of elements matters in tuples, intervals, and lists of values for different names.
    if brackets <= {"set"} and (len(_names(truths)) < 2 or len(_names(answers)) == len(answers)):
        return _match(truths, answers)
    return _all(map(same, _values(truths), _values(answers)))


def _distinct(items: Sequence[Answer]) -> list[Answer]:
    kept: list[Answer] = []
    for item in items:
        if not any(same(other, item) for other in kept):
            kept.append(item)
    return kept


def _names(items: Sequence[Answer]) -> set[str]:
    return {item.left for item in items if isinstance(item, Relation) and is_name(item.left)}


def _values(items: Sequence[Answer]) -> list[Answer]:
    values = [stated_values(item, lenient=False) if isinstance(item, Relation) else [] for item in items]
    return [found[0] if found else item for item, found in zip(items, values, strict=True)]


def _match(truths: Sequence[Answer], answers: Sequence[Answer]) -> bool | None:
    """Whether each truth matches a different answer, and no answer is left."""
    left = list(answers)
    verdict: bool | None = len(truths) == len(answers)
    for truth in truths:
        verdicts = [same(truth, answer) for answer in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            verdict = verdict and None
        else:
            return False
    return verdict


# ---- equations and inequalities


def stated_values(relation: Relation, lenient: bool) -> list[Answer]:
    """Return the value that an equation states, which may have a rounded form too.

    An equation states a value if its left side only names it (`x = 5`) or is a constant (`2 + 3 = 5`).
    `x + y = 5` as a truth does not: then 5 would be accepted for a line. In an answer, `m + n = 5` tells
    which value is meant, but `3x = 9` and `x^2 + y^2 = 9` are equations that are not solved. The list
    is empty if different numbers are claimed to be equal.
    """
    if not set(relation.signs) <= {"=", "\\approx"} or _NEGATION.search(relation.left):
        return []
    first, *values = relation.sides
    signs = relation.signs[1:]
    if isinstance(first, Formula) and not first.names and not is_name(relation.left):
        values = [first, *values]
        signs = relation.signs
    elif not is_name(relation.left) and not (lenient and _is_asked_for(relation)):
        return []

    # Only an exact value may stand before its rounded form, since two decimals could be two guesses.
    stated = [values[-1]]
    for before, sign, after in zip(values, signs, values[1:], strict=False):
        if sign == "\\approx" and isinstance(before, Formula) and isinstance(after, Formula):
            if not is_rounded(before, after):
                return []
            if after is values[-1] and before.last_place is None:
                stated.append(before)
        elif isinstance(before, Formula) and not before.names and same(after, before) is False:
            return []

    return stated


def _is_asked_for(relation: Relation) -> bool:
    """Whether the left side is no equation to solve: a quantity such as `m + n`, or one that is not read."""
    has_digits = any(character.isdigit() for character in relation.left)
    match relation.sides[0]:
        case Words(is_read=False):
            return True
        case Formula(names=names) if len(names) > 1 and not has_digits:
            return True
    return is_asked_for(relation.left)


def _without_steps(relation: Relation) -> list[Relation]:
    """Return the relation with the last side only of a calculation, such as `x = 2 + 3 = 5`."""
    values = stated_values(relation, lenient=False) if len(relation.sides) > 2 else []
    if values:
        return [Relation(relation.left, (relation.sides[0], value), ("=",)) for value in values]
    return [relation._replace(signs=tuple("=" if sign == "\\approx" else sign for sign in relation.signs))]


def _same_sides(truth: Relation, answer: Relation) -> bool | None:
    if truth.signs != answer.signs:
        return False
    can_exchange = set(truth.signs) <= {"=", "\\ne"}
    orders = (answer.sides, answer.sides[::-1]) if can_exchange else (answer.sides,)
    as_written = _any(_all(map(same, truth.sides, sides)) for sides in orders)
    if as_written:
        return True
    # A function may be called y, but an answer that repeats the equation of a problem is not its solution
    # `x = 5` or `L = S - 2B`. An equation such as `y = 2x + 1` describes a curve or a surface.
    one, other = _scaled(truth), _scaled(answer)
    if is_name(truth.left) and truth.signs == ("=",):
        if _FUNCTION.fullmatch(truth.left) and _FUNCTION.fullmatch(answer.left):
            return same(truth.sides[1], answer.sides[1])
        if one is None or len(one.names) < 2 or not one.names <= {"x", "y", "z"}:
            return as_written

    # Relations are equivalent if the differences of their sides are proportional. Math-Verify may find that
    # others are, such as xy = 1 and y = 1/x.
    if one is None or other is None:
        return as_written
    if same_value(one, other):
        return True
    return None if truth.signs == ("=",) and one.names == other.names and _holds_with(one, other) else False


def _holds_with(truth: Formula, answer: Formula) -> bool:
    """Whether a formula is zero at all tested points where another one is, which is linear in a variable."""
    for name in sorted(truth.names):
        roots = [_with_root(truth, name, point) for point in POINTS]
        found = [abs(value) for root in roots if root and (value := answer.value(root)) is not None]
        if len(found) > 2:
            return max(map(context.convert, found)) < 2.0**-200
    return False


def _with_root(formula: Formula, name: str, point: Point) -> Point | None:
    """Return a point at which the formula is zero, by another value of a variable in which it is linear."""

    def at(value: Number) -> Point:
        return lambda each: value if each == name else point(each)

    zero, one, two = (formula.value(at(Fraction(number))) for number in range(3))
    if zero is None or one is None or two is None or one == zero or not same_number(two + -one, one + -zero):
        return None
    return at(over(zero, zero + -one))


def _scaled(relation: Relation) -> Formula | None:
    """Return the difference of two sides, scaled so that it is the same for equivalent relations."""
    match relation.sides:
        case (Formula() as left, Formula() as right):
            difference = left.minus(right)
            first = next(filter(None, difference.values(POINTS)), None)
            if difference.names and first is not None:
                # Inequalities that differ by a negative factor are different.
                is_ordered = relation.signs[0] in ("<", "\\le")
                return difference.times(over(Fraction(1), abs(first) if is_ordered else first))
    return None


# ---- normal form


def normal_form(answer: Answer) -> str:
    """Return a text that is the same for equal answers, except for rounded decimals."""
    match answer:
        case Formula():
            return _formula_text(answer)
        case Relation(_, sides, signs):
            values = stated_values(answer, lenient=False)
            if values:
                return normal_form(values[-1])
            parts = [
                text for pair in zip(map(normal_form, sides), [*signs, ""], strict=True) for text in pair
            ]
            scaled = _scaled(answer)
            return f"0 {signs[0]} {_formula_text(scaled, 1)}" if scaled else " ".join(parts).strip()
        case Items(kind=kind, items=items):
            texts = list(map(normal_form, items))
            if kind == "union":
                return " or ".join(sorted(texts)) or "no solution"
            # Sets and lists are equal in any order; tuples and intervals are not.
            if kind in ("set", "list"):
                texts = sorted(dict.fromkeys(texts) if kind == "set" else texts)
                return texts[0] if len(texts) == 1 else "{" + ", ".join(texts) + "}"
            return kind[0] + ", ".join(texts) + kind[1]
        case Words(text):
            return " ".join(text.replace('"', " ").split())


def _formula_text(formula: Formula, at: int = 0) -> str:
    value = next(islice(formula.values(POINTS), at, None), None)
    if value is None:
        return "undefined"
    names = f" in {', '.join(sorted(formula.names))}" if formula.names else ""
    return _number_text(value) + formula.unit * (formula.unit == "%") + names


def _number_text(value: Number) -> str:
    if not context.isfinite(value):
        return "infinity" if value > 0 else "-infinity"
    # A root or a logarithm may be rational.
    if is_real(value) and 1e-9 < abs(value) < 1e15:
        exact = value if isinstance(value, Fraction) else Fraction(str(context.nstr(value.real, 60)))
        near = exact.limit_denominator(10**9)
        if abs(near - exact) < Fraction(1, 10**30):
            return str(near)
    return (
        str(value)
        if isinstance(value, Fraction) and value.denominator == 1
        else str(context.nstr(context.convert(value), 20))
    )
