"""The figures of benchmarks/house.py, on sources whose figures are counted by hand."""

from __future__ import annotations

from benchmarks.house import CONCEPTS, files_of_changes, homes_of, measure_style
from tests.docs.pages import ROOT

SOURCE = '''"""A module."""


def first(a: int) -> int:
    """One line.

    And more: its blank line does not count.
    """
    x, y = a, a  # parallel

    # a step
    return x + y


class Box:
    def second(self) -> tuple[int, int]:
        a, b = self.both()  # not parallel
        return a, b
'''


def test_style_is_counted_inside_functions_and_outside_docstrings() -> None:
    style = measure_style(
        {"megarl/a.py": SOURCE, "megarl/b.py": "x = 1  # " + "y" * 110 + "\n", "megarl/c.py": ""}
    )
    lines = len(SOURCE.splitlines())
    assert (style.files, style.lines, style.longest_file) == (2, lines + 1, lines)
    assert (style.functions, style.longest_function, style.function_lines) == (2, 9, 9 + 3)
    assert (style.blank_lines, style.commented_lines, style.parallel_assignments, style.wide_lines) == (
        1,
        3,
        1,
        1,
    )
    assert dict(style.rows())["blank lines inside functions"] == "8.3%"


def test_packages_of_a_concept() -> None:
    sources = {"megarl/weights/plan.py": "", "megarl/roles/weights/sync.py": "", "megarl/data/packing.py": ""}
    assert homes_of("the weight sync", sources) == (["roles", "weights"], 2)
    assert all(homes_of(concept, {}) == ([], 0) for concept in CONCEPTS)


def test_every_change_that_the_page_describes_is_counted() -> None:
    counts = files_of_changes(ROOT)
    assert counts["A role"] <= 5
    assert all(count > 0 for count in counts.values())
