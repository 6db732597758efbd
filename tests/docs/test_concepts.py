"""The table of concepts in docs/architecture.md: each is where the page says, under a name that a reader
would look for."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "architecture.md"
_ROW = re.compile(
    r"^\| (?P<concept>[^|]+) \| \[(?P<file>megarl/[\w/]+\.py)\]\(\.\./(?P=file)\) \| (?:`(?P<name>\w+)`)? "
    r"*\|$",
    re.MULTILINE,
)


class Concept(NamedTuple):
    concept: str
    file: str
    name: str | None


def concepts() -> list[Concept]:
    text = PAGE.read_text(encoding="utf-8").split("## Where to find what", 1)[1].split("\n## ", 1)[0]
    return [Concept(*row.groups()) for row in _ROW.finditer(text)]


def defined_names(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):  # a package gives one address to what its modules define
            names |= {alias.asname or alias.name for alias in node.names}

    return names


def is_a_first_guess(concept: Concept) -> bool:
    """Whether a word of the concept is in the path: what a reader who searches for a file by the field's term
    types."""
    path = concept.file.lower()
    words = re.findall(r"[a-z]{2,}", concept.concept.lower())
    return any(
        word.removesuffix("s") in path
        for word in words
        if word not in {"and", "of", "the", "for", "to", "on"}
    )


def test_each_concept_is_where_the_page_says() -> None:
    found = concepts()
    assert len(found) >= 40
    assert len({concept.concept for concept in found}) == len(found)

    for concept in found:
        file = ROOT / concept.file
        assert file.is_file(), concept
        if concept.name is not None:
            assert concept.name in defined_names(file.read_text(encoding="utf-8")), concept


def test_most_concepts_are_found_at_the_first_guess() -> None:
    found = concepts()
    missed = [concept for concept in found if not is_a_first_guess(concept)]
    assert len(found) - len(missed) >= 0.88 * len(found), missed
