"""Draw the packages that a step runs through, for docs/architecture.md."""

from __future__ import annotations

from pathlib import Path

import megarl
from docs.generate.svg import FILLS, Drawing

_WIDTH, _HEIGHT = 112, 48  # of a box
_COLUMN, _ROW = 134, 100
_LEFT, _TOP = 22, 92

# Package -> column, row, the color of its processes, and what it does in a step.
_BOXES = {
    "data": (0, 0, "driver", "prompts"),
    "rollout/driver": (1, 0, "driver", "requests, buffer"),
    "rewards": (2, 0, "reward", "scores"),
    "roles": (3, 0, "driver", "a handle per model"),
    "algorithms": (4, 0, "driver", "advantages, losses"),
    "rollout/worker": (2, 1, "rollout", "answers requests"),
    "rollout/sglang": (3, 1, "rollout", "generates"),
    "roles (worker)": (5, 1, "actor", "rows, losses"),
    "engine": (6, 1, "actor", "Megatron-Core"),
    "weights": (5, 2, "actor", "slices of tensors"),
}
_ARROWS = (
    ("data", "rollout/driver"),
    ("rollout/driver", "rewards"),
    ("rollout/driver", "rollout/worker"),
    ("rollout/worker", "rollout/sglang"),
    ("rewards", "roles"),
    ("roles", "algorithms"),
    ("algorithms", "roles (worker)"),
    ("roles (worker)", "engine"),
)


def packages() -> str:
    """Draw the way of prompts to the engines and of rows to the trainers, and the way of weights back."""
    root = Path(megarl.__file__).parent
    assert all((root / name.split()[0]).is_dir() for name in _BOXES), "a package of the drawing has moved"
    drawing = Drawing(_LEFT + 7 * _COLUMN, _TOP + 3 * _ROW, "The packages that a step runs through")

    # trainers has no place in the order: its loop calls all packages of the driver.
    drawing.frame(4, 22, 5 * _COLUMN, _TOP + _HEIGHT - 8, "driver")
    drawing.box(_LEFT, 34, 4 * _COLUMN + _WIDTH, 40, FILLS["driver"], "trainers", "the loop: a line per call")
    _frame(drawing, 2, 3, 1, 1, "engine processes")
    _frame(drawing, 5, 6, 1, 2, "trainer ranks")

    for package, (column, row, color, does) in _BOXES.items():
        drawing.box(*_corner(column, row), _WIDTH, _HEIGHT, FILLS[color], package, does)

    for source, target in _ARROWS:
        (x, y), (to_x, to_y) = _corner(*_BOXES[source][:2]), _corner(*_BOXES[target][:2])
        drawing.arrow(x + _WIDTH + 2, y + _HEIGHT / 2, to_x - 2, to_y + _HEIGHT / 2)

    # Weights go back to the left.
    for source, target in (("engine", "weights"), ("weights", "rollout/sglang")):
        (x, y), (to_x, to_y) = _corner(*_BOXES[source][:2]), _corner(*_BOXES[target][:2])
        drawing.arrow(x - 2, y + _HEIGHT - 8, to_x + _WIDTH + 2, to_y + _HEIGHT / 2)

    return str(drawing)


def _corner(column: int, row: int) -> tuple[float, float]:
    return _LEFT + _COLUMN * column, _TOP + _ROW * row


def _frame(drawing: Drawing, left: int, right: int, top: int, bottom: int, label: str) -> None:
    x, y = _corner(left, top)
    to_x, to_y = _corner(right, bottom)
    drawing.frame(x - 10, y - 10, to_x - x + _WIDTH + 20, to_y - y + _HEIGHT + 20, label)
