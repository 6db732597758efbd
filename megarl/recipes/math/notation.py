"""Reads the notation of an answer: one spelling of equivalent LaTeX, its parts, names, and units.

A name is only the left side of a value: `x = 5` is an answer, 5. The right side of any other equation is not:
`x + y = 5` is a line, and `3x = 9` is not solved.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable

from megarl.recipes.math.formula import FUNCTION_NAMES, GREEK_NAMES, is_prose

_CHARACTERS = str.maketrans({
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys("−–—‐‑﹣", "-"),
    **dict.fromkeys("\u3000\u00a0\u2009\u202f\u200a", " "),
    **dict.fromkeys("\u200b\u2061\u2062\ufeff", ""),
    "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "∗": "*", "÷": "\\div ", "±": "\\pm ",
    "π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ",
    "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "⌀": "\\emptyset ",
    "ℝ": "\\mathbb{R}", "°": "^\\circ ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "≈": "\\approx ",
    "½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4", "⅕": " 1/5", "⅛": " 1/8",
    "“": '"', "”": '"', "’": "'", "…": "...",
})  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SPACES = (
    r"(?<!\\)\\[,;:> /"
    r"]|\\(?:q?quad|[hm]space\*?\{[^{}]*\}|[mh]?skip *-?[\d.]+ *[a-z]{2}|m?kern *-?[\d.]+ *[a-z]{2}"
    r"|(?:neg)?(?:thin|med|thick)space|enspace|enskip|space|nobreakspace|nobreak|allowbreak|hfill|newline"
    r"|displaystyle|textstyle|limits|nolimits|nonumber|phantom\{[^{}]*\})(?![A-Za-z])|~|\\\n"
)
_GAP = r"(?:\\[,;:> ]|~|\\(?:thin|med|thick)space(?![A-Za-z]))"
# A separator of thousands: a narrow space, a comma in braces, or a comma with spaces or negative spaces.
_FIRST_DIGITS = r"(?<![\d.,^_])[1-9]\d{0,2}"
_NARROW = r"\s*(?:\\!\s*)+,?\s*(?:\\!\s*)*|\s*,\s*(?:\\!\s*)+|\{,\}(?:\\!)?"
_CELLS = r"(?:(?!\\(?:begin|end)\{).)*"
_ARRAY = r"(?s)(?:\\left\s*)?[(\[]\s*\\begin\{array\}\{[lcr|]*\}"
_END_OF_ARRAY = r"\\end\{array\}\s*(?:\\right\s*)?[)\]]"
_MATRIX = r"\\begin{pmatrix}\1\\end{pmatrix}"
# One spelling of equivalent LaTeX: what is replaced, in this order.
_REWRITES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    # The layout: arrays that are matrices, other environments, the end, digits above and below the line.
    (rf"{_ARRAY}({_CELLS}&{_CELLS}){_END_OF_ARRAY}", _MATRIX),
    (
        r"(?s)\\begin\{(?:cases|aligned|array)\}(?:\{[lcr|]*\})?(.*)\\end\{(?:cases|aligned|array)\}",
        lambda found: ", ".join(
            line.strip() for line in found[1].replace("&", " ").split("\\\\") if line.strip()
        ),
    ),
    (r"[\s\\]+$", ""),
    ("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda found: f"^{{{found[0].translate(_RAISED)}}}"),
    ("[₀₁₂₃₄₅₆₇₈₉]+", lambda found: f"_{{{found[0].translate(_LOWERED)}}}"),
    # Separators of thousands. Commas with wide spaces may separate items of a list too.
    (r"^-?[1-9]\d{0,2}(?: \d{3})+$", lambda found: found[0].replace(" ", "")),
    (rf"{_FIRST_DIGITS}(?:(?:{_NARROW}|{_GAP})\d{{3}})+(?!\d)", lambda found: re.sub(r"\D", "", found[0])),
    (
        rf"{_FIRST_DIGITS}(?:(?:,\s*{_GAP}\s*|\s*{_GAP},\s*|,)\d{{3}})+(?!\d)",
        lambda found: re.sub(r"\D+", ",", found[0]),
    ),
    (r"(\d)\{,\}(?=\d)", r"\1."),  # a decimal comma
    # Spaces, sizes and commands with the same meaning.
    (r"(\\[A-Za-z]+)\s*\\!\s*", r"\1 "),
    (r"\s*\\!\s*", ""),
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""),
    (_SPACES, " "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\\(?:leq|leqslant|leqq)(?![A-Za-z])", r"\\le"),
    (r"\\(?:geq|geqslant|geqq)(?![A-Za-z])", r"\\ge"),
    (r"\\(?:neq|not\s*=)(?![A-Za-z])", r"\\ne"),
    ("<=", r"\\le "),
    (">=", r"\\ge "),
    ("!=", r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\(?:varnothing|O)(?![A-Za-z])", r"\\emptyset"),
    (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
    (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
    (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
    (r"\\(?:degree|deg)(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
    (r"\\l(floor|ceil)(?![A-Za-z])", r"\\\1("),
    (r"\\r(?:floor|ceil)(?![A-Za-z])", ")"),
    (r"\\operatorname\*?\s*\{([a-z]+)\}|\\math(?:rm|op)\s*\{(e|i|ln|log|sin|cos|tan)\}", r"\\\1\2 "),
    (r"\\(e|i) ", r"\1 "),
    (r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf)\s*\{([A-Za-z0-9]+)\}", r"\1"),
    (r"\\vec\s*(?:\{([A-Za-z0-9])\}|([A-Za-z0-9]))", r"\1\2"),
    (r"\\vec\s*\{", r"\\overrightarrow{"),
    (r"\\overline\s*\{\s*([A-Z][A-Z\s]*[A-Z])\s*\}", r"\1"),
    (r"\^\s*\\prime|\^\s*\{\s*\\prime\s*\}", "'"),
    (r"\^\s*\{\s*\\prime\s*\\prime\s*\}", "''"),
    (r"\\(?:underline|textcolor\s*\{\w+\}|color\s*\{\w+\})\s*\{([^{}]*)\}", r"\1"),
    (r"\\Bbb\s*\{?([A-Z])\}?|\\mathbb\s+([A-Z])", r"\\mathbb{\1\2}"),
    (r"\\mathbb\{R\}|\\R(?![A-Za-z])|\\Re(?![A-Za-z])", r"\\mathbb{R}"),
    # Currencies.
    (r"^(\s*-?\s*)\\?\$\s*(-?[\d.,]+[^$]*?)[\s.;]*$", r'\1\2 "dollars"'),
    (r"(?<!\\)\$|(?<!\\)\\[()\[\]]|[€£]|^USD(?= ?\d)", ""),
    # Words remain as quoted text; single letters and numbers in them are formulas.
    (
        r"\\(?:text(?:bf|rm|it|sf|tt|normal)?|mbox|hbox|mathrm|mathbf|emph)\s*\{([^{}]*)\}",
        lambda found: f' "{found[1].strip()}" ',
    ),
    (r'_\s*"(\w+)"', r"_{\1}"),
    (r'"\s*([A-Za-z])\s*"(?=\s*[_^=(])', r"\1"),
    (r'^\s*"([^"]*[\d\\][^"]*|[A-Za-z])"\s*$', r"\1"),
    (r"\s+", " "),  # the optional parts of the next rule would try long runs of spaces in all ways
    (r",? *\(?(?:\bfor\b)? *[a-z] *\\in *\\mathbb\{[ZN]\}(?:\^\+)?\)?$", ""),
    (r"^ | $", ""),
    (r"(?<!\.) ?[.;]$", ""),
)


def plain_latex(text: str) -> str:
    """Return the answer without formatting commands. `\\text{...}` becomes its words in quotation marks."""
    text = text.translate(_CHARACTERS).strip().strip("*")
    for pattern, same in _REWRITES:
        text = re.sub(pattern, same, text)
    return text.strip()


def with_matrices(text: str) -> str:
    """Return the LaTeX with arrays in brackets as matrices; one with a single column may also be a tuple."""
    return re.sub(rf"{_ARRAY}({_CELLS}){_END_OF_ARRAY}", _MATRIX, text)


# ---- the parts of an answer


# The signs between the sides of a relation; `P(X = 1)` is one side.
RELATIONS = re.compile(
    r"(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\in(?![A-Za-z])|\\approx|<|>|=)"
)
SEMICOLONS = re.compile("(;)")
# Commas, but not those of numbers such as 1,000.
_COMMAS = re.compile(r"((?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)|,)")
# Commas between digits that may separate thousands or items; items do not begin with a zero.
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,[1-9]\d\d)+(?!\d|,\d)")
OR = re.compile(r'\s*(?:"\s*,?or\s*"|\bor\b|\\lor|\\vee)\s*')
AND = re.compile(r'\s*(?:,\s*)?(?:"\s*,?and\s*"|\band\b|\\land|\\wedge|\\&)\s*')


def split(text: str, separator: re.Pattern[str] = _COMMAS) -> tuple[list[str], list[str]]:
    """Split text at separators outside brackets; return the parts and the separators."""
    parts = [""]
    found = []
    depth = 0.0
    for at, piece in enumerate(separator.split(text)):
        if at % 2 == 0 or piece[0].isdigit() or depth:
            parts[-1] += piece
            depth = depth_after(piece, depth)
        else:
            found.append(piece)
            parts.append("")

    return [part.strip() for part in parts], found


def with_wide_commas(text: str) -> str:
    """Return the text with a space after each comma that may separate thousands or items."""
    return _THOUSANDS.sub(lambda found: found.group().replace(",", ", "), text)


def listed(text: str) -> list[str]:
    """Split text at "and" and at commas; return it whole if a part would be empty."""
    parts = [part for each in AND.split(text) for part in split(each)[0]]
    return parts if all(parts) else [text]


def depth_after(text: str, depth: float = 0.0) -> float:
    """Return the number of open brackets after a text; minus infinity if one was closed that was not open."""
    steps = ((character in "([{") - (character in ")]}") for character in text)
    depths = list(itertools.accumulate(steps, initial=depth))
    return depths[-1] if min(depths) >= 0 else -math.inf


# ---- names

_SHORT = r"(?=.{1,100}\Z)"  # longer texts, which could take long, are no names
_GREEK = "|".join(sorted(GREEK_NAMES, key=len, reverse=True))
_LETTER = rf"(?:[A-Za-z]|(?:\\(?:{_GREEK}|ell|hbar)|\b(?:{_GREEK}))(?![A-Za-z]))"
_BELOW = r"(?:_\s*(?:\{[^{}]*\}|\\[a-z]+|\w))"
_MARKS = rf"(?:\s*(?:{_BELOW}|'|\^\s*\{{?\s*(?:\*|\\ast|\\circ)\s*\}}?))*"
# A point is a capital letter; two to five of them are a segment, a polygon or an abbreviation.
_POINTS = rf"[A-Z]{_MARKS}(?:\s*[A-Z]{_MARKS}){{1,4}}"
_ACCENTED = (
    r"\\(?:overline|overrightarrow|overleftrightarrow|widehat|widetilde|hat|bar|vec|tilde|d?dot)"
    r"(?![A-Za-z])\s*"
    rf"(?:\{{\s*(?:{_POINTS}|{_LETTER}{_MARKS})\s*\}}|{_LETTER}){_MARKS}"
)
# A geometric object or a marked letter, which is not a product of its letters.
_LABEL = (
    rf"(?:\\(?:measured|spherical)?angle\s*(?:[A-Z]{_MARKS}\s*)+"
    rf"|\\(?:tri|square)angle\s*{_POINTS}|{_ACCENTED})"
)
VARIABLE = re.compile(rf"{_LETTER}{_MARKS}")  # a single letter with an optional index
LABEL = re.compile(rf"{_SHORT}{_LABEL}")
# The arguments of a function are values and events: `f(x+1) = ...` is an equation for f.
_ARGUMENT = r"-?(?:[\w\s{}|'.]|\\(?:frac|sqrt|pi|cap|cup|mid|infty|theta|alpha|omega|lambda|bar|overline)\b)+"
_CALL = rf"\s*(?:\(\s*{_ARGUMENT}(?:,\s*{_ARGUMENT})*\)|\[\s*[A-Z]\w*\s*\])"
_OPERATOR = r"\\?(?:gcd|lcm|det|dim|deg|rank|tr|arg|max|min|[VvCc](?:ar|ov))(?![A-Za-z])"
_SET = r"(?:[A-Z]'?|\\overline\s*\{[A-Z]\}|\\complement\s*(?:_\s*\{?\w\}?)?\s*[A-Z])(?:\s*\^\s*\{?[cC]\}?)?"
_NAME = re.compile(
    "|".join(
        (
            rf"(?:{_LETTER}|{_ACCENTED}|\\mathbb\s*\{{[EP]\}}){_MARKS}"
            rf"(?:\s*\^\s*\{{?-1\}}?)?(?:{_CALL})?{_MARKS}",
            rf"\|?\s*(?:{_POINTS}|{_ACCENTED})\s*\|?|\\frac\s*\{{\s*{_POINTS}\s*\}}\s*\{{\s*{_POINTS}\s*\}}",
            rf"{_POINTS}\s*[/:]\s*{_POINTS}",
            rf"[A-Z]{_MARKS}\s*\^\s*\{{?(?:-1|T|\\top)\}}?",
            rf"m?\s*{_LABEL}",
            rf"\(\s*{_LETTER}{_MARKS}(?:,\s*{_LETTER}{_MARKS})+\)",
            rf"{_LETTER}{_MARKS}(?:\s*:\s*{_LETTER}{_MARKS})+",
            r"\\frac\s*\{\s*(?:d|\\partial)(?![\w]*\d)[^{}]*\}\s*\{\s*(?:d|\\partial)[^{}]*\}",
            rf"\|?\(?{_SET}(?:\s*\\(?:cap|cup|setminus)\s*\(?{_SET}\)?)+\|?",
            r"\\(?:lim|sum|prod|i*int)(?![A-Za-z])[^+]*|[PE]\s*\([^()]*\)",
            rf"{_OPERATOR}(?:_\s*\{{[^{{}}]*\}})?\s*"
            rf"(?:\([^()=]*\)|\{{[^{{}}=]*\}}|{_LETTER}{_MARKS}(?:{_CALL})?)",
        )
    )
)
# Words, also with the points or the argument that they are about: `"Area of" ABC`, `"Var"(X)`.
_WORDS = re.compile(
    rf"(?:{_LETTER}{_MARKS}\s*)?\"[^\"\d=]+\"\s*(?:\\(?:tri|square)angle\s*)?"
    rf"(?:{_POINTS}|{_LETTER}{_MARKS}|[(\[][^()=\[\]]*[)\]])?\s*(?:\"[^\"\d=]*\")?"
)
_ANGLE = rf"(?:\\angle\s*[A-Z]+|[A-Z]|(?:2\s*)?\\(?:{_GREEK}))"
# A quantity that a problem asks for, such as `\sin A` or `|z|`.
ASKED_FOR = re.compile(
    rf"{_SHORT}(?:\\?(?:sin|cos|tan|cot|sec|csc)\s*(?:{_ANGLE}|\(\s*{_ANGLE}\s*\))"
    rf"|\|\s*{_LETTER}{_MARKS}\s*\|)"
)


def is_name(text: str) -> bool:
    """Whether the text only names a value, so that an equation with it on the left states that value."""
    if len(text) > 100:
        return False
    if _NAME.fullmatch(text) or _WORDS.fullmatch(text):
        return True

    words = text.split()
    return all(map(str.isalpha, words)) and any(map(is_prose, words)) and not FUNCTION_NAMES & set(words)


# ---- units


APPROXIMATELY = re.compile(r"^(?:approximately|approx\.?|about|\\approx|\\sim|=)\s*", re.IGNORECASE)
_UNITS = (
    "mm", "cm", "dm", "km", "m", "mg", "kg", "g", "lb", "oz", "ml", "l", "s", "ms", "min", "h", "hr", "hrs",
    "mph", "kph", "km/h", "m/s", "ft", "in", "yd", "deg", "rad", "N", "J", "W", "Hz",
)  # fmt: skip
# The longest come first, so that no unit matches the beginning of another.
_ANY_UNIT = "|".join(map(re.escape, sorted(_UNITS, key=len, reverse=True)))
_CLEAR_UNIT = re.compile(
    rf"\s*(?:(?P<known>(?<=[\d\s}}])(?:{_ANY_UNIT}))(?:\^\{{?[23]\}}?)?"
    r"|(?P<words>[A-Za-z]{3,}(?:[ /-][A-Za-z]+)*)(?:\^\{?[23]\}?)?)\s*$"
)
_SAME_UNITS = {
    **dict.fromkeys(("centimeter", "centimetre"), "cm"),
    **dict.fromkeys(("meter", "metre"), "m"),
    **dict.fromkeys(("kilometer", "kilometre"), "km"),
    **dict.fromkeys(("liter", "litre"), "l"),
    **dict.fromkeys(("inche", "inch"), "in"),
    **dict.fromkeys(("foot", "feet"), "ft"),
    **dict.fromkeys(("second", "sec"), "s"),
    **dict.fromkeys(("hour", "hr"), "h"),
    **dict.fromkeys(("square inche", "square inch"), "in^2"),
    **dict.fromkeys(("square foot", "square feet"), "ft^2"),
    "millimeter": "mm",
    "gram": "g",
    "kilogram": "kg",
    "minute": "min",
    "usd": "dollar",
    **dict.fromkeys(("percent", "pct", "percentage"), "%"),
    "deg": "degree",
    "square centimeter": "cm^2",
    "square meter": "m^2",
    "cubic meter": "m^3",
    "cubic centimeter": "cm^3",
}
_NO_UNIT = re.compile(r"(?:square |cubic |sq )?unit|unit\^[23]|each|(?:in )?total|way|solution")
# Words after a number that are part of its value, and no unit.
SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_NOT_UNITS = re.compile(
    r"\b(?:squared|cubed|factorial|hal(?:f|ve)|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth"
    r"|thousandth|over|mod|modulo|plus|minus|choose|not|isn't|n?or|if|unless|except|maybe)s?\b|(?<!\^)\d"
)
_SIGNS_OF_UNITS = {"degree": r"\s*\^\s*\\circ\s*(?:C|F)?\s*$", "%": r"\s*\\?%$"}
_ORDINAL = re.compile(r'(?<=\d)\s*\^?\s*\{?\s*"?(?:st|nd|rd|th)"?\s*\}?$')


def readings_of_units(text: str) -> list[tuple[str, str]]:
    """Return the text without its unit, and the unit, for each possible interpretation of the text."""
    # The argument of a function may be an angle in degrees.
    if re.search(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])", text):
        return [(text, "")]
    # Try the units in order: signs, quoted words, and known names without quotes.
    for unit, pattern in _SIGNS_OF_UNITS.items():
        without = re.sub(pattern, "", text)
        if without != text:
            return [(without, unit)]
    text = _ORDINAL.sub("", text)
    quoted = re.search(r'^([^"]*+)"([^"]*+)"\s*((?:\^\{?[23]\}?)?)\s*$', text)
    if quoted and len(quoted[2]) == 1 and quoted[2].lower() not in map(str.lower, _UNITS):
        return [(text.replace('"', " "), "")]  # a variable
    plain = APPROXIMATELY.sub("", text)
    ways = [(plain, "")]
    known = _CLEAR_UNIT.search(plain)
    if '"' in text:
        is_value = quoted and re.search(r"[\d\\A-Za-z]", quoted[1])
        ways = [(quoted[1], _unit(quoted[2] + quoted[3]))] if quoted and is_value else []
    elif known and re.search(r"\d\W*$", plain[: known.start()]):
        is_clear = len(known["known"] or known["words"]) > 1  # one letter may be a variable
        ways.insert(0 if is_clear else 1, (plain[: known.start()], _unit(known[0].strip())))

    return [way for way in ways if not _NOT_UNITS.search(way[1])]


def _unit(text: str) -> str:
    """Return the normalized spelling of a unit, in the singular; empty if it is not a unit."""
    text = re.sub(r"[{}]", "", re.sub(r"\s+", " ", text.lower().strip(" .,")))
    singular = re.sub(r"(?<=..)(?<!s)s$", "", text)
    unit = _SAME_UNITS.get(singular, _SAME_UNITS.get(text, singular))
    return "" if _NO_UNIT.fullmatch(unit) else unit
