"""Reads files of other frameworks and evaluates their expressions, within limits.

No file fills the memory or is read without end. Expressions are the arithmetic of scripts, and the
conversions of tables.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 1_000_000  # of a file, and of all values that a script's variables and commands stand for
MOST_VALUES = 100_000  # of a YAML text, whose aliases can repeat each other without end
_LONGEST = 2000
_LARGEST_BITS = 256  # of an integer, so that powers and products of products end
_ARITHMETIC: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, group: item in group,
    ast.NotIn: lambda item, group: item not in group,
}


def evaluate(expression: str, look_up: Callable[[str], Any]) -> Any:
    """Return the value of an expression of numbers, texts, names, comparisons and conditions.

    Args:
        look_up: Returns the value of a dotted name.

    Raises:
        ValueError: The expression has something else, or a value does not fit its operator.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression of {len(expression)} characters is too long")
    try:
        return _evaluated(ast.parse(expression.strip(), mode="eval").body, look_up)
    except (
        SyntaxError,
        TypeError,
        ArithmeticError,
        LookupError,
        RecursionError,
        MemoryError,
    ) as error:
        raise ValueError(f"{expression}: {error}") from error


def _evaluated(node: ast.expr, look_up: Callable[[str], Any]) -> Any:
    def value(inner: ast.expr) -> Any:
        return _evaluated(inner, look_up)

    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.Name() | ast.Attribute():
            return look_up(ast.unparse(node))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _computed(op, value(left), value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](value(operand))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](value(left), value(right))
        case ast.BoolOp(op=op, values=[*parts, last]):
            # Python stops at a decisive part, and names after it may have no values.
            for part in parts:
                if bool(found := value(part)) is isinstance(op, ast.Or):
                    return found
            return value(last)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return value(body) if value(test) else value(orelse)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {value(key): value(each) for key, each in zip(keys, values, strict=True) if key}
        case ast.Subscript(value=inner, slice=ast.Slice(lower=low, upper=high, step=step)):
            return value(inner)[slice(*(part and value(part) for part in (low, high, step)))]
        case ast.Subscript(value=inner, slice=index):
            return value(inner)[value(index)]
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")


def _computed(op: ast.operator, left: Any, right: Any) -> Any:
    """Return the result of two numbers. Texts and lists are refused: their product can fill the memory."""
    for operand in (left, right):
        if not isinstance(operand, int | float):
            raise TypeError(f"{operand!r:.40} is no number")
        if isinstance(operand, int) and operand.bit_length() > _LARGEST_BITS:
            raise OverflowError("a number is too large")
    if isinstance(op, ast.Pow) and abs(right) > _LARGEST_BITS:
        raise OverflowError("an exponent is too large")
    return _ARITHMETIC[type(op)](left, right)


def read_limited(file: Path) -> str:
    """Read a text file.

    Raises:
        ValueError: The file cannot be read, or is too long for a script or a configuration.
    """
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            text = opened.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from error
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{file}: has more than {MOST_CHARACTERS:,} characters; give the file of a run")
    return text


def is_too_large(tree: Any) -> bool:
    """Whether a tree has more values than a configuration has, or contains itself."""
    num_values = 0
    left = [tree]
    while left and num_values <= MOST_VALUES:
        value = left.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        num_values += 1 + len(inner)
        left.extend(inner)
    return num_values > MOST_VALUES
