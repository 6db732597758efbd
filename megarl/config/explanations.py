"""What the schema's source says of its keys, choices and sections: `docs/configuration.md` and `megarl
schema` are made from it.

A key or a choice is explained by the comment behind it and the lines above it, a section by its docstring.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from functools import cache
from pathlib import Path

_FOR_TOOLS = ("type:", "noqa")


def explanation(owner: type, name: str) -> str:
    """Return what the comments say about a field of a dataclass or a member of an enumeration; empty without
    comments.

    Args:
        owner: The class. A field that it inherits is explained where it is defined.
        name: The field or the member.
    """
    # Skip base classes from elsewhere, such as Enum: their comments are not about this key.
    classes = [each for each in owner.__mro__ if each.__module__.startswith("megarl.")]
    texts = (_explanations(inspect.getsourcefile(each) or "").get((each.__name__, name)) for each in classes)
    return next((text for text in texts if text), "")


def section_explanation(section: type) -> str:
    """Return the docstring of a section in one line; empty without one."""
    text = section.__doc__ or ""
    is_made_by_dataclass = text.startswith(f"{section.__name__}(")
    return "" if is_made_by_dataclass else " ".join(text.split())


@cache
def _explanations(file: str) -> dict[tuple[str, str], str]:
    source = Path(file).read_text(encoding="utf-8")
    alone, behind = _comments(source)
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
                parts = [*_lines_above(alone, node.lineno), behind.get(node.end_lineno, "")]
                found[owner.name, target.id] = " ".join(part for part in parts if part)

    return found


def _comments(source: str) -> tuple[dict[int, str], dict[int, str]]:
    """Line -> comment: those that have a line of their own, and those behind code."""
    alone: dict[int, str] = {}
    behind: dict[int, str] = {}

    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.removeprefix("#").strip()
        if token.type == tokenize.COMMENT and not text.startswith(_FOR_TOOLS):
            (alone if token.line.lstrip().startswith("#") else behind)[token.start[0]] = text

    return alone, behind


def _lines_above(alone: dict[int, str], line: int) -> list[str]:
    above: list[str] = []
    while (line := line - 1) in alone:
        above.insert(0, alone[line])
    return above
