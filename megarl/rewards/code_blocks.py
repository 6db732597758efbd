"""Extracts the program from a response that is Markdown, or only the program."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Sequence

from markdown_it import MarkdownIt

from megarl.rewards.thinking import outside_thinking

_PYTHON = ("python", "python3", "py", "py3")
_WORD = re.compile(r"\w+")
# HTML parsing would hide a fence after a tag such as <answer>, so only the Markdown rules for fences and for
# blocks that indent them are enabled.
_MARKDOWN = MarkdownIt("zero").enable(["fence", "list", "blockquote", "code"])
_INDENTED_FENCE = re.compile(r"^[ \t]+(?=```|~~~)", re.MULTILINE)
_TAG = re.compile(r"<code[^>]*>\n?(.*?)(?:</code>|\Z)", re.DOTALL | re.IGNORECASE)
_CLOSING_FENCE = re.compile(r"(`{3,}|~{3,})\s*\Z")


def program_of(response: str) -> str:
    """Return the program in a response, ignoring its thinking.

    The program is the last block between ```python and ```. Without one, it is the last block without a
    language that defines something, or else the last one that Python can compile; then the text between
    <code> and </code>; then the whole response. An unclosed block extends to the end of the response.
    """
    response = outside_thinking(response).replace("\r\n", "\n").encode(errors="replace").decode()

    # Models also indent fences outside of lists, and write lists around programs that are not indented like
    # the list.
    parsed = [_blocks(response), _blocks(_INDENTED_FENCE.sub("", response))]

    for blocks in parsed:
        tagged = [text for language, text in blocks if language in _PYTHON and text.strip()]
        if tagged:
            return tagged[-1]

    for blocks in parsed:
        untagged = _best_untagged([text for language, text in blocks if not language])
        if untagged is not None:
            return untagged

    between_tags = [text for text in _TAG.findall(response) if text.strip()]
    if between_tags:
        return between_tags[-1]
    return _without_closing_fence(response)


def _blocks(response: str) -> list[tuple[str, str]]:
    """Return the language and the text of each fenced block.

    The language is the first word after the fence, in lower case; empty if there is none.
    """
    fences = [token for token in _MARKDOWN.parse(response) if token.type == "fence"]
    languages = [_WORD.search(fence.info.lower()) for fence in fences]
    return [
        (language.group() if language else "", _without_closing_fence(_dedent(fence.content)))
        for language, fence in zip(languages, fences, strict=True)
    ]


def _dedent(text: str) -> str:
    """Dedent a text that begins with whitespace.

    Other texts are unchanged, because `textwrap.dedent` also empties lines of spaces, even in strings.
    """
    return textwrap.dedent(text) if text[:1].isspace() else text


def _without_closing_fence(text: str) -> str:
    """Remove a closing fence that is not one in Markdown.

    Such a fence does not begin its line, or matches no opening fence.
    """
    return _CLOSING_FENCE.sub("", text)


def _best_untagged(texts: Sequence[str]) -> str | None:
    """Return the last text that defines something.

    Without one, it is the last text that performs an action, and then the last that compiles, as printed
    output may too.
    """
    found = [(text, tree) for text in reversed(texts) if (tree := _tree(text)) is not None]
    # Apply the strictest criterion to all blocks before the next one.
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
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last three: NUL, deep nesting
        return None


def _defines(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _does(statement: ast.stmt) -> bool:
    return not isinstance(statement, ast.Expr) or any(
        isinstance(node, ast.Call) for node in ast.walk(statement)
    )
