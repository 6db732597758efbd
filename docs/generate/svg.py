"""Write SVG drawings of boxes, frames, arrows, curves and text, in colors that are readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

FILLS = {  # white text is readable on each
    "actor": "#3b6a9c",
    "reference": "#2f8a84",
    "critic": "#c23b42",
    "reward": "#96588a",
    "reward_model": "#96588a",
    "rollout": "#b85c00",
    "driver": "#6b6f76",
}
INK = "#80868f"  # lines, and text outside boxes


class Drawing:
    """Collect the parts of a drawing. Coordinates are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, *lines: str) -> None:
        """Add a filled box with centered lines of white text. The first line is bold."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}"/>'
        )
        top = y + height / 2 - 7.5 * (len(lines) - 1)

        for number, line in enumerate(lines):
            style = 'fill="#ffffff" font-weight="bold"' if number == 0 else 'fill="#ffffff" font-size="11"'
            self._text(x + width / 2, top + 15 * number + 4, line, f'{style} text-anchor="middle"')

    def frame(self, x: float, y: float, width: float, height: float, label: str) -> None:
        """Add a dashed frame with a label above it."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {place} rx="6" fill="none" stroke="{INK}" stroke-dasharray="4 3"/>')
        self.words(x + 2, y - 5, label)

    def words(self, x: float, y: float, text: str, *, bold: bool = False, centered: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        anchor = ' text-anchor="middle"' if centered else ""
        self._text(x, y, text, f'fill="{INK}"{weight}{anchor}')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Add a curved arrow whose ends are horizontal."""
        bend = (to_x - x) / 2
        path = f"M{x:g} {y:g} C{x + bend:g} {y:g} {to_x - bend:g} {to_y:g} {to_x:g} {to_y:g}"
        self._parts.append(f'<path d="{path}" fill="none" stroke="{INK}" marker-end="url(#head)"/>')

    def line(self, points: Sequence[tuple[float, float]], color: str, width: float) -> None:
        """Add straight lines from point to point."""
        self._parts.append(
            f'<polyline points="{_listed(points)}" fill="none" stroke="{color}" stroke-width="{width:g}"/>'
        )

    def area(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        """Add a translucent area with these corners."""
        self._parts.append(f'<polygon points="{_listed(points)}" fill="{fill}" fill-opacity="0.25"/>')

    def _text(self, x: float, y: float, text: str, style: str) -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>')

    def __str__(self) -> str:
        width, height = self._size
        head = f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/>'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" '
                'font-family="system-ui, sans-serif" font-size="13" role="img">',
                f"<title>{escape(self._title)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                'markerHeight="7" orient="auto">'
                f"{head}</marker></defs>",
                *self._parts,
                "</svg>\n",
            ]
        )


def _listed(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.6g},{y:.6g}" for x, y in points)
