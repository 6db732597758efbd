"""Recognizes names of values: in `x = 5` the left side only names the value, which is an answer of its own.

The right side of any other equation is not: `x + y = 5` is a line, and `3x = 9` is not solved.
"""

from __future__ import annotations

import re

from megarl.recipes.math.formula import FUNCTION_NAMES, GREEK_NAMES, is_prose

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
_LABEL = (
    rf"(?:\\(?:measured|spherical)?angle\s*(?:[A-Z]{_MARKS}\s*)+"
    rf"|\\(?:tri|square)angle\s*{_POINTS}|{_ACCENTED})"
)
_VARIABLE = re.compile(rf"{_LETTER}{_MARKS}")
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
_ASKED_FOR = re.compile(
    rf"\\?(?:sin|cos|tan|cot|sec|csc)\s*(?:{_ANGLE}|\(\s*{_ANGLE}\s*\))|\|\s*{_LETTER}{_MARKS}\s*\|"
)


def is_variable(text: str) -> bool:
    """Whether the text is a single letter with an optional index."""
    return _VARIABLE.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether the text only names a value, so that an equation with it on the left states that value."""
    if len(text) > 100:
        return False
    if _NAME.fullmatch(text) or _WORDS.fullmatch(text):
        return True

    words = text.split()
    return all(map(str.isalpha, words)) and any(map(is_prose, words)) and not FUNCTION_NAMES & set(words)


def is_label(text: str) -> bool:
    """Whether the text denotes a geometric object or a marked letter, not a product of its letters."""
    return len(text) <= 100 and re.fullmatch(_LABEL, text) is not None


def is_asked_for(text: str) -> bool:
    """Whether the text is a quantity that a problem asks for, such as `\\sin A` or `|z|`."""
    return len(text) <= 100 and _ASKED_FOR.fullmatch(text) is not None
