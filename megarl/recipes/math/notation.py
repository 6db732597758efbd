"""Reads the notation of an answer: one spelling of equivalent LaTeX, its parts, and the unit of a number."""

from __future__ import annotations

import re

_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: " "}
_CHARACTERS = {
    **dict.fromkeys("−–—‐‑﹣", "-"),
    **dict.fromkeys("\u00a0\u2009\u202f\u200a", " "),
    **dict.fromkeys("\u200b\u2061\u2062\ufeff", ""),
    "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "∗": "*", "÷": "\\div ", "±": "\\pm ",
    "π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ",
    "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "⌀": "\\emptyset ",
    "ℝ": "\\mathbb{R}", "°": "^\\circ ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "≈": "\\approx ",
    "½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4", "⅕": " 1/5", "⅛": " 1/8",
    "“": '"', "”": '"', "’": "'", "…": "...",
}  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SPACES = (
    r"\\[,;:> /"
    r"]|\\(?:q?quad|[hm]space\*?\{[^{}]*\}|[mh]?skip *-?[\d.]+ *[a-z]{2}|m?kern *-?[\d.]+ *[a-z]{2}"
    r"|(?:neg)?(?:thin|med|thick)space|enspace|enskip|space|nobreakspace|nobreak|allowbreak|hfill|newline"
    r"|displaystyle|textstyle|limits|nolimits|nonumber|phantom\{[^{}]*\})(?![A-Za-z])|~|\\\n"
)
_GAP = r"(?:\\[,;:> ]|~|\\(?:thin|med|thick)space(?![A-Za-z]))"
# A separator of thousands: a narrow space, a comma in braces, or a comma with spaces or negative spaces.
_NARROW = r"\s*(?:\\!\s*)+,?\s*(?:\\!\s*)*|\s*,\s*(?:\\!\s*)+|\{,\}(?:\\!)?"
_TIGHT_THOUSANDS = re.compile(rf"(?<![\d.,^_])[1-9]\d{{0,2}}(?:(?:{_NARROW}|{_GAP})\d{{3}})+(?!\d)")
_WIDE_THOUSANDS = re.compile(
    rf"(?<![\d.,^_])[1-9]\d{{0,2}}(?:(?:,\s*{_GAP}\s*|\s*{_GAP},\s*|,)\d{{3}})+(?!\d)"
)
_SIZES = r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?"
_SAME_COMMANDS = {
    r"\\[dtc]frac(?![A-Za-z])": r"\\frac",
    r"\\[dt]binom(?![A-Za-z])": r"\\binom",
    r"\\(?:leq|leqslant|leqq)(?![A-Za-z])": r"\\le",
    r"\\(?:geq|geqslant|geqq)(?![A-Za-z])": r"\\ge",
    r"\\(?:neq|not\s*=)(?![A-Za-z])": r"\\ne",
    r"\\lt(?![A-Za-z])": "<",
    r"\\gt(?![A-Za-z])": ">",
    r"\\(?:varnothing|O)(?![A-Za-z])": r"\\emptyset",
    r"\\(?:lbrace)(?![A-Za-z])": r"\\{",
    r"\\(?:rbrace)(?![A-Za-z])": r"\\}",
    r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])": "|",
    r"\\(?:degree|deg)(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}": r"^\\circ ",
    r"\\(?:lfloor|rfloor)": r"\\floor",
    r"\\operatorname\*?\s*\{([a-z]+)\}|\\math(?:rm|op)\s*\{(e|i|ln|log|sin|cos|tan)\}": r"\\\1\2 ",
    r"\\(e|i) ": r"\1 ",
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf)\s*\{([A-Za-z0-9]+)\}": r"\1",
    r"\\vec\s*(?:\{([A-Za-z0-9])\}|([A-Za-z0-9]))": r"\1\2",
    r"\\vec\s*\{": r"\\overrightarrow{",
    r"\\overline\s*\{\s*([A-Z][A-Z\s]*[A-Z])\s*\}": r"\1",
    r"\^\s*\\prime|\^\s*\{\s*\\prime\s*\}": "'",
    r"\^\s*\{\s*\\prime\s*\\prime\s*\}": "''",
    r"\\(?:underline|textcolor\s*\{\w+\}|color\s*\{\w+\})\s*\{([^{}]*)\}": r"\1",
    r"\\Bbb\s*\{?([A-Z])\}?|\\mathbb\s+([A-Z])": r"\\mathbb{\1\2}",
    r"\\mathbb\{R\}|\\R(?![A-Za-z])|\\Re(?![A-Za-z])": r"\\mathbb{R}",
}
_TEXT = re.compile(r"\\(?:text(?:bf|rm|it|sf|tt|normal)?|mbox|hbox|mathrm|mathbf|emph)\s*\{([^{}]*)\}")


def plain_latex(text: str) -> str:
    """Return the answer without formatting commands. `\\text{...}` becomes its words in quotation marks."""
    # First the layout: wide characters, environments, superscript and subscript digits.
    text = text.translate(_WIDE).strip().strip("*")
    text = re.sub(
        r"\\begin\{(?:cases|aligned|array)\}(?:\{[lcr|]*\})?(.*)\\end\{(?:cases|aligned|array)\}",
        _joined_lines,
        text,
        flags=re.DOTALL,
    )
    text = re.sub(r"[\s\\]+$", "", text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda raised: f"^{{{raised.group().translate(_RAISED)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda lowered: f"_{{{lowered.group().translate(_LOWERED)}}}", text)
    text = "".join(_CHARACTERS.get(character, character) for character in text)
    # Remove narrow separators of thousands. Commas with wide spaces may separate items of a list too.
    if re.fullmatch(r"-?[1-9]\d{0,2}(?: \d{3})+", text):
        text = text.replace(" ", "")
    text = _TIGHT_THOUSANDS.sub(lambda found: re.sub(r"\D", "", found.group()), text)
    text = _WIDE_THOUSANDS.sub(lambda found: re.sub(r"\D+", ",", found.group()), text)
    text = re.sub(r"(\d)\{,\}(?=\d)", r"\1.", text)  # a decimal comma
    text = re.sub(
        r"(\\[A-Za-z]+)?\s*\\!\s*", lambda found: f"{found.group(1)} " if found.group(1) else "", text
    )
    text = re.sub(_SIZES, "", text)
    text = re.sub(_SPACES, " ", text)
    for pattern, same in _SAME_COMMANDS.items():
        text = re.sub(pattern, same, text)
    text = (
        re.sub(r"\\\$|(?<!\\)\$(?=\s*\d)", ' "dollars" ', text)
        if re.fullmatch(r"\s*-?\s*\\?\$\s*-?[\d.,]+[^$]*", text)
        else text
    )
    text = re.sub(r"(?<!\\)\$|\\[()\[\]]", "", text)
    text = re.sub(r"[€£]|^USD(?= ?\d)", "", text)
    # Words remain as quoted text; single letters and numbers in them are formulas.
    text = _TEXT.sub(lambda found: f' "{found.group(1).strip()}" ', text)
    text = re.sub(r'(?:_)\s*"(\w+)"', r"_{\1}", text)
    text = re.sub(r'"\s*([A-Za-z])\s*"(?=\s*[_^=(])', r"\1", text)
    text = re.sub(r'^\s*"([^"]*[\d\\][^"]*|[A-Za-z])"\s*$', r"\1", text)
    text = re.sub(r",? *\(?(?:\bfor\b)? *[a-z] *\\in *\\mathbb\{[ZN]\}(?:\^\+)?\)?$", "", text)

    return re.sub(r"(?<!\.)[.;]$", "", re.sub(r"\s+", " ", text).strip()).strip()


def _joined_lines(found: re.Match[str]) -> str:
    return ", ".join(line.replace("&", "").strip() for line in found.group(1).split("\\\\") if line.strip())


# ---- the parts of an answer


_RELATIONS = re.compile(
    r"(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\in(?![A-Za-z])|\\approx|<=|>=|!=|<|>|=)"
)
_SAME_SIGNS = {"<=": "\\le", ">=": "\\ge", "!=": "\\ne"}
# Commas between digits that may separate thousands or items; items do not begin with a zero.
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,[1-9]\d\d)+(?!\d|,\d)")
OR = re.compile(r'\s*(?:"\s*,?or\s*"|\bor\b|\\lor|\\vee)\s*')
AND = re.compile(r'\s*(?:,\s*)?(?:"\s*,?and\s*"|\band\b|\\land|\\wedge|\\&)\s*')


def split(text: str, separator: str = ",") -> list[str]:
    """Split text at commas outside brackets and outside numbers such as 1,000."""
    parts = []
    depth = 0
    start = 0
    # Commas within a number such as 1,000 are not separators.
    thousands = (
        {
            at
            for found in re.finditer(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)", text)
            for at in range(*found.span())
        }
        if separator == ","
        else set()
    )

    for at, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and at not in thousands and text.startswith(separator, at):
            parts.append(text[start:at])
            start = at + len(separator)

    return [*parts, text[start:]]


def with_wide_commas(text: str) -> str:
    """Return the text with a space after each comma that may separate thousands or items."""
    return _THOUSANDS.sub(lambda found: found.group().replace(",", ", "), text)


def listed(text: str) -> list[str]:
    """Split text at "and" and at commas; return it whole if a part would be empty."""
    joined = AND.split(text)
    parts = [part for each in joined for part in split(each)]
    if len(joined) > 1 and all(joined):
        return [part for part in parts if part.strip()]
    return parts if all(part.strip() for part in parts) else [text]


def sides_of(text: str) -> tuple[list[str], list[str]]:
    """Split text at the signs of relations outside brackets; return the sides and the signs."""
    sides = [""]
    signs: list[str] = []
    for at, part in enumerate(_RELATIONS.split(text)):
        # `P(X = 1)` is one side.
        if at % 2 == 0 or not is_balanced(sides[-1]):
            sides[-1] += part
        else:
            signs.append(_SAME_SIGNS.get(part, part))
            sides.append("")

    return [side.strip() for side in sides], signs


def is_balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


# ---- units


APPROXIMATELY = re.compile(r"^(?:approximately|approx\.?|about|\\approx|\\sim|=)\s*", re.IGNORECASE)
_KNOWN_UNITS = (
    "mm",
    "cm",
    "dm",
    "km",
    "m",
    "mg",
    "kg",
    "g",
    "lb",
    "oz",
    "ml",
    "l",
    "s",
    "ms",
    "min",
    "h",
    "hr",
    "hrs",
    "mph",
    "kph",
    "km/h",
    "m/s",
)
_UNITS = (*_KNOWN_UNITS, "ft", "in", "yd", "deg", "rad", "N", "J", "W", "Hz")
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
_NO_UNIT = frozenset(
    {
        "unit",
        "square unit",
        "cubic unit",
        "sq unit",
        "unit^2",
        "unit^3",
        "each",
        "total",
        "in total",
        "way",
        "solution",
    }
)


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
_ORDINAL = re.compile(r'(?<=\d)\s*\^?\s*\{?\s*"?(?:st|nd|rd|th)"?\s*\}?$')


def readings_of_units(text: str) -> list[tuple[str, str]]:
    """Return the text without its unit, and the unit, for each possible interpretation of the text."""
    ways = []
    if re.search(
        r"\\?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])", text
    ):  # the argument may be an angle in degrees
        return [(text, "")]
    # Try the units in order: degrees, quoted words, dollars, and known names without quotes.
    degrees = re.sub(r"\s*\^\s*\\circ\s*(?:C|F)?\s*$", "", text)
    if degrees != text:
        return [(degrees, "degree")]
    text = _ORDINAL.sub("", text)
    quoted = re.search(r'^(.*?)\s*"([^"]*)"\s*((?:\^\{?[23]\}?)?)\s*$', text)
    if quoted and len(quoted.group(2)) == 1 and quoted.group(2).lower() not in map(str.lower, _UNITS):
        return [(text.replace('"', " "), "")]  # a variable
    if quoted and '"' not in quoted.group(1) and re.search(r"[\d\\A-Za-z]", quoted.group(1)):
        ways.append((quoted.group(1), _unit(quoted.group(2) + re.sub(r"[{}]", "", quoted.group(3)))))
    dollars = re.search(r'^(-?)\s*"dollars"\s*(-?.*)$', text)
    if dollars and '"' not in dollars.group(2):
        ways.append((dollars.group(1) + dollars.group(2), "dollar"))

    if '"' not in text:
        plain = APPROXIMATELY.sub("", text)
        ways.append((plain, ""))
        known = _CLEAR_UNIT.search(plain)
        if known and re.search(r"\d\W*$", plain[: known.start()]):
            way = (plain[: known.start()], _unit(known.group().strip()))
            is_clear = len(known.group("known") or known.group("words")) > 1  # one letter may be a variable
            ways.insert(0 if is_clear else 1, way)

    return [way for way in ways if not _NOT_UNITS.search(way[1])]


def _unit(text: str) -> str:
    """Return the normalized spelling of a unit, in the singular; empty if it is not a unit."""
    text = re.sub(r"\s+", " ", text.lower().strip(" .,")).replace("{", "").replace("}", "")
    singular = text[:-1] if text.endswith("s") and len(text) > 2 and not text.endswith("ss") else text
    singular = _SAME_UNITS.get(singular, _SAME_UNITS.get(text, singular))
    return "" if singular in _NO_UNIT else singular
