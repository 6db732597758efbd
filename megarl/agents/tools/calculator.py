"""A calculator for arithmetic in Python syntax that does not use Python's `eval`."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Annotated, Any

_MAX_LENGTH = 1000  # characters of an expression
_MAX_BITS = 4096  # of an integer; larger ones could exhaust the memory

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(math, name)
        for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "floor", "ceil", "gcd")
    },
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: Annotated[str, "such as (3 + 4) * 2 or sqrt(2) ** 3"]) -> str:
    """Calculates an arithmetic expression.

    It may contain + - * / // % **, parentheses, sqrt, exp, log, log2, log10, sin, cos, tan, floor, ceil, gcd,
    abs, round, min, max, pi and e.
    """
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters, the maximum is {_MAX_LENGTH}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not an arithmetic expression") from error

    return str(_value(tree.body))


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            result: Any = number
        case ast.Name(id=name) if name in _CONSTANTS:
            result = _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            result = _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            first = _value(left)
            second = _value(right)
            # Estimate the size first: computing a huge power could exhaust the memory.
            if isinstance(sign, ast.Pow) and _bits(first) * abs(second) > _MAX_BITS:
                raise ValueError("the number is too large")
            result = _BINARY[type(sign)](first, second)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            result = _FUNCTIONS[name](*map(_value, arguments))
        case _:
            raise ValueError(f"{ast.unparse(node)[:60]!r} is not supported arithmetic")

    if isinstance(result, complex) or _bits(result) > _MAX_BITS:
        raise ValueError(
            "the number is too large"
            if not isinstance(result, complex)
            else "the result is not a real number"
        )

    return result


def _bits(number: float) -> int:
    return number.bit_length() if isinstance(number, int) else 0
