"""Decides whether two answers are equal, and returns the same text for equal answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction

from megarl.recipes.math import numbers
from megarl.recipes.math.answers import Answer, Formula, Interval, Items, Relation, Union, Unread, Words
from megarl.recipes.math.expression import Expression
from megarl.recipes.math.formulas import (
    is_asked_for,
    is_name,
    is_rounded,
    points,
    same_value,
    sign_of_ratio,
    vanishes_with,
)
from megarl.recipes.math.notation import sides_of
from megarl.recipes.math.numbers import NoNumberError, Number, context
from megarl.recipes.math.reading import as_union

_FUNCTION = re.compile(r"y|[A-Za-z]\s*\(\s*x\s*\)")
_NEGATION = re.compile(r"\b(?:not|never|nor|unless)\b|n't\b")


def same(truth: Answer, answer: Answer) -> bool | None:
    """Whether an answer equals the truth; None if only Math-Verify may be able to decide."""
    # `x = 5` answers a question whose truth is `5`, and vice versa.
    if isinstance(answer, Relation) and not isinstance(truth, Relation):
        return _any(same(truth, value) for value in stated_values(answer, lenient=True))
    if isinstance(truth, Relation) and not isinstance(answer, Relation):
        if isinstance(answer, Unread) and len(sides_of(answer.text)[0]) > 1:
            return None
        return _any(same(value, answer) for value in stated_values(truth, lenient=False))

    # If one of the two could not be parsed, only equal texts are certain.
    if isinstance(truth, Unread) or isinstance(answer, Unread):
        is_same_text = (
            isinstance(truth, Unread)
            and isinstance(answer, Unread)
            and _squeezed(truth.text) == _squeezed(answer.text)
        )
        return True if is_same_text else None

    match truth, answer:
        case Formula(), Formula():
            return _same_formula(truth, answer)
        case Relation(), Relation():
            return _same_relation(truth, answer)
        case Words(), Words():
            return truth.text == answer.text
        # A tuple of two numbers may have been meant as an open interval.
        case Union(), _:
            other = as_union(answer)
            return other is not None and _same_union(truth, other)
        case _, Union():
            other = as_union(truth)
            return other is not None and _same_union(other, answer)
        case Items(), Items():
            return _same_items(truth, answer)
        case Items(items=(single,), kind="set" | "list"), _:
            return same(single, answer)
        case _, Items(items=(single,), kind="set" | "list"):
            return same(truth, single)

    return False


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether all verdicts are true; None if none is false and Math-Verify has to decide one."""
    undecided = False
    for verdict in verdicts:
        if verdict is False:
            return False
        undecided = undecided or verdict is None
    return None if undecided else True


def _any(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether a verdict is true; None if none is and Math-Verify has to decide one."""
    undecided = False
    for verdict in verdicts:
        if verdict:
            return True
        undecided = undecided or verdict is None
    return None if undecided else False


def _squeezed(text: str) -> str:
    return "".join(text.split()).replace('"', "")


# ---- formulas


def _same_formula(truth: Formula, answer: Formula) -> bool:
    left = truth.expression
    right = answer.expression
    units = (truth.unit or left.percent and "%", answer.unit or right.percent and "%")
    if all(units) and units[0] != units[1]:
        return False
    if left.percent != right.percent:  # 50% is 50, as a percentage, or 0.5
        return same_value(left, right) or same_value(_unscaled(left), _unscaled(right))
    if same_value(left, right):
        return True
    # An angle without a unit may be in radians.
    if set(units) == {"degree", False} or set(units) == {"degree", ""}:
        left, right = (_in_radians(each) for each in (truth, answer))
        return same_value(left, right)

    return False


def _unscaled(expression: Expression) -> Expression:
    return expression.times(Fraction(1, 100)) if expression.percent else expression


def _in_radians(angle: Formula) -> Expression:
    return angle.expression.times(context.pi / 180) if angle.unit else angle.expression


# ---- lists, sets, tuples and intervals


def _same_items(truth: Items, answer: Items) -> bool | None:
    # A set has each element once; a list may repeat the elements of a set.
    if "set" in (truth.kind, answer.kind):
        truths = _distinct(truth.items) if truth.kind == "set" else list(truth.items)
        answers = _distinct(answer.items)
    else:
        truths = list(truth.items)
        answers = list(answer.items)
    if len(truths) != len(answers):
        return len(truths) == 1 and same(truths[0], answer)
    # A plain list has no brackets, so it agrees with either kind; but [1, 2] is an interval.
    brackets = {truth.kind, answer.kind} - {"list"}
    is_interval = brackets == {"[]"} and truth.kind != answer.kind and (as_union(truth) or as_union(answer))
    if len(brackets) > 1 or is_interval:
        return False

    # The order of elements matters in tuples, intervals, and lists of values for different names.
    if brackets <= {"set"} and len(_names(truths)) < 2:
        return _match(truths, answers)
    if brackets <= {"set"} and len(_names(answers)) == len(answers):
        return _match(truths, answers)
    pairs = zip(_values(truths), _values(answers), strict=True)

    return _all(same(left, right) for left, right in pairs)


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
    """Whether each truth matches a different answer."""
    left = list(answers)
    verdict: bool | None = True
    for truth in truths:
        verdicts = [same(truth, answer) for answer in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            verdict = None
        else:
            return False
    return verdict


def _same_union(left: Union, right: Union) -> bool:
    mine = list(left.parts)
    others = list(right.parts)

    for part in mine:
        found = next((at for at, other in enumerate(others) if _same_interval(part, other)), None)
        if found is None:
            return False
        others.pop(found)

    return not others


def _same_interval(left: Interval, right: Interval) -> bool:
    if (left.has_low, left.has_high) != (right.has_low, right.has_high):
        return False
    ends = ((left.low, right.low), (left.high, right.high))
    # An end without a value is infinite.
    return all(
        one is other is None or (one is not None and other is not None and same_value(one, other))
        for one, other in ends
    )


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
    if isinstance(first, Formula) and not first.expression.names and not is_name(relation.left):
        values = [first, *values]
        signs = relation.signs
    elif not is_name(relation.left) and not (lenient and _is_asked_for(relation)):
        return []

    # Only an exact value may stand before its rounded form, since two decimals could be two guesses.
    stated = [values[-1]]
    for before, sign, after in zip(values, signs, values[1:], strict=False):
        if sign == "\\approx" and isinstance(before, Formula) and isinstance(after, Formula):
            if not is_rounded(before.expression, after.expression):
                return []
            if after is values[-1] and before.expression.last_place is None:
                stated.append(before)
        elif isinstance(before, Formula) and not before.expression.names and same(after, before) is False:
            return []

    return stated


def _is_asked_for(relation: Relation) -> bool:
    first = relation.sides[0]
    return (
        isinstance(first, Unread)
        or is_asked_for(relation.left)
        or isinstance(first, Formula)
        and len(first.expression.names) > 1
        and not any(character.isdigit() for character in relation.left)
    )


def _same_relation(truth: Relation, answer: Relation) -> bool | None:
    return _any(
        _same_sides(left, right) for left in _without_steps(truth) for right in _without_steps(answer)
    )


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
    as_written = _any(
        _all(map(same, truth.sides, sides))
        for sides in ((answer.sides, answer.sides[::-1]) if can_exchange else (answer.sides,))
    )
    if as_written:
        return True
    # A function may be called y, but an answer that repeats the equation of a problem is not its solution
    # `x = 5` or `L = S - 2B`.
    if is_name(truth.left) and truth.signs == ("=",):
        if _FUNCTION.fullmatch(truth.left) and _FUNCTION.fullmatch(answer.left):
            return same(truth.sides[1], answer.sides[1])
        if not _is_curve(truth):
            return as_written

    # Relations are equivalent if the differences of their sides are proportional.
    differences = difference_of(truth), difference_of(answer)
    if differences[0] is None or differences[1] is None:
        return as_written
    ratio_sign = sign_of_ratio(differences[0], differences[1])
    if ratio_sign is not None:
        return ratio_sign > 0 or can_exchange

    return None if truth.signs == ("=",) and vanishes_with(differences[0], differences[1]) else False


def _is_curve(equation: Relation) -> bool:
    """Whether an equation such as `y = 2x + 1` describes a curve or a surface."""
    difference = difference_of(equation)
    return difference is not None and len(difference.names) > 1 and difference.names <= {"x", "y", "z"}


def difference_of(relation: Relation) -> Expression | None:
    """Return the left side minus the right side; None if one of them is no formula."""
    match relation.sides:
        case (Formula(left), Formula(right)):
            return Expression(
                lambda at: numbers.add(left.value(at), -right.value(at)), left.names | right.names
            )
    return None


# ---- normal form


def normal_form(answer: Answer) -> str:
    """Return a text that is the same for equal answers, except for rounded decimals."""
    match answer:
        case Formula(expression):
            return _formula_text(expression)
        case Relation(_, sides, signs):
            values = stated_values(answer, lenient=False)
            if values:
                return normal_form(values[-1])
            return (
                _relation_text(answer)
                or " ".join(
                    part for pair in zip(map(normal_form, sides), [*signs, ""], strict=True) for part in pair
                ).strip()
            )
        case Items(kind=kind, items=items):
            texts = list(map(normal_form, items))
            # Sets and lists are equal in any order; tuples and intervals are not.
            if kind == "set":
                texts = list(dict.fromkeys(texts))
            if kind in ("set", "list"):
                return texts[0] if len(texts) == 1 else "{" + ", ".join(sorted(texts)) + "}"
            return kind[0] + ", ".join(texts) + kind[-1]
        case Union(parts=parts):
            return " or ".join(sorted(map(_interval_text, parts))) or "no solution"
        case Words(text) | Unread(text):
            return " ".join(text.replace('"', " ").split())


def _relation_text(relation: Relation) -> str | None:
    """Return a text that is the same for proportional differences of the two sides."""
    difference = difference_of(relation)
    if difference is None or not difference.names:
        return None
    values = []
    for point in points(difference.names):
        try:
            values.append(difference.value(point))
        except NoNumberError:
            continue
        if len(values) == 2 and values[0] != 0:
            # Inequalities that differ by a negative factor are different.
            is_ordered = relation.signs[0] in ("<", "\\le")
            ratio = numbers.divide(values[1], abs(values[0]) if is_ordered else values[0])
            return f"0 {relation.signs[0]} {_number_text(ratio)} in {', '.join(sorted(difference.names))}"

    return None


def _interval_text(interval: Interval) -> str:
    low = "-infinity" if interval.low is None else _formula_text(interval.low)
    high = "infinity" if interval.high is None else _formula_text(interval.high)
    if low == high and interval.has_low and interval.has_high:
        return low
    return f"{'[' if interval.has_low else '('}{low}, {high}{']' if interval.has_high else ')'}"


def _formula_text(expression: Expression) -> str:
    names = sorted(expression.names)
    for point in points(expression.names) if names else [{}]:
        try:
            value = expression.value(point)
        except NoNumberError:
            continue
        text = _number_text(value) + ("%" if expression.percent else "")
        return (
            f"{text} at {', '.join(f'{name}={_number_text(point[name])}' for name in names)}"
            if names
            else text
        )

    return "undefined"


def _number_text(value: Number) -> str:
    if (
        isinstance(value, Fraction)
        and max(value.numerator.bit_length(), value.denominator.bit_length()) <= 200
    ):
        return str(value)

    return str(context.nstr(numbers.approximate(value), 20))
