"""Finds the unit after a number, and normalizes its spelling."""

from __future__ import annotations

import re

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
