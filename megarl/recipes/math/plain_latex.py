"""Normalizes an answer in LaTeX or Unicode, so that equivalent notation has one spelling."""

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
