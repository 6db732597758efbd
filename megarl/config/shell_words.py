"""Splits the text of a shell script into commands and their words, as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator

_PAIRS = {"(": ")", "{": "}"}


def closing(text: str, opening: int) -> int:
    """Return the end of the part in brackets that begins at `opening`."""
    close = _PAIRS[text[opening]]
    depth = 0
    index = opening
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 1
        elif character == "'" and close == ")":
            index = max(index, text.find("'", index + 1))
        elif character == text[opening]:
            depth += 1
        elif character == close:
            depth -= 1
            if depth == 0:
                return index + 1
        index += 1
    return len(text)


def split_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command as written, with the separator before it."""
    separator = "\n"
    words: list[str] = []
    start: int | None = None
    index = 0

    def ends_word(end: int) -> None:
        nonlocal start
        if start is not None:
            words.append(re.sub(r"\\[ \t]*\n", "", text[start:end]))
        start = None

    while index < len(text):
        character = text[index]
        if continued := re.compile(r"\\[ \t]*\n").match(text, index):
            ends_word(index)
            index = continued.end()
        elif character == "#" and start is None:
            end = text.find("\n", index)
            index = len(text) if end < 0 else end
        elif character in " \t\r":
            ends_word(index)
            index += 1
        elif character in "\n;&|)" and not (character == "&" and text[index - 1 : index] in (">", "<")):
            ends_word(index)
            if words:
                yield separator, words
                words = []
            separator = text[index : index + 2] if text[index : index + 2] in ("&&", "||") else character
            index += len(separator)
        elif character == "(" and start is None:
            index += 1
        else:
            start = index if start is None else start
            index = _part_end(text, index)
    ends_word(index)
    if words:
        yield separator, words


def _part_end(text: str, index: int) -> int:
    """Return the end of a quoted or bracketed part of a word, or of one character."""
    character = text[index]
    if character == "'":
        end = text.find("'", index + 1)
        return len(text) if end < 0 else end + 1
    if character == '"':
        index += 1
        while index < len(text) and text[index] != '"':
            index = _part_end(text, index) if text[index] in "$\\" else index + 1
        return index + 1
    if character == "\\":
        return index + 2
    if character == "$" and text[index + 1 : index + 2] in ("(", "{"):
        return closing(text, index + 1)
    if character == "(" and text[index - 1] == "=":
        return _array_end(text, index)
    return index + 1


def _array_end(text: str, index: int) -> int:
    """Return the end of an array, in which comments may have brackets and quotes."""
    index += 1
    while index < len(text) and text[index] != ")":
        if text[index] == "#" and text[index - 1].isspace():
            end = text.find("\n", index)
            index = len(text) if end < 0 else end
        else:
            index = _part_end(text, index)
    return index + 1
