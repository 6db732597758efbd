"""Returns the same text for equal answers, which the metric maj@k counts."""

from __future__ import annotations

from fractions import Fraction

from megarl.recipes.math import numbers
from megarl.recipes.math.answers import Answer, Formula, Interval, Items, Relation, Union, Unread, Words
from megarl.recipes.math.equality import difference_of, stated_values
from megarl.recipes.math.expression import Expression
from megarl.recipes.math.formulas import points
from megarl.recipes.math.numbers import NoNumberError, Number, context


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
