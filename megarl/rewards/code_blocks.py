"""Finds the program in a response that is Markdown, or nothing but the program."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from markdown_it import MarkdownIt

from megarl.rewards.thinking import outside_thinking

_PYTHON = ("python", "python3", "py", "py3")
_WORD = re.compile(r"\w+")
# HTML would hide a fence below a tag such as <answer>, so of Markdown's rules there are only fences and what
# indents them.
_MARKDOWN = MarkdownIt("zero").enable(["fence", "list", "blockquote", "code"])
_INDENTED_FENCE = re.compile(r"^[ \t]+(?=```|~~~)", re.MULTILINE)
_TAG = re.compile(r"<code[^>]*>\n?(.*?)(?:</code>|\Z)", re.DOTALL | re.IGNORECASE)
_CLOSING_FENCE = re.compile(r"(`{3,}|~{3,})\s*\Z")


class _Block(NamedTuple):
    """language: The first word after the fence, in lower case; empty if there is none."""

    language: str
    text: str


def program_of(response: str) -> str:
    """Returns the sampled program of a response, outside of its thinking.

    It is the last block between ```python and ```. If there is none, it is the last block without a language
    that defines something, or the last one that Python can compile; then what is between <code> and </code>;
    then the whole response. The end of the response ends a block that is not closed.
    """
    response = outside_thinking(response).replace("\r\n", "\n").encode(errors="replace").decode()

    # Models also indent fences that are in no list, and write lists around programs that are not indented as
    # the list is.
    parsed = [_blocks(response), _blocks(_INDENTED_FENCE.sub("", response))]

    for blocks in parsed:
        tagged = [block.text for block in blocks if block.language in _PYTHON and block.text.strip()]
        if tagged:
            return tagged[-1]

    for blocks in parsed:
        untagged = _best_untagged([block.text for block in blocks if not block.language])
        if untagged is not None:
            return untagged

    between_tags = [text for text in _TAG.findall(response) if text.strip()]
    if between_tags:
        return between_tags[-1]
    return _without_closing_fence(response)


def _blocks(response: str) -> list[_Block]:
    fences = [token for token in _MARKDOWN.parse(response) if token.type == "fence"]
    languages = [_WORD.search(fence.info.lower()) for fence in fences]
    return [
        _Block(language.group() if language else "", _without_closing_fence(_dedent(fence.content)))
        for language, fence in zip(languages, fences, strict=True)
    ]


def _dedent(text: str) -> str:
    """Leaves text alone that is not indented: `textwrap.dedent` also empties lines of spaces, in strings
    too."""
    return textwrap.dedent(text) if text[:1].isspace() else text


def _without_closing_fence(text: str) -> str:
    """Leaves out a fence that closes nothing for Markdown, because it does not begin its line or nothing
    opens it."""
    return _CLOSING_FENCE.sub("", text)


def _best_untagged(texts: Sequence[str]) -> str | None:
    """Returns the last text that defines something, or else does something, or else compiles, as what a
    program prints may too."""
    found = [(text, tree) for text in reversed(texts) if (tree := _tree(text)) is not None]
    # Try the strictest criterion on all blocks before the next one.
    for is_wanted in (_defines, _does, bool):
        for text, tree in found:
            if any(map(is_wanted, tree.body)):
                return text

    return None


def _tree(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last three: NUL, deep brackets
        return None


def _defines(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _does(statement: ast.stmt) -> bool:
    return not isinstance(statement, ast.Expr) or any(
        isinstance(node, ast.Call) for node in ast.walk(statement)
    )
