"""Extracts the descriptions of keys, choices and sections from the schema's source.

`docs/configuration.md` and `megarl schema` are generated from them. A key or a choice is described by the
comment after it and the comment lines above it, a section by its docstring.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from functools import cache
from pathlib import Path

_FOR_TOOLS = ("pyrefly:", "noqa")


def explanation(owner: type, name: str) -> str:
    """Return the comments of a dataclass field or an enumeration member; an empty string if there are none.

    Args:
        owner: The class. An inherited field is described where it is defined.
        name: The field or the member.
    """
    # Skip base classes from elsewhere, such as Enum: their comments are not about this key.
    classes = [each for each in owner.__mro__ if each.__module__.startswith("megarl.")]
    texts = (_explanations(inspect.getsourcefile(each) or "").get((each.__name__, name)) for each in classes)
    return next((text for text in texts if text), "")


def section_explanation(section: type) -> str:
    """Return the docstring of a section in one line; an empty string if there is none."""
    text = section.__doc__ or ""
    is_made_by_dataclass = text.startswith(f"{section.__name__}(")
    return "" if is_made_by_dataclass else " ".join(text.split())


@cache
def _explanations(file: str) -> dict[tuple[str, str], str]:
    source = Path(file).read_text(encoding="utf-8")
    alone, trailing = _comments(source)
    found = {}

    # Fields are annotated assignments; members of an enumeration are plain ones.
    for owner in ast.parse(source).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for node in owner.body:
            target = (
                node.target
                if isinstance(node, ast.AnnAssign)
                else node.targets[0]
                if isinstance(node, ast.Assign)
                else None
            )
            if isinstance(target, ast.Name):
                assert node.end_lineno is not None
                parts = [*_lines_above(alone, node.lineno), trailing.get(node.end_lineno, "")]
                found[owner.name, target.id] = " ".join(part for part in parts if part)

    return found


def _comments(source: str) -> tuple[dict[int, str], dict[int, str]]:
    """Return the comments by line number: comments on their own line, and comments after code."""
    alone: dict[int, str] = {}
    trailing: dict[int, str] = {}

    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.removeprefix("#").strip()
        if token.type == tokenize.COMMENT and not text.startswith(_FOR_TOOLS):
            (alone if token.line.lstrip().startswith("#") else trailing)[token.start[0]] = text

    return alone, trailing


def _lines_above(alone: dict[int, str], line: int) -> list[str]:
    above: list[str] = []
    while (line := line - 1) in alone:
        above.insert(0, alone[line])
    return above
