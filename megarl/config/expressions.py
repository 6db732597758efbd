"""Reads files of other frameworks and evaluates their expressions, within limits.

No file fills the memory or is read without end. Expressions are the arithmetic of scripts, and the
conversions of tables.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 1_000_000  # of a file, and of all values that a script's variables and commands stand for
MOST_VALUES = 100_000  # of a YAML text, whose aliases can repeat each other without end
_LONGEST = 2000
_MOST_DIGITS = 9  # after the point, of a quotient that is cut
_LARGEST_PRINTED = 1e300  # a float can hold it
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
# The functions that formulas of scripts and of tables call, by their names in Python.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "round": round,
    "abs": abs,
    "min": min,
    "max": max,
    "math.ceil": math.ceil,
    "ceil": math.ceil,
    "math.floor": math.floor,
    "floor": math.floor,
}
_PRINTED = re.compile(r"(?:(?:import|from) [\w ,]+[;\n]\s*)*print\((.*)\);?", re.DOTALL)
_AWK = re.compile(
    r'BEGIN\s*\{\s*print(?:f\s*(\(?)\s*"(%[\d.]*[dfgi])(?:\\n)?"\s*,)?(.*?)\s*;?\s*\}', re.DOTALL
)
_SCALE = re.compile(r"scale\s*=\s*(\d+)\s*[;\n]\s*")


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
        case ast.Call(func=function, args=[*parts], keywords=[]) if ast.unparse(function) in _FUNCTIONS:
            return _called(ast.unparse(function), [value(part) for part in parts])
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


def _called(name: str, operands: Sequence[Any]) -> Any:
    """Return the result of a function of numbers. `int` and `float` also take the text of one."""
    if any(not isinstance(each, int | float) for each in operands) and name not in ("int", "float"):
        raise TypeError(f"{name} takes numbers")
    return _FUNCTIONS[name](*operands)


def printed(pipeline: Sequence[Sequence[str]], look_up: Callable[[str], Any]) -> str | None:
    """Return what a pipeline of commands prints if it computes a number; None if it does something else.

    The programs are bc, expr, awk with BEGIN, and Python with `-c "print(...)"`.

    Args:
        pipeline: The words of each command.
        look_up: Returns the value of a name.

    Raises:
        ValueError: It computes something else than a number.
    """
    if not pipeline:
        return None
    first, last = pipeline[0], pipeline[-1]
    program = last[0].rpartition("/")[2]
    if program == "bc":
        given = first[1:] if first[0] == "echo" else last[last.index("<<<") + 1 :]
        return _of_bc(" ".join(given), look_up, has_fractions="-l" in last)
    if len(pipeline) != 1:
        return None
    if program == "expr":
        return str(_number(" ".join(last[1:]).replace("/", "//"), look_up))
    if program in ("awk", "gawk"):
        return _of_awk(last, look_up)
    formula = _PRINTED.fullmatch(last[-1].strip()) if program.startswith("python") and "-c" in last else None
    return None if formula is None else str(_number(formula[1], look_up))


def _of_bc(text: str, look_up: Callable[[str], Any], *, has_fractions: bool) -> str:
    """Return the result of bc, which cuts quotients after `scale` digits: none, or 20 with its option -l."""
    scale = _SCALE.match(text)
    digits = int(scale[1]) if scale else 20 * has_fractions
    formula = text[scale.end() if scale else 0 :].strip().removesuffix(";").replace("^", "**")
    # A float has about 16 digits, so a quotient with 20 is that of Python.
    if digits <= _MOST_DIGITS and "/" in formula:
        formula = _with_cut_quotients(formula, digits)
    return _shown(_number(formula, look_up))


def _with_cut_quotients(formula: str, digits: int) -> str:
    if len(formula) > _LONGEST:
        raise ValueError(f"an expression of {len(formula)} characters is too long")
    try:
        return ast.unparse(_CutQuotients(digits).visit(ast.parse(formula, mode="eval")))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{formula}: {error}") from error


class _CutQuotients(ast.NodeTransformer):
    """Cut every quotient of a formula after a number of digits."""

    def __init__(self, digits: int) -> None:
        self._scale = 10**digits

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        # Rounded first: 100 * 0.29 is 28.999... as a float, and 29 in bc.
        cut = f"int(round({ast.unparse(node)} * {self._scale}, 6)) / {self._scale}"
        return ast.parse(cut, mode="eval").body


def _of_awk(words: Sequence[str], look_up: Callable[[str], Any]) -> str | None:
    """Return what the BEGIN of awk prints; None if the program has something else."""
    match = _AWK.fullmatch(words[-1].strip())
    if match is None:
        return None
    bracket, form, formula = match.groups()
    given = dict(word.split("=", 1) for word in words[1:-1] if "=" in word)  # of its options -v

    def of_awk(name: str) -> Any:
        return evaluate(given[name], look_up) if name in given else look_up(name)

    result = _number(formula.strip().removesuffix(")") if bracket else formula, of_awk)
    return form % result if form else _shown(result)


def _number(expression: str, look_up: Callable[[str], Any]) -> int | float:
    """Return the value of an expression, which is a number that programs can print."""
    result = evaluate(expression, look_up)
    if isinstance(result, bool) or not isinstance(result, int | float) or not abs(result) <= _LARGEST_PRINTED:
        raise ValueError(f"{expression}: {result!r:.40} is no number")
    return result


def _shown(result: Any) -> str:
    """Return a number as programs print it: without a fraction if it has none."""
    return f"{result:.12g}" if isinstance(result, float) else str(result)


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
