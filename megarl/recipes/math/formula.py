"""Parses a formula in LaTeX or plain text, and evaluates it at fixed points.

Numbers, variables and brackets are replaced by marks for their values, from the inside outward, until one sum
of products is left: `2\\sin(x+1)` is `#0;\\sin&3;`, then `#0;@4;`. Nothing recurses, rational numbers are
exact, all others have 120 digits, and their size is limited, since a response could require any time.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
import re
import string
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath

Number = Any  # Fraction if it is exact, otherwise context.mpf or context.mpc
Values = tuple[Any, ...]
context = mpmath.MPContext()
context.prec = 400
_SAME = 2.0**-300  # relative error of two numbers that are equal
_ZERO = 2.0**-350  # size of a number that is only the rounding error of zero
_MOST_BITS = 200_000  # maximum size of an exact number
_LONGEST_NUMBER = 4000  # digits
_LARGEST = 2**50  # maximum argument of a function
_LARGEST_EXACT = 1000  # maximum argument of an exact factorial or binomial coefficient
_LONGEST_FORMULA = 20_000  # characters
_NUM_POINTS = 15
_FEWEST_POINTS = 3  # minimum number of points at which two formulas must have values
_WHOLE = (2, 3, 5, 7)  # for formulas that have values only at integers, such as (-1)^n


class Formula(NamedTuple):
    """A formula by its values at fixed points, which are None where it has none, as in a division by zero.

    Attributes:
        values: One value for each point; only one for a formula without variables.
        last_place: The value of one unit in the last place of a decimal number; None for other formulas.
        unit: "%" or the words after a number, such as "cm"; empty without a unit.
        latex: The text of the formula.
    """

    values: Values
    names: frozenset[str] = frozenset()
    last_place: Fraction | None = None
    unit: str = ""
    latex: str = ""

    def times(self, factor: Number, unit: str = "") -> Formula:
        place = self.last_place * factor if self.last_place and isinstance(factor, Fraction) else None
        return Formula(_at_each(operator.mul, self.values, (factor,)), self.names, place, unit)

    def minus(self, other: Formula) -> Formula:
        values = _at_each(lambda left, right: _add(left, -right), self.values, other.values)
        return Formula(values, self.names | other.names)


# ---- arithmetic


def _at_each(function: Callable[..., Number], *operands: Values) -> Values:
    """Apply a function at each point. An operand without variables has the same value at all of them."""
    rows = zip(*map(itertools.cycle, operands), strict=False)
    return tuple(_checked(function, *row) for row in itertools.islice(rows, max(map(len, operands))))


def _checked(function: Callable[..., Number], *operands: Number) -> Number | None:
    try:
        value = function(*operands)
    # mpmath raises these at a pole, when complex numbers are ordered, or for an operand that is None.
    except (ArithmeticError, TypeError, ValueError):
        return None
    if not isinstance(value, Fraction):
        return value if context.isfinite(value) else None
    return value if _bits(value) <= _MOST_BITS else context.convert(value)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _size(value: Number) -> Any:
    return abs(context.convert(value))


def _add(left: Number, right: Number) -> Number:
    total = left + right
    # A difference of nearly equal numbers is only rounding error.
    is_rounding = not isinstance(total, Fraction) and abs(total) < _ZERO * max(_size(left), _size(right))
    return Fraction(0) if is_rounding else total


def over(above: Number, below: Number) -> Number:
    return above * (1 / below if isinstance(below, Fraction) else context.mpf(1) / below)


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) >= _LARGEST or base == 0 and not context.convert(exponent).real > 0:
        raise ValueError("the exponent is too large, or zero has no such power")
    if isinstance(exponent, Fraction) and not isinstance(base, context.mpc):
        is_whole = exponent.denominator == 1
        if is_whole and isinstance(base, Fraction) and abs(exponent) * _bits(base) <= _MOST_BITS:
            return base**exponent.numerator
        # An odd root of a negative number is real, where mpmath gives the complex principal root.
        if not is_whole and exponent.denominator % 2 and base < 0:
            return (-1) ** (exponent.numerator % 2) * context.power(-base, exponent)
    return context.power(base, exponent)


def _counted(exact: Callable[..., int], near: Callable[..., Any], *operands: Number) -> Number:
    """Return a factorial or a binomial coefficient, exactly if its operands are small whole numbers."""
    if max(map(_size, operands)) >= _LARGEST:
        raise ValueError("the operand is too large")
    are_whole = all(isinstance(each, Fraction) and each.denominator == 1 for each in operands)
    if are_whole and min(operands) >= 0 and max(operands) <= _LARGEST_EXACT:
        return Fraction(exact(*map(int, operands)))
    return near(*map(context.convert, operands))


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(context, name) for name in ("sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh")},
    **{name: getattr(context, name) for name in ("tanh", "exp", "ln", "floor", "ceil")},
    **{
        f"{arc}{name}": getattr(context, f"a{name}") for arc in ("a", "arc") for name in ("sin", "cos", "tan")
    },
    "log": context.ln,
    "!": functools.partial(_counted, math.factorial, context.factorial),
    "!!": context.fac2,
}
FUNCTION_NAMES = frozenset(name for name in _FUNCTIONS if name.isalpha())


@functools.lru_cache(maxsize=4096, typed=True)
def _apply(name: str, power: Number, value: Number) -> Number:
    """Return a power of a function; `\\sin^{-1}` is the inverse function."""
    if abs(value) >= _LARGEST:
        raise ValueError("the argument is too large")
    if power == -1 and f"arc{name}" in _FUNCTIONS:
        return _FUNCTIONS[f"arc{name}"](value)
    result = _FUNCTIONS[name](value)
    # A value that should be 0, such as sin(pi), is only rounded to almost 0.
    return _power(Fraction(0) if abs(result) < _ZERO else result, power)


# ---- the parser

_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma "
    "tau phi varphi chi psi omega"
)
GREEK_NAMES = frozenset(_GREEK.split()) | frozenset(name.capitalize() for name in _GREEK.split())
# The plus rounds a constant.
_CONSTANTS = {"pi": +context.pi, "e": +context.e, "i": context.mpc(0, 1), "imath": context.mpc(0, 1)}
_COMMANDS = {*FUNCTION_NAMES, "sqrt", "frac", "binom", "logbase", "circ"}
# Words that are not products of two variables.
_SHORT_WORDS = ("no", "if", "in", "is", "it", "of", "on", "or", "so", "to", "we")
_THOUSANDS = r"\d{1,3}(?:(?:,|\{,\})\d{3})+"
_TOKEN = re.compile(
    r"(?P<digits>(?=[A-F]*\d)[0-9A-F]++)_(?:\{(?P<base>\d+)\}|(?P<plain_base>\d+))"
    rf"|(?P<number>{_THOUSANDS}(?!\d)(?:\.\d+)?|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+(?![A-Za-z]))?)"
    r"|(?P<slash>\\?)(?P<word>[A-Za-z]+)(?P<index>\s*_\s*(?:\{[^{}]*\}|\d+|\\?[A-Za-z]+))?"
)
_DECIMAL = re.compile(
    rf"\s*([+-]?)\s*({_THOUSANDS}|\d*)\.(\d+)\s*"
    r"(?:[eE]([+-]?\d+)|(?:\\times|\\cdot|\*)\s*10\s*(?:\^|\*\*)\s*\{?\s*(-?\d+)\s*\}?)?\s*"
)
_ELLIPSIS = r"\s*(?:\\[lc]?dots|\.\.\.|…)"
_REPEATING = re.compile(
    r"(?<![\d.])(?P<before>\d*)\.(?P<after>\d*?)(?:\\(?:overline|bar|dot)\s*\{\s*(?P<line>\d+)\s*\}"
    r"|\(\s*(?P<round>\d+)\s*\)"
    rf"|(?:(?P<digit>\d)(?P=digit){{2,}}|(?P<period>\d{{2,20}}?)(?P=period)+){_ELLIPSIS})"
)
_CONTINUED = re.compile(rf"(?<=\d){_ELLIPSIS}\s*$")
# A function without a definition would be read as a product.
_CALL = re.compile(r"(?<![A-Za-z\\_])(?:[fghFG]\s*\(|[A-Z]\s*\(\s*\d+\s*\)|[A-Za-z]\s*\(\s*0\s*\))")
_BRACKETS = re.compile(r"\(([^()\[\]{}]*)\)|\[([^()\[\]{}]*)\]|(?<!\\)\{([^()\[\]{}]*)(?<!\\)\}")
_MARK = r"\s*[#@&]\d+;"  # of a number, another value, or brackets
_TWO_NUMBERS = re.compile(r"(?<![a-z]\^)#\d+;\s*#")
_PRODUCT = rf"{_MARK}(?:(?:\s*[*/][\s-]*)?{_MARK})*"
_SUM = re.compile(rf"[\s+-]*{_PRODUCT}(?:\s*[+-][\s+-]*{_PRODUCT})*\s*")
_TERM = re.compile(rf"([\s+-]*)({_PRODUCT})")
_FACTOR = re.compile(r"([\s*/-]*)[#@&](\d+);")


def _rules_of_functions(argument: str) -> tuple[tuple[re.Pattern[str], Callable[..., Number]], ...]:
    name = rf"\\({'|'.join(sorted(FUNCTION_NAMES, key=len, reverse=True))})(?![A-Za-z])"
    return (
        (
            re.compile(rf"\\logbase\^({_MARK}){argument}"),
            lambda base, at: over(context.ln(at), context.ln(base)),
        ),
        (re.compile(rf"{name}\s*\^(\s*-?{_MARK}){argument}"), _apply),
        (re.compile(rf"{name}{argument}"), lambda function, at: _apply(function, Fraction(1), at)),
    )


# These are replaced by their values in this order, beginning again after each replacement. Without brackets,
# the argument of a function is a product up to the next function, and one division.
_RULES = (
    (re.compile(rf"\\frac({_MARK})({_MARK})"), over),
    (
        re.compile(rf"\\binom({_MARK})({_MARK})"),
        functools.partial(_counted, math.comb, context.binomial),
    ),
    (
        re.compile(rf"\\sqrt\^({_MARK})({_MARK})"),
        lambda degree, value: _power(value, over(Fraction(1), degree)),
    ),
    (re.compile(rf"\\sqrt({_MARK})"), lambda value: _power(value, Fraction(1, 2))),
    *_rules_of_functions(r"(\s*&\d+;)"),
    (re.compile(rf"({_MARK})\s*\\circ"), lambda value: value * (context.pi / 180)),
    (re.compile(rf"({_MARK})\s*\^(\s*-?{_MARK})(?!\s*\^)"), _power),
    (re.compile(rf"({_MARK})\s*(!!?)"), lambda name, value: _apply(name, Fraction(1), value)),
    (re.compile(r"\|([^|\\]*;\s*)\|"), abs),
    *_rules_of_functions(rf"(\s*-?{_MARK}(?:{_MARK})*(?:\s*/{_MARK})?)(?!{_MARK}|\s*[\^!])"),
)


def _as_fraction(found: re.Match[str]) -> str:
    # The repeating decimal 0.ppp... of a period with n digits is p / (10 ** n - 1).
    period = found["line"] or found["round"] or found["digit"] or found["period"]
    start = found["before"] + found["after"]
    value = Fraction(
        int(start + period) - int(start or 0), (10 ** len(period) - 1) * 10 ** len(found["after"])
    )
    return f"({value.numerator}/{value.denominator})"


def _as_sum(found: re.Match[str]) -> str:
    whole, above, below = filter(None, found.groups())
    return f"({whole}+{above}/{below})" if int(above) < int(below) else found.group()


# A single digit or letter as an argument needs no braces; the index of a logarithm is its base.
_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (_REPEATING, _as_fraction),
    (re.compile(r"\\(frac|binom)\s*(\d|[A-Za-z])\s*(?=[\d{A-Za-z\\])"), r"\\\1{\2}"),
    (re.compile(r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\d|[A-Za-z])"), r"\1{\2}"),
    (re.compile(r"\\?log\s*_\s*(\d+|[A-Za-z])"), r"\\logbase^{\1}"),
    (re.compile(r"\\?log\s*_"), r"\\logbase^"),
    (re.compile(r"\\?sqrt\s*\["), r"\\sqrt^["),
    (re.compile(r"(?:\^|\*\*)\s*\\circ(?![A-Za-z])"), r"\\circ "),
    (re.compile(r"\\(?:cdot|times|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\*\*"), "^"),
    (
        re.compile(
            r"(?<![\w.^_{/\\)])(\d+)"
            r"(?:\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|\s+(\d+)\s*/\s*(\d+)(?![\d.]))"
        ),
        _as_sum,
    ),
)


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Formula:
    """Parse a formula that has one value for each choice of its variables.

    Raises:
        ValueError: The text is something else, such as a set, an equation or a sentence.
    """
    # Dots without a repeating period only mean that the digits continue.
    decimal = None if _REPEATING.search(text) else _DECIMAL.fullmatch(_CONTINUED.sub("", text))
    if decimal:
        sign, whole, decimals, *exponents = decimal.groups()
        exponent = int("".join(filter(None, exponents))[:9] or 0)
        value = _decimal(f"{sign}{whole}.{decimals}e{exponent}")
        return Formula((value,), last_place=_decimal(f"1e{exponent - len(decimals)}"))

    for pattern, same in _REWRITES:
        text = pattern.sub(same, text)
    if len(text) > _LONGEST_FORMULA or _CALL.search(text):
        raise ValueError("a long formula, or a function without a definition")

    return _evaluated(text)


def _decimal(digits: str) -> Fraction:
    plain, _, exponent = re.sub(r"[,{}]", "", digits).lower().partition("e")
    if len(plain) > _LONGEST_NUMBER or len(exponent) > 5 or abs(int(exponent or 0)) > _LONGEST_NUMBER:
        raise ValueError("the number is too long")
    return Fraction(plain.rstrip(".")) * Fraction(10) ** int(exponent or 0)


def is_prose(word: str) -> bool:
    """Whether a word is not a product of variables, such as xy or the consecutive letters abc."""
    lower = word.lower()
    is_run = "".join(sorted(word)) in string.ascii_lowercase
    return lower in _SHORT_WORDS or (len(word) > 2 and bool(set(lower) & set("aeiou")) and not is_run)


def _evaluated(text: str) -> Formula:
    """Evaluate a formula by replacing its parts by marks with the index of their values."""
    marked: list[Values] = []
    names: set[str] = set()

    def mark(values: Values, kind: str = "@") -> str:
        marked.append(values)
        return f"{kind}{len(marked) - 1};"

    def token(found: re.Match[str]) -> str:
        if found["digits"]:
            return mark((Fraction(int(found["digits"], int(found["base"] or found["plain_base"]))),), "#")
        if found["number"]:
            return mark((_decimal(found["number"]),), "#")
        word = found["word"]
        if word in _COMMANDS and not found["index"]:
            return f"\\{word}"
        is_letter = len(word) == 1 or word in _CONSTANTS or word in GREEK_NAMES
        if not is_letter and (found["slash"] or is_prose(word)):
            raise ValueError(f"the word {word!r}")
        letters = [word] if is_letter else list(word)  # `xy` is a product
        letters[-1] += re.sub(r"[\s{}\\]", "", found["index"] or "")
        names.update(letter for letter in letters if letter not in _CONSTANTS)
        return "".join(mark(_at_points(letter)) for letter in letters)

    def replaced(function: Callable[..., Number], found: re.Match[str]) -> str:
        functions = [group for group in found.groups() if group in _FUNCTIONS]
        operands = [total(group) for group in found.groups() if group not in _FUNCTIONS]
        return mark(_at_each(functools.partial(function, *functions), *operands))

    def flat(text: str) -> Values:
        """Return the values of a text without brackets."""
        at = 0
        while at < len(_RULES):
            text, count = _RULES[at][0].subn(functools.partial(replaced, _RULES[at][1]), text)
            at = 0 if count else at + 1
        return total(text)

    def total(text: str) -> Values:
        """Return the values of a sum of products of marks."""
        # A space that several parts of the pattern may match takes exponential time if the text is no sum.
        text = "".join(text.split())
        if not _SUM.fullmatch(text):
            raise ValueError(f"unexpected {text!r}")
        values: Values = (Fraction(0),)
        for signs, product in _TERM.findall(text):
            term: Values = (Fraction((-1) ** f"{signs}{product}".count("-")),)
            for sign, number in _FACTOR.findall(product):
                term = _at_each(over if "/" in sign else operator.mul, term, marked[int(number)])
            values = _at_each(_add, values, term)
        return values

    text = _TOKEN.sub(token, text)
    if _TWO_NUMBERS.search(text):  # it may be a mixed number or a list
        raise ValueError("two adjacent numbers")
    while _BRACKETS.search(text):
        text = _BRACKETS.sub(lambda found: mark(flat(next(filter(None, found.groups()), "")), "&"), text)

    return Formula(flat(text), frozenset(names))


@functools.lru_cache(maxsize=4096)
def _at_points(name: str) -> Values:
    """Return the values of a variable: positive at the first eight points, then whole, then negative.

    The values are derived from a hash, so that a verdict never differs between processes.
    """
    if name in _CONSTANTS:
        return (_CONSTANTS[name],)
    hashed = [hashlib.sha256(f"{number % 12} {name}".encode()).digest()[0] for number in range(_NUM_POINTS)]
    wholes = [Fraction(_WHOLE[each % len(_WHOLE)]) for each in hashed[8:12]]
    parts = [Fraction(11 + each % 89, 37) for each in hashed]
    return (*parts[:8], *wholes, *(-part for part in parts[12:]))


# ---- comparison


def is_real(value: Number) -> bool:
    return not isinstance(value, context.mpc) or abs(value.imag) <= _SAME * abs(value.real)


def same_number(left: Number, right: Number) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction) or not context.isfinite(left + right):
        return left == right
    return bool(_size(_add(left, -right)) <= _SAME * max(_size(left), _size(right)))


def same_value(left: Formula, right: Formula) -> bool:
    """Whether two constants are equal, or two formulas with variables agree at enough points."""
    if not left.names and not right.names:
        return _same_constant(left, right)
    both = (itertools.cycle(left.values), itertools.cycle(right.values))
    points = itertools.islice(zip(*both, strict=True), _NUM_POINTS)
    pairs = [pair for pair in points if None not in pair]
    # A root of a negative number may be another one of several complex numbers.
    others = [pair for pair in pairs[_FEWEST_POINTS:] if all(map(is_real, pair))]
    is_known = len(pairs) >= _FEWEST_POINTS
    return is_known and all(same_number(*pair) for pair in (*pairs[:_FEWEST_POINTS], *others))


def _same_constant(left: Formula, right: Formula) -> bool:
    pair = (left.values[0], right.values[0])
    if None in pair or same_number(*pair):
        return None not in pair
    # A decimal agrees up to its last place, at least six digits: 0.333333 is 1/3.
    places = [place for place in (left.last_place, right.last_place) if place is not None]
    distance = _distance(left, right)
    return bool(
        places
        and distance is not None
        and abs(distance) < context.convert(max(places))
        and abs(distance) <= 2e-6 * max(map(_size, pair))
    )


def _distance(left: Formula, right: Formula) -> Any:
    """Return the difference of two real constants; None for other formulas."""
    value = left.minus(right).values[0]
    is_known = not left.names | right.names and value is not None and is_real(value)
    return context.convert(value).real if is_known else None


def is_below(left: Formula, right: Formula) -> bool:
    """Whether a constant is less than another one; true if it is not known."""
    distance = _distance(left, right)
    return distance is None or bool(distance < 0)


def is_rounded(exact: Formula, rounded: Formula) -> bool:
    """Whether a number is the other one rounded to its last place, or to an integer."""
    distance = _distance(exact, rounded)
    place = context.convert(rounded.last_place or Fraction(1, 2))
    return distance is not None and bool(abs(distance) <= place)
