"""The metadata of a configuration key: whether it is required, its range, and what it names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import Field, field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, cast

MISSING: Any = "???"  # OmegaConf's marker for a required value, of any type
# Limit of any number, with either sign: a larger one is a typo, and would be harmful as a count or a seed.
LARGEST = 10**9
# The smallest number above 0 that float32 and bfloat16 have in full. A smaller one becomes 0 in use.
SMALLEST = 2.0**-126


class Range(NamedTuple):
    """The numbers that a key accepts, none beyond LARGEST.

    `at_least` and `at_most` are inclusive ends, `above` and `below` are exclusive ones. With a `length`, the
    key accepts a list of as many of these numbers.
    """

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf
    length: int | None = None

    def __contains__(self, value: object) -> bool:
        if self.length is not None:
            of_item = self._replace(length=None)
            assert isinstance(value, list)
            return len(value) == self.length and all(item in of_item for item in value)
        assert isinstance(value, int | float)
        return (
            abs(value) <= LARGEST
            and (value == 0 or abs(value) >= SMALLEST)
            and self.at_least <= value <= self.at_most
            and self.above < value < self.below
        )

    def __str__(self) -> str:
        if self.length is not None:
            return f"{self.length} numbers, each {self._replace(length=None)}"
        given = {word: end for word, end in self._asdict().items() if end is not None and math.isfinite(end)}
        if len(given) == 2:
            low = f"[{self.at_least:g}" if "at_least" in given else f"({self.above:g}"
            high = f"{self.at_most:g}]" if "at_most" in given else f"{self.below:g})"
            return f"in {low}, {high}"
        return next((f"{word.replace('_', ' ')} {end:g}" for word, end in given.items()), "a finite number")

    def explain(self, value: float | list[float]) -> str:
        """Explain why `value` is not in the range."""
        if isinstance(value, list):
            return f"is {value}, but must be {self}"
        is_within = self.at_least <= value <= self.at_most and self.above < value < self.below
        if 0 < abs(value) < SMALLEST and is_within:
            return f"is {value:g}, which is 0 in float32; use a larger number, or 0 where it is allowed"
        if LARGEST < value < math.inf and min(self.at_most, self.below) == math.inf:
            return f"is {value:g}, but the largest number allowed is {LARGEST:,}"
        if -math.inf < value < -LARGEST and max(self.at_least, self.above) == -math.inf:
            return f"is {value:g}, but the smallest number allowed is {-LARGEST:,}"
        return f"is {value:g}, but must be {self}"


def ranged[Value](default: Value, **ends: float) -> Value:
    """Declare the default and the range of a key, as in `n: int = ranged(1, at_least=1)`.

    Null is in every range.

    Args:
        ends: The fields of Range.
    """
    return field(default=default, metadata={Range: Range(**ends, length=None)})


def numbers(default: list[float], **ends: float) -> list[float]:
    """Declare the default of a key that takes a list of numbers of that length, and the range of each.

    Args:
        ends: The fields of Range.
    """
    return field(default_factory=default.copy, metadata={Range: Range(**ends, length=len(default))})


def prose[Value](default: Value) -> Value:
    """Declare the default of a key whose text is read by a model.

    Unlike a name, such a text may be long and contain line breaks.
    """
    return field(default=default, metadata={prose: True})


class Reader(NamedTuple):
    """A setting with which a key has an effect.

    Attributes:
        key: The dotted key of the setting. One that begins with a dot is in the section of the key that needs
            it. `[]` stands for any item of a list.
        values: The values of the setting; empty: any but null, false, 0 and an empty text, list or mapping.
        above: A number that the value has to exceed.
        example: A value to suggest, if `values` is empty.
        architecture: An attribute that the model's architecture must have, if `key` is a model.
    """

    key: str
    values: tuple[Any, ...] = ()
    above: float = 0
    example: str = ""
    architecture: str = ""


class OnlyWith(NamedTuple):
    """The settings without which a key, or a section, has no effect.

    Attributes:
        readers: One of them is enough.
        is_refused: Whether a value other than the default is refused without them, not only warned of.
        is_usual: Whether it is usual that such a value has no effect, as that of a preset or of an inherited
            file in a run that turns the setting off. There is no warning then.
        why: Why the key has no effect, for messages.
    """

    readers: tuple[Reader, ...]
    is_refused: bool = False
    is_usual: bool = False
    why: str = ""


def only_with[Value](
    default: Value, *readers: Reader, is_refused: bool = False, is_usual: bool = False, why: str = ""
) -> Value:
    """Declare what a key or a section needs to have an effect: any of the `readers`.

    An example is `min_lr: float = only_with(ranged(0.0, at_least=0), Reader(".decay", (Decay.linear,)))`.
    Calls can be nested, if a key needs one setting and another.
    """
    declared = cast(Field[Any], default if isinstance(default, Field) else field(default=default))
    needs = (OnlyWith(readers, is_refused, is_usual, why), *needs_of(declared))
    declared.metadata = MappingProxyType({**declared.metadata, OnlyWith: needs})
    return cast(Value, declared)


def needs_of(key: Field[Any]) -> tuple[OnlyWith, ...]:
    """Return the settings that a key needs, all of them."""
    return key.metadata.get(OnlyWith, ())


def matters[Value](default: Value, when: str) -> Value:
    """Declare a key that most runs set, with when to set or change it. It is shown before other keys."""
    declared = cast(Field[Any], default if isinstance(default, Field) else field(default=default))
    declared.metadata = MappingProxyType({**declared.metadata, matters: when})
    return cast(Value, declared)


def when_to_change(key: Field[Any]) -> str:
    """Return when to change a key that most runs set; an empty string for other keys."""
    return key.metadata.get(matters, "")


def range_of(key: Field[Any]) -> Range:
    """Return the range of a key; without one, all finite numbers."""
    return key.metadata.get(Range, Range())


class PathKind(Enum):
    """The kind of path that a key contains, which determines how it is resolved: see `Layer.place_of`."""

    data = "data"  # a model folder or data files of the user, or a name on the Hugging Face hub
    # a file of code or of a prompt, which belongs to the configuration; FILE.py:NAME is a function in it
    code = "code"
    function = "function"  # FILE.py:NAME, a function or class in such a file; a built-in tool has no file
    output = "output"  # a folder that the run writes


def split_code(reference: str) -> tuple[str, str]:
    """Return the file and the name of FILE.py:NAME. A reference without a name is a file."""
    file, colon, name = reference.rpartition(":")
    return (file, name) if colon and file.endswith(".py") else (reference, "")


def names_code(reference: str) -> bool:
    """Return whether a reference has the form FILE.py:NAME."""
    return split_code(reference)[1].isidentifier()


def names(kind: PathKind) -> dict[Any, PathKind]:
    """Return the metadata of a key that contains a path or a list of paths."""
    return {PathKind: kind}


def naming(*arguments: str) -> dict[Any, tuple[str, ...]]:
    """Return the metadata of a mapping of a library's arguments, of which these are paths of inputs."""
    return {naming: arguments}


class Leaf(NamedTuple):
    """A value of a configuration.

    Attributes:
        key: The dotted key, with the index of the element in a list of sections.
        entry: The field of its section.
        usual: Its value in the defaults, if they are given.
        needs: What the key and the sections around it need, each with the prefix of keys that begin with a
            dot.
    """

    key: str
    value: Any
    entry: Field[Any]
    usual: Any
    needs: tuple[tuple[str, OnlyWith], ...]

    @property
    def range(self) -> Range:
        return range_of(self.entry)

    @property
    def path(self) -> PathKind | None:
        """The kind of path that the key contains; None if it contains none."""
        return self.entry.metadata.get(PathKind)


@cache
def default_of(section: Any) -> Any:
    """Return a section with the defaults of all its keys."""
    return section()


def leaves(
    section: Any, default: Any = None, prefix: str = "", outer: tuple[tuple[str, OnlyWith], ...] = ()
) -> Iterator[Leaf]:
    """Yield every value of a section and of its nested sections.

    A list is a value, and so is each value inside a list of sections.

    Args:
        default: The section with its defaults; None: they are not needed.
        prefix: What the keys of the section begin with.
        outer: What the section needs, see `Leaf.needs`.
    """
    for entry in fields(section):
        value = getattr(section, entry.name)
        usual = None if default is None else getattr(default, entry.name)
        needs = (*outer, *((prefix, needed) for needed in needs_of(entry)))
        key = f"{prefix}{entry.name}"
        if is_dataclass(value):
            yield from leaves(value, usual, f"{key}.", needs)
            continue
        yield Leaf(key, value, entry, usual, needs)
        for number, item in enumerate(value if isinstance(value, list) else ()):
            if is_dataclass(item):
                # What the list needs is said of its key.
                usual = None if default is None else default_of(type(item))
                yield from leaves(item, usual, f"{key}[{number}].", outer)
