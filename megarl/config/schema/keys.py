"""What a key of the schema says of itself beside its type: that it must be given, and which numbers it
takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import Field, field, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

MISSING = "???"  # OmegaConf's own mark of a value that the user must give
# of any number, with either sign: what is larger is a slip, and would be a disaster as a count or a seed
LARGEST = 10**9

Value = TypeVar("Value")


class Range(NamedTuple):
    """Which numbers a key takes, none beyond LARGEST. An end belongs to the range (`at_least`, `at_most`) or
    not (`above`, `below`)."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        return (
            abs(value) <= LARGEST
            and self.at_least <= value <= self.at_most
            and self.above < value < self.below
        )

    def __str__(self) -> str:
        given = {word: end for word, end in self._asdict().items() if math.isfinite(end)}
        if len(given) == 2:
            low = f"[{self.at_least:g}" if "at_least" in given else f"({self.above:g}"
            high = f"{self.at_most:g}]" if "at_most" in given else f"{self.below:g})"
            return f"in {low}, {high}"
        return next((f"{word.replace('_', ' ')} {end:g}" for word, end in given.items()), "a finite number")

    def explain(self, value: float) -> str:
        """Why `value` is not in it."""
        is_huge = LARGEST < abs(value) < math.inf and min(self.at_most, self.below) == math.inf
        return (
            f"is {value:g}, but no number may be beyond {LARGEST:,}"
            if is_huge
            else f"is {value:g}, but must be {self}"
        )


def ranged(default: Value, **ends: float) -> Value:
    """The default of a key and its range, as in `n: int = ranged(1, at_least=1)`; null is in every range.
    `ends`: see Range."""
    return field(default=default, metadata={Range: Range(**ends)})


class ItemRange(NamedTuple):
    """How many numbers a list has, and which each may be."""

    length: int
    range: Range

    def fits(self, values: list[float]) -> bool:
        return len(values) == self.length and all(value in self.range for value in values)

    def __str__(self) -> str:
        return f"{self.length} numbers, each {self.range}"


def numbers(default: list[float], **ends: float) -> list[float]:
    """The default of a key that takes a list of that many numbers, and the range of each. `ends`: see
    Range."""
    return field(default_factory=default.copy, metadata={ItemRange: ItemRange(len(default), Range(**ends))})


def prose(default: Value) -> Value:
    """The default of a key whose text is read by a model: it may be long and have line breaks, as no name
    may."""
    return field(default=default, metadata={prose: True})


def range_of(key: Field[Any]) -> Range:
    """Of a key without one: all finite numbers."""
    return key.metadata.get(Range, Range())


class InputKind(Enum):
    """What a key names that a run reads, so that its place is known: see `Layer.place_of`."""

    data = "data"  # a model's folder, rows: of whoever runs it; or a name on the Hugging Face hub
    code = "code"  # a file of Python: goes with the configuration


def names(kind: InputKind) -> dict[Any, InputKind]:
    """The metadata of a key that names what a run reads, one or a list of them."""
    return {InputKind: kind}


class OutputFolder:
    """Marks, in a key's metadata, a folder that a run writes. It is relative to the current folder."""


def written() -> dict[Any, bool]:
    """Returns the metadata of a key that names a folder which a run writes."""
    return {OutputFolder: True}


class Leaf(NamedTuple):
    """A value of a configuration.

    Attributes:
        key: Dotted, and with the number of an element in a list of sections.
        is_prose: See `prose`.
        items: Set for a list of numbers that declares its length and their range.
    """

    key: str
    value: Any
    range: Range
    is_prose: bool = False
    items: ItemRange | None = None


def leaves(section: Any, prefix: str = "") -> Iterator[Leaf]:
    """Every value of a section, those of the sections in it included; a list is a value, and so is what
    stands in its sections."""
    for entry in fields(section):
        value = getattr(section, entry.name)
        key = f"{prefix}{entry.name}"
        if is_dataclass(value):
            yield from leaves(value, f"{key}.")
            continue
        yield Leaf(key, value, range_of(entry), prose in entry.metadata, entry.metadata.get(ItemRange))
        for number, element in enumerate(value if isinstance(value, list) else ()):
            if is_dataclass(element):
                yield from leaves(element, f"{key}[{number}].")
