"""Converts plain values to the types of configuration keys, and describes these types."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megarl.config.dotted import replaced
from megarl.config.schema.keys import when_to_change

# Types of keys, and those of other values that they take.
_CONVERTED = {(int, str), (float, str), (float, int), (str, int), (str, float)}

_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")  # a shell's variable without braces
_HOME = re.compile(r"^~(?=/|$)")
# The limit of a file name on Linux file systems, in bytes, and a limit of paths, in characters.
_LONGEST_NAME = 255
_LONGEST_TEXT = 4000


@cache
def key_types(section: Any) -> Mapping[str, Any]:
    """Return the type of each key of a section."""
    hints = typing.get_type_hints(section)
    return {entry.name: hints[entry.name] for entry in fields(section)}


def item_section(hint: Any) -> type | None:
    """Return the dataclass of a list of sections; None for other types."""
    item = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
    return item if isinstance(item, type) and is_dataclass(item) else None


def schema_keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a section, including those of nested sections themselves."""
    for name, hint in key_types(section).items():
        yield prefix + name
        if is_dataclass(hint):
            yield from schema_keys(hint, f"{prefix}{name}.")


def in_order(section: Any) -> list[Field[Any]]:
    """Return the keys of a section, those that most runs set first, and the sections with such keys."""
    return sorted(fields(section), key=lambda entry: not _matters(section, entry))


def _matters(section: Any, entry: Field[Any]) -> bool:
    inner = key_types(section)[entry.name]
    return bool(when_to_change(entry)) or (
        is_dataclass(inner) and any(_matters(inner, each) for each in fields(inner))
    )


def without_null(hint: Any) -> Any:
    """Return `str` for `str | None`, and any other type as it is."""
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    return parts[0] if type(None) in typing.get_args(hint) and len(parts) == 1 else hint


def converted(hint: Any, value: Any, *, refers: bool = True) -> Any:
    """Return a value in the type of its key: '1e-5' is a float, and 'grpo' a member of an enumeration.

    A text with a reference is returned as it is, unless the key is true or false.

    Args:
        refers: Whether `${` in a text begins a reference. Those of a resolved text are its own characters.

    Raises:
        ValueError: The value does not fit. 3.5 is no integer, 5 is not true, and true is no number or string.
        OmegaConfBaseException: A reference in a text is not closed.
    """
    single = without_null(hint)
    kind = typing.get_origin(single) or single
    given = type(value)
    if value is None and (single is not hint or kind is Any):
        return None
    if refers and isinstance(value, str) and "${" in value and kind is not bool:
        OmegaConf.create([value])
        return value

    # Lists, maps, and sections in a list with references, which are checked when these are resolved.
    if isinstance(value, list | tuple) and kind in (list, Any):
        item = Any if kind is Any else typing.get_args(single)[0]
        return [converted(item, each, refers=refers) for each in value]
    if isinstance(value, Mapping) and (kind in (dict, Any) or is_dataclass(kind)):
        if kind is dict and not all(isinstance(name, str) for name in value):
            raise ValueError("not all names are strings")
        item = typing.get_args(single)[1] if kind is dict else Any
        return {name: converted(item, each, refers=refers) for name, each in value.items()}

    if kind is Any and isinstance(value, bool | int | float | str | bytes | Path):
        return value
    if isinstance(value, str) and isinstance(kind, type) and issubclass(kind, Enum):
        name = value.removeprefix(f"{kind.__name__}.")
        return kind[name] if name in kind.__members__ else kind(name)
    if given is kind or (kind is str and isinstance(value, str)):
        return value
    if (kind, given) in _CONVERTED or (kind is str and isinstance(value, Path)):
        return kind(value)
    raise ValueError(f"{value!r} does not fit {hint}")


def expected(hint: Any) -> str:
    """Return the words for a type in messages and on the reference page."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    if hint in words:
        return words[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.value for member in hint)

    if typing.get_origin(hint) is list:
        if section := item_section(hint):
            return f"a list of objects with the keys {', '.join(key_types(section))}"
        return f"a list, each item {expected(typing.get_args(hint)[0])}"

    if typing.get_origin(hint) is dict:
        return f"a map {{name: value}}, each value {expected(typing.get_args(hint)[1])}"
    if hint is typing.Any:
        return "anything"
    # The only remaining type is a union, for a value that may be null.
    assert typing.get_origin(hint) in (typing.Union, types.UnionType), hint

    return " or ".join("null" if part is type(None) else expected(part) for part in typing.get_args(hint))


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to a string, or to each string of a list or a mapping."""
    return replaced(value, lambda _, item: change(item) if isinstance(item, str) else item)


def texts_of(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield each string in a value, with its dotted key, but no members of enumerations."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from texts_of(inner, f"{key}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from texts_of(inner, f"{key}[{index}]")
    elif isinstance(value, str) and not isinstance(value, Enum):
        yield key, value


def escaped(value: Any) -> Any:
    """Return a resolved value such that OmegaConf reads it back, although it contains `${`."""
    # Backslashes before the signs would escape them, or each other.
    return each_text(value, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\${", text))


def contents_of(content: Any) -> Any:
    """Return the sections and values of a configuration as dicts, lists and plain values.

    Members of enumerations are strings.
    """
    plain = asdict(content) if is_dataclass(content) and not isinstance(content, type) else content
    return replaced(plain, lambda _, item: item.value if isinstance(item, Enum) else item)


def unexpanded(paths: Any) -> str | None:
    """Explain a path, or the first in a list, with a variable or `~` that only a shell would expand."""
    for path in paths if isinstance(paths, list) else [paths]:
        if not isinstance(path, str):
            continue
        written = _VARIABLE.sub(r"${oc.env:\1}", _HOME.sub("${oc.env:HOME}", path))
        if path.startswith("~") or written != path:
            remedy = "write the whole path" if written.startswith("~") else f"write {written!r}"
            return f"is {path!r}, but neither ~ nor $NAME is expanded; {remedy}"
    return None


def unusable_texts(value: Any, *, is_prose: bool) -> Iterator[str]:
    """Yield the problems of strings that no file name or text can contain.

    Such a string cannot be part of a path, contains a lone surrogate, or is Python's `None`.

    Args:
        is_prose: Whether the text is read by a model. Any other string may become part of a path.
    """
    for text in value if isinstance(value, list) else [value]:
        # Members of an enumeration are strings too, but do not come from the user.
        if not isinstance(text, str) or isinstance(text, Enum):
            continue
        if text == "None":
            yield "is the string 'None'; write null for no value"
        elif is_prose:
            if any("\ud800" <= character <= "\udfff" for character in text):
                yield "contains a lone surrogate (half a character), which no tokenizer reads; remove it"
        elif (
            not text.isprintable()
            or len(text) > _LONGEST_TEXT
            or any(len(part.encode()) > _LONGEST_NAME for part in text.split("/"))
        ):
            shown = f"{text[:40]!r}..." if len(text) > 40 else repr(text)
            yield (
                f"is {shown}, which contains non-printable characters or is longer than a file name can be"
            )
