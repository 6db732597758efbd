"""The tools that the model may call. Replace them with your own; docs/agents.md shows what a tool can be.

python tools.py        # runs their test, without a model
"""

from __future__ import annotations

from typing import Annotated


def add(left: Annotated[int, "the first number"], right: Annotated[int, "the second number"]) -> str:
    """The sum of two integers."""
    return str(left + right)


def test() -> None:
    assert add(48, 61) == "109"


if __name__ == "__main__":
    test()
    print("tools.py: all results are as expected")
