"""Parses a formula in LaTeX or plain text, and evaluates it at given values of its variables."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple

from megarl.recipes.math import numbers
from megarl.recipes.math.numbers import (
    FUNCTIONS,
    LONGEST_NUMBER,
    NoNumberError,
    Number,
    TooLargeError,
    UnreadableError,
    apply_function,
    context,
    logarithm,
    read_decimal,
    root,
    with_plain_fractions,
)

_DEEPEST = 60  # maximum nesting of brackets
_TOKEN = re.compile(
    r"\s*(?:(?P<based>[0-9A-Za-z]*\d[0-9A-Za-z]*_(?:\{\d+\}|\d+))"
    r"|(?P<number>\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)(?:\.\d+)?"
    r"|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+(?![A-Za-z]))?)"
    r"|(?P<command>\\[A-Za-z]+|\\[{}|%])|(?P<word>[A-Za-z]+)|(?P<sign>\*\*|.))",
    re.DOTALL,
)
_CONSTANTS = {"pi": context.pi, "e": context.e, "i": context.mpc(0, 1), "imath": context.mpc(0, 1)}
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma "
    "tau phi varphi chi psi omega"
)
GREEK_NAMES = frozenset(_GREEK.split()) | frozenset(name.capitalize() for name in _GREEK.split())
# Words that are not products of two variables.
_SHORT_WORDS = ("no", "if", "in", "is", "it", "of", "on", "or", "so", "to", "we")
_TIMES = ("*", "\\cdot", "\\times", "\\ast")
_OVER = ("/", "\\div")
_OPENING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "|": "|"}
Value = Callable[[Mapping[str, Number]], Number]


class Expression(NamedTuple):
    """A formula.

    Attributes:
        value: Computes the value for given variables. Raises NoNumberError or TooLargeError.
        last_place: The value of one unit in the last place of a decimal number; None for other formulas.
        percent: Whether the formula ends in a percent sign, which its value does not include.
    """

    value: Value
    names: frozenset[str]
    last_place: Fraction | None = None
    percent: bool = False

    def times(self, factor: Number) -> Expression:
        """Return the formula multiplied by a number, without a percent sign."""
        last_place = None
        if self.last_place is not None and isinstance(factor, Fraction):
            last_place = self.last_place * factor
        return Expression(
            lambda variables: numbers.multiply(self.value(variables), factor), self.names, last_place
        )


def parse(text: str) -> Expression:
    """Parse a formula that has one value for each choice of its variables.

    Raises:
        UnreadableError: The text is something else, such as a set, an equation or a sentence.
    """
    if not text.strip():
        raise UnreadableError("it is empty")
    percent = re.search(r"\s*\\?%$", text)
    if percent:
        text = text[: percent.start()]
    # Keep the last place of a decimal, to which an exact value may be rounded.
    decimal = read_decimal(text)
    if decimal is not None:
        return Expression(_constant(decimal[0]), frozenset(), decimal[1], percent is not None)
    parser = _Parser(with_plain_fractions(text))

    try:
        value = parser.whole()
    except RecursionError:
        raise UnreadableError("it is nested too deeply") from None

    return Expression(
        functools.partial(_evaluated, value), frozenset(parser.names), None, percent is not None
    )


def is_at_least(left: Expression, right: Expression) -> bool:
    """Whether a constant is greater than or equal to another one; false if one of them is not real."""
    if left.names or right.names:
        return False
    try:
        difference = numbers.add(left.value({}), -right.value({}))
    except NoNumberError:
        return False
    return numbers.is_real(difference) and bool(numbers.approximate(difference).real >= 0)


def _evaluated(value: Value, variables: Mapping[str, Number]) -> Number:
    try:
        return value(variables)
    except RecursionError:
        raise TooLargeError("the formula is too long") from None
    except (
        ArithmeticError,
        TypeError,
        ValueError,
    ) as error:  # raised by mpmath at a pole or when complex numbers are ordered
        raise NoNumberError(str(error)) from None


def _constant(value: Number) -> Value:
    return lambda variables: value


def _of(function: Callable[..., Number], *arguments: Value) -> Value:
    return lambda variables: function(*(argument(variables) for argument in arguments))


class _Parser:
    """A recursive descent parser. Each method returns the value of the tokens that it has consumed."""

    def __init__(self, text: str) -> None:
        self._tokens = [
            (found.lastgroup or "", found.group(found.lastgroup or 0))
            for found in _TOKEN.finditer(text)
            if found.group().strip()
        ]
        self._at = 0
        self._depth = 0
        self._bars = 0
        self.names: set[str] = set()

    def whole(self) -> Value:
        value = self._sum()
        if self._at < len(self._tokens):
            raise UnreadableError(f"unexpected {self._token()!r}")
        return value

    def _token(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _kind(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _take(self, *tokens: str) -> bool:
        if self._token() in tokens and self._token():
            self._at += 1
            return True
        return False

    def _sum(self) -> Value:
        value = self._product()
        while self._token() in ("+", "-"):
            is_minus = self._take("-") or not self._take("+")
            term = self._product()
            value = _of(lambda a, b, minus=is_minus: numbers.add(a, -b if minus else b), value, term)
        return value

    def _product(self) -> Value:
        if self._take("-"):
            return _of(lambda a: -a, self._product())
        if self._take("+"):
            return self._product()
        value = self._power()

        while True:
            if self._take(*_TIMES):
                value = _of(numbers.multiply, value, self._signed_power())
            elif self._take(*_OVER):
                value = _of(numbers.divide, value, self._signed_power())
            elif self._begins_factor():
                # `2 3` is not a product; it may be a mixed number or a list.
                if self._kind() in ("number", "based") and self._tokens[self._at - 1][0] in (
                    "number",
                    "based",
                ):
                    raise UnreadableError("two adjacent numbers")
                value = _of(numbers.multiply, value, self._power())
            else:
                return value

    def _signed_power(self) -> Value:
        if self._take("-"):
            return _of(lambda a: -a, self._signed_power())
        return self._power()

    def _begins_factor(self) -> bool:
        kind = self._kind()
        token = self._token()
        if kind in ("number", "word", "based") or token in ("(", "[", "{", "\\{"):
            return True
        if token == "|":
            # After an opening bar, the next one closes it.
            return self._bars == 0

        return kind == "command" and (
            token[1:] in FUNCTIONS or token[1:] in _CONSTANTS or token[1:] in GREEK_NAMES or token in _ATOMS
        )

    def _power(self) -> Value:
        value = self._atom()
        while True:
            if self._take("^", "**"):
                # Convert degrees to radians.
                if self._take("\\circ"):
                    value = _of(lambda a: numbers.multiply(a, context.pi / 180), value)
                    continue
                value = _of(numbers.power, value, self._argument())
            elif self._take("!"):
                value = _of(numbers.double_factorial if self._take("!") else numbers.factorial, value)
            else:
                return value

    def _argument(self) -> Value:
        """Parse the argument of a command or a power: an expression in braces, or one token."""
        if self._take("{"):
            return self._until("}")
        if self._take("-"):
            return _of(lambda a: -a, self._argument())
        kind = self._kind()
        token = self._token()

        # Without braces, the argument of a power is one letter: x^ab is x^a b.
        if (
            kind == "word"
            and len(token) > 1
            and token not in _CONSTANTS
            and token not in ("sqrt", *FUNCTIONS)
        ):
            self._tokens[self._at] = (kind, token[1:])
            return self._name(token[0])

        value = self._atom()
        return _of(numbers.power, value, self._argument()) if self._take("^", "**") else value

    def _until(self, closing: str) -> Value:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise UnreadableError("it is nested too deeply")
        # Within brackets a bar opens an absolute value; within bars it closes the innermost one.
        bars = self._bars
        self._bars = self._bars + 1 if closing == "|" else 0
        value = self._sum()
        if not self._take(closing):
            raise UnreadableError(f"{closing!r} is missing")
        self._depth = self._depth - 1
        self._bars = bars

        return value

    def _atom(self) -> Value:
        kind = self._kind()
        token = self._token()
        self._at += 1
        if kind == "number":
            return _constant(_number(token))
        if kind == "based":
            return _constant(_in_base(token))

        if token in _OPENING and token != "\\{":
            value = self._until(_OPENING[token])
            return _of(abs, value) if token == "|" else value

        if kind == "word":
            return self._word(token)
        if token in _ATOMS:
            return _ATOMS[token](self)
        if kind == "command" and token[1:] in FUNCTIONS:
            return self._function(token[1:])
        if kind == "command" and (token[1:] in _CONSTANTS or token[1:] in GREEK_NAMES):
            return self._name(token[1:])
        raise UnreadableError(f"unexpected {token or 'the end'!r}")

    def _word(self, word: str) -> Value:
        if word == "sqrt":
            return self._square_root()
        if word in ("asin", "acos", "atan"):
            return self._function(f"arc{word[1:]}")
        if word in FUNCTIONS:
            return self._function(word)

        if len(word) == 1 or word in _CONSTANTS or word in GREEK_NAMES:
            # `f(x)` would otherwise be read as a product.
            if len(word) == 1 and self._token() == "(" and (word in "fghFG" or self._is_call(word)):
                raise UnreadableError("a function without a definition")
            return self._name(word)

        # Words of prose must not be parsed as products of single-letter variables.
        if is_prose(word):
            raise UnreadableError(f"the word {word!r}")

        # `xy` is a product: put the other letters back as tokens.
        self._tokens[self._at : self._at] = [("word", letter) for letter in word[1:]]
        return self._name(word[0])

    def _is_call(self, name: str) -> bool:
        """Whether a number in parentheses after a letter is an argument, as in P(2) and y(0)."""
        tokens = [token for _, token in self._tokens[self._at : self._at + 3]]
        return (
            len(tokens) == 3
            and tokens[2] == ")"
            and (tokens[1] == "0" or name.isupper() and tokens[1].isdigit())
        )

    def _name(self, name: str) -> Value:
        if self._take("_"):
            if self._take("{"):
                end = next(
                    (at for at in range(self._at, len(self._tokens)) if self._tokens[at][1] == "}"), None
                )
                if end is None:
                    raise UnreadableError("'}' is missing")
                below = "".join(token for _, token in self._tokens[self._at : end])
                self._at = end + 1
            else:
                below = self._token()
                self._at += 1
            name = f"{name}_{below}"

        if name in _CONSTANTS:
            constant = _CONSTANTS[name]
            # The unary plus rounds the constant to the precision in use.
            return _constant(constant if name in ("i", "imath") else +context.mpf(constant))

        self.names.add(name)
        return lambda variables: variables[name]

    def _function(self, name: str) -> Value:
        base = None
        exponent = None
        if name == "log" and self._take("_"):
            base = self._argument()
        if self._take("^"):
            exponent = self._argument()
        if self._take("_"):
            raise UnreadableError("a function with an index")
        argument = self._function_argument()
        value = (
            _of(logarithm, argument, base) if base else _of(functools.partial(apply_function, name), argument)
        )
        if exponent is None:
            return value
        inverse = functools.partial(apply_function, f"arc{name}") if name in ("sin", "cos", "tan") else None

        # `\sin^{-1}` is the inverse function, any other exponent a power.
        def raised(variables: Mapping[str, Number]) -> Number:
            degree = exponent(variables)
            if degree == -1 and inverse:
                return inverse(argument(variables))
            return numbers.power(value(variables), degree)

        return raised

    def _function_argument(self) -> Value:
        if self._take("("):
            return self._until(")")
        if self._take("{"):
            return self._until("}")
        value = self._power()
        # `\sin 2x` applies to the product, up to the next function.
        while self._begins_factor() and self._token().lstrip("\\") not in FUNCTIONS:
            value = _of(numbers.multiply, value, self._power())
        if self._take("/"):
            value = _of(numbers.divide, value, self._power())

        return value

    def _square_root(self) -> Value:
        degree: Value = _constant(Fraction(2))
        if self._take("["):
            degree = self._until("]")
        if self._take("("):
            return _of(root, self._until(")"), degree)
        return _of(root, self._argument(), degree)

    def _fraction(self) -> Value:
        above = self._argument()
        return _of(numbers.divide, above, self._argument())

    def _binomial(self) -> Value:
        above = self._argument()
        return _of(numbers.binomial, above, self._argument())


_ATOMS: dict[str, Callable[[_Parser], Value]] = {
    "\\sqrt": _Parser._square_root,
    "\\frac": _Parser._fraction,
    "\\binom": _Parser._binomial,
}


def _number(token: str) -> Fraction:
    digits, _, exponent = re.sub(r"[,{}]", "", token).lower().partition("e")
    if len(digits) > LONGEST_NUMBER or abs(int(exponent or 0)) > LONGEST_NUMBER:
        raise UnreadableError("the number is too long")
    return Fraction(digits.rstrip(".")) * Fraction(10) ** int(exponent or 0)


def _in_base(token: str) -> Fraction:
    digits, _, base = token.partition("_")
    try:
        return Fraction(int(digits, int(base.strip("{}"))))
    except ValueError:
        raise UnreadableError(f"{token!r} is not a number") from None


def is_prose(word: str) -> bool:
    """Whether a word is not a product of variables, such as xy or the consecutive letters abc."""
    lower = word.lower()
    is_run = "".join(sorted(word)) in string.ascii_lowercase
    return lower in _SHORT_WORDS or (len(word) > 2 and bool(set(lower) & set("aeiou")) and not is_run)
