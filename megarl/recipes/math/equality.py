"""Decides whether two answers are equal, and returns the same text for equal answers.

Math-Verify compares what only it can parse, such as matrices and integrals, and equations that may be
equivalent.
"""

from __future__ import annotations

import functools
import re
import signal
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from types import FrameType
from typing import Any

from math_verify import LatexExtractionConfig, verify
from math_verify import parse as parse_latex

from megarl.recipes.math.formula import Formula, Number, context, is_real, is_rounded, over, same_value
from megarl.recipes.math.notation import ASKED_FOR, RELATIONS, is_name, split
from megarl.recipes.math.reading import Answer, Items, Relation, Words, as_union, is_unread

LIMIT_S = 2.0  # CPU time of one comparison
_LONGEST_FOR_MATH_VERIFY = 500  # characters
# Formulas that Math-Verify would compute for minutes, partly in C code that no signal interrupts: high
# powers, factorials of large numbers, long sums.
_HUGE = re.compile(
    r"!|\^[^\^]*\^|\^\s*\{?\s*-?\d{4,}|\d{300}"
    r"|(?:\\sum|\\prod|\\binom|\\int).*(?:\d{5,}|\^\s*\{?\s*\d+\s*\^)",
    re.DOTALL,
)
# A permutation such as (1 2 3). Math-Verify would multiply its numbers.
_CYCLE = re.compile(r"\(\s*\d+(?:\s+\d+)+\s*\)")
_NO_MEANING = re.compile(r'"|(?<!\d)\s+|\s+(?!\d)')
_FUNCTION = re.compile(r"y|[A-Za-z]\s*\(\s*x\s*\)")
_PERIODIC = re.compile("sin|cos|tan|sec|csc|cot")
_NEGATION = re.compile(r"\b(?:not|never|nor|unless)\b|n't\b")
_FACTORS = {
    "%": Fraction(1, 100),
    "degree": context.pi / 180,
}  # 50% is 50 or 0.5, and an angle may be in radians


def same(truth: Answer, answer: Answer) -> bool:
    """Whether an answer equals the truth."""
    # `x = 5` answers a question whose truth is `5`, and vice versa.
    if isinstance(answer, Relation) and not isinstance(truth, Relation):
        return any(same(truth, value) for value in stated_values(answer, lenient=True))
    if isinstance(truth, Relation) and not isinstance(answer, Relation):
        if is_unread(answer) and len(split(answer.latex, RELATIONS)[0]) > 1:
            return _verified(truth.latex, answer.latex)
        return any(same(value, answer) for value in stated_values(truth, lenient=False))
    unread = [_NO_MEANING.sub("", each.latex) for each in (truth, answer) if is_unread(each)]
    if unread:
        return len(unread) == 2 and unread[0] == unread[1] or _verified(truth.latex, answer.latex)

    match truth, answer:
        case Formula(), Formula():
            return _same_formula(truth, answer)
        case Relation(), Relation():
            return any(
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


def _same_formula(truth: Formula, answer: Formula) -> bool:
    if len({truth.unit, answer.unit} - {""}) > 1:
        return False
    scaled = [each.times(_FACTORS.get(each.unit, Fraction(1))) for each in (truth, answer)]
    return same_value(truth, answer) or truth.unit != answer.unit and same_value(*scaled)


# ---- lists, sets, tuples and intervals


def _same_items(truth: Items, answer: Items) -> bool:
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
    return all(map(same, truths, answers))


def _distinct(items: Sequence[Answer]) -> list[Answer]:
    return [item for at, item in enumerate(items) if not any(same(other, item) for other in items[:at])]


def _names(items: Sequence[Answer]) -> set[str]:
    return {item.left for item in items if isinstance(item, Relation) and is_name(item.left)}


def _match(truths: Sequence[Answer], answers: Sequence[Answer]) -> bool:
    """Whether each truth matches a different answer, and no answer is left."""
    left = list(answers)
    for truth in truths:
        found = next((at for at, answer in enumerate(left) if same(truth, answer)), None)
        if found is None:
            return False
        left.pop(found)
    return not left


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
        elif isinstance(before, Formula) and not before.names and not same(after, before):
            return []

    return stated


def _is_asked_for(relation: Relation) -> bool:
    """Whether the left side is no equation to solve: a quantity such as `m + n`, or one that is not read."""
    first = relation.sides[0]
    is_sum = isinstance(first, Formula) and len(first.names) > 1 and not re.search(r"\d", relation.left)
    return is_sum or is_unread(first) or ASKED_FOR.fullmatch(relation.left) is not None


def _without_steps(relation: Relation) -> list[Relation]:
    """Return the relation with the last side only of a calculation, such as `x = 2 + 3 = 5`."""
    values = stated_values(relation, lenient=False) if len(relation.sides) > 2 else []
    if values:
        return [Relation((relation.sides[0], value), ("=",)) for value in values]
    return [relation._replace(signs=tuple("=" if sign == "\\approx" else sign for sign in relation.signs))]


def _same_sides(truth: Relation, answer: Relation) -> bool:
    if truth.signs != answer.signs:
        return False
    can_exchange = set(truth.signs) <= {"=", "\\ne"}
    orders = (answer.sides, answer.sides[::-1]) if can_exchange else (answer.sides,)
    if any(all(map(same, truth.sides, sides)) for sides in orders):
        return True
    # A function may be called y, but an answer that repeats the equation of a problem is not its solution
    # `x = 5` or `L = S - 2B`. An equation such as `y = 2x + 1` describes a curve or a surface.
    one, other = _scaled(truth), _scaled(answer)
    if is_name(truth.left) and truth.signs == ("=",):
        if _FUNCTION.fullmatch(truth.left) and _FUNCTION.fullmatch(answer.left):
            return same(truth.sides[1], answer.sides[1])
        if one is None or len(one.names) < 2 or not one.names <= {"x", "y", "z"}:
            return False

    # Relations are equivalent if the differences of their sides are proportional. Math-Verify may find that
    # other equations are, such as xy = 1 and y = 1/x.
    if one is None or other is None or same_value(one, other):
        return one is not None and other is not None
    # It would solve `\tan x = y` for one x of many, so it does not decide about periodic functions.
    is_periodic = any(_PERIODIC.search(each.latex) for each in (truth, answer))
    can_solve = truth.signs == ("=",) and one.names == other.names and not is_periodic
    return can_solve and _verified(truth.latex, answer.latex)


def _scaled(relation: Relation) -> Formula | None:
    """Return the difference of two sides, scaled so that it is the same for equivalent relations."""
    match relation.sides:
        case (Formula() as left, Formula() as right):
            difference = left.minus(right)
            first = next(filter(None, difference.values), None)
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
        case Relation(sides, signs):
            values = stated_values(answer, lenient=False)
            if values:
                return normal_form(values[-1])
            scaled = _scaled(answer)
            texts = [*signs, *map(normal_form, sides)]
            return f"0 {signs[0]} {_formula_text(scaled, 1)}" if scaled else " ".join(texts)
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
    values = [value for value in formula.values if value is not None]
    if len(values) <= at:
        return "undefined"
    names = f" in {', '.join(sorted(formula.names))}" if formula.names else ""
    return _number_text(values[at]) + formula.unit * (formula.unit == "%") + names


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


# ---- Math-Verify


class _TooSlow(BaseException):
    """Interrupts Math-Verify, which would catch a subclass of Exception."""


def _verified(truth: str, answer: str) -> bool:
    if _CYCLE.search(truth) or _CYCLE.search(answer):
        return False
    left = parsed(truth)
    right = parsed(answer)
    return bool(left and right) and verify(left, right, timeout_seconds=None, allow_set_relation_comp=True)


@functools.lru_cache(maxsize=256)
def parsed(latex: str) -> list[Any]:
    """Parse a formula by Math-Verify. The list is empty for one that it could compute for minutes."""
    if len(latex) > _LONGEST_FOR_MATH_VERIFY or _HUGE.search(latex):
        return []
    text = re.sub(r'"([^"]*)"', r"\\text{\1}", latex)
    # Without this configuration, Math-Verify may take the last number of a text for its value.
    # pyrefly: ignore[bad-argument-type]  # None turns the limit off
    return parse_latex(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)


def within_limit(call: Callable[[], Any]) -> Any:
    """Return the result of `call`, or None if it takes more than LIMIT_S of CPU time.

    Only the main thread receives signals; reward processes score in it. In other threads
    `reward.time_limit_s` is the only limit.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    # The timer counts CPU time, so that a busy machine does not change the verdict.
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)

    try:
        return call()
    except _TooSlow:
        return None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
