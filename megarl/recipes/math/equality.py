"""Decides whether two answers are equal, and returns the same text for equal answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction

from megarl.recipes.math import numbers
from megarl.recipes.math.answers import Answer, Equation, Formula, Interval, Items, Union, Unread, Words
from megarl.recipes.math.expression import Expression
from megarl.recipes.math.numbers import NoNumberError, Number, context
from megarl.recipes.math.reading import as_union

_NUM_POINTS = 8
_FEWEST_POINTS = 3  # minimum number of points at which two formulas must have values
_WHOLE = (2, 3, 5, 7)  # for formulas that have values only at integers, such as (-1)^n


def same(truth: Answer, answer: Answer) -> bool | None:
    """Whether an answer equals the truth; None if only Math-Verify may be able to decide."""
    # If one of the two could not be parsed, only equal texts are certain.
    if isinstance(truth, Unread) or isinstance(answer, Unread):
        if (
            isinstance(truth, Unread)
            and isinstance(answer, Unread)
            and _squeezed(truth.text) == _squeezed(answer.text)
        ):
            return True
        return None

    # `x = 5` answers a question whose truth is `5`, and vice versa.
    if isinstance(answer, Equation) and not isinstance(truth, Equation):
        shorter = _right_side(answer)
        return False if shorter is None else same(truth, shorter)

    if isinstance(truth, Equation) and not isinstance(answer, Equation):
        shorter = _right_side(truth)
        return False if shorter is None else same(shorter, answer)

    match truth, answer:
        case Formula(), Formula():
            return _same_formula(truth, answer)
        case Equation(), Equation():
            return _same_equation(truth, answer)
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


def _squeezed(text: str) -> str:
    return "".join(text.split()).replace('"', "")


# ---- formulas


def _same_formula(truth: Formula, answer: Formula) -> bool:
    if truth.unit and answer.unit and truth.unit != answer.unit:
        return False
    left = truth.expression
    right = answer.expression
    if left.percent != right.percent:  # 50% is 50, as a percentage, or 0.5
        return _same_value(left, right) or _same_value(_unscaled(left), _unscaled(right))

    return _same_value(left, right)


def _unscaled(expression: Expression) -> Expression:
    if not expression.percent:
        return expression
    last_place = expression.last_place and expression.last_place / 100
    return Expression(
        lambda variables: numbers.divide(expression.value(variables), Fraction(100)),
        expression.names,
        last_place,
    )


def _same_value(left: Expression, right: Expression) -> bool:
    names = left.names | right.names
    # Compare constants by their values, and decimals up to their last place.
    if not names:
        try:
            values = left.value({}), right.value({})
        except NoNumberError:
            return False
        places = [place for place in (left.last_place, right.last_place) if place is not None]
        return numbers.same_number(*values) or bool(places) and numbers.close_decimal(*values, max(places))

    agreed = 0
    # Formulas with variables are equal if they agree at enough points.
    for point in _points(names):
        try:
            values = left.value(point), right.value(point)
        except NoNumberError:
            continue
        if not all(map(numbers.is_real, values)) and agreed >= _FEWEST_POINTS:
            continue
        if not numbers.same_number(*values):
            return False
        agreed += 1

    return agreed >= _FEWEST_POINTS


def _points(names: frozenset[str]) -> list[Mapping[str, Number]]:
    """Return fixed values of the variables: first positive values, then integers and negative values."""

    def at(number: int, name: str) -> Fraction:
        digest = hashlib.sha256(f"{number} {name}".encode()).digest()
        return Fraction(11 + digest[0] % 89, 37)

    # The values are derived from a hash, so that a verdict never differs between processes.
    positive = [{name: at(number, name) for name in names} for number in range(_NUM_POINTS)]
    whole = [
        {name: Fraction(_WHOLE[(number + place) % len(_WHOLE)]) for place, name in enumerate(sorted(names))}
        for number in range(len(_WHOLE))
    ]
    negative = [{name: -value for name, value in point.items()} for point in positive[:3]]

    return [*positive, *whole, *negative]


# ---- lists, sets, tuples and intervals


def _same_items(truth: Items, answer: Items) -> bool:
    if len(truth.items) != len(answer.items):
        return len(truth.items) == 1 and same(truth.items[0], answer) is True
    # A plain list has no brackets, so it agrees with either kind.
    brackets = {truth.kind, answer.kind} - {"list"}
    if len(brackets) > 1:
        return False
    # The order of elements matters only in tuples and intervals.
    if brackets <= {"set"}:
        return _match(list(truth.items), list(answer.items))
    pairs = zip(_values(truth.items), _values(answer.items), strict=True)

    return all(same(left, right) is True for left, right in pairs)


def _values(items: Sequence[Answer]) -> list[Answer]:
    return [(_right_side(item) or item) if isinstance(item, Equation) else item for item in items]


def _match(truths: list[Answer], answers: list[Answer]) -> bool:
    """Whether each truth matches a different answer."""
    for truth in truths:
        found = next((at for at, answer in enumerate(answers) if same(truth, answer) is True), None)
        if found is None:
            return False
        answers.pop(found)
    return not answers


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
        one is other is None or (one is not None and other is not None and _same_value(one, other))
        for one, other in ends
    )


# ---- equations


def _right_side(equation: Equation) -> Answer | None:
    """Return the value that an equation gives for its left side.

    It is None if the equation claims that two different numbers are equal.
    """
    *before, last = equation.sides
    for side in before:
        if isinstance(side, Formula) and not side.expression.names and same(last, side) is False:
            return None

    return last


def _same_equation(truth: Equation, answer: Equation) -> bool:
    # A chain of equations states that its first and last side are equal.
    if len(truth.sides) > 2 or len(answer.sides) > 2:
        truth, answer = (Equation((each.sides[0], each.sides[-1])) for each in (truth, answer))
    if all(same(left, right) is True for left, right in zip(truth.sides, answer.sides, strict=True)):
        return True
    if all(same(left, right) is True for left, right in zip(truth.sides, answer.sides[::-1], strict=True)):
        return True
    # Equations are equivalent if the differences of their sides are proportional.
    differences = [_difference(each) for each in (truth, answer)]
    if differences[0] is None or differences[1] is None:
        return False

    return _proportional(differences[0], differences[1])


def _difference(equation: Equation) -> Expression | None:
    match equation.sides:
        case (Formula(left), Formula(right)):
            return Expression(
                lambda at: numbers.add(left.value(at), -right.value(at)), left.names | right.names
            )
    return None


def _proportional(left: Expression, right: Expression) -> bool:
    if left.names != right.names or not left.names:
        return False
    ratio = None
    agreed = 0

    for point in _points(left.names):
        try:
            ours = left.value(point)
            theirs = right.value(point)
            # Both must vanish at the same points, which do not determine the ratio.
            if ours == 0 or theirs == 0:
                if not (ours == 0 and theirs == 0):
                    return False
                continue
            current = numbers.divide(ours, theirs)
        except NoNumberError:
            continue
        if ratio is not None and not numbers.same_number(ratio, current):
            return False
        ratio = current
        agreed = agreed + 1

    return agreed >= _FEWEST_POINTS


# ---- normal forms


def normal_form(answer: Answer) -> str:
    """Return a text that is the same for equal answers, except for rounded decimals."""
    match answer:
        case Formula(expression):
            return _formula_text(expression)
        case Equation():
            right = _right_side(answer)
            is_assignment = isinstance(answer.sides[0], Words) or (
                isinstance(answer.sides[0], Formula) and len(answer.sides[0].expression.names) == 1
            )
            if right is not None and is_assignment:
                return normal_form(right)
            return " = ".join(map(normal_form, answer.sides))
        case Items(kind=kind, items=items):
            texts = list(map(normal_form, items))
            # Sets and lists are equal in any order; tuples and intervals are not.
            if kind in ("set", "list"):
                return texts[0] if len(texts) == 1 else "{" + ", ".join(sorted(texts)) + "}"
            return kind[0] + ", ".join(texts) + kind[-1]
        case Union(parts=parts):
            return " or ".join(sorted(map(_interval_text, parts))) or "no solution"
        case Words(text) | Unread(text):
            return " ".join(text.replace('"', " ").split())


def _interval_text(interval: Interval) -> str:
    low = "-infinity" if interval.low is None else _formula_text(interval.low)
    high = "infinity" if interval.high is None else _formula_text(interval.high)
    if low == high and interval.has_low and interval.has_high:
        return low
    return f"{'[' if interval.has_low else '('}{low}, {high}{']' if interval.has_high else ')'}"


def _formula_text(expression: Expression) -> str:
    names = sorted(expression.names)
    for point in _points(expression.names) if names else [{}]:
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
