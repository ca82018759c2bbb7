"""Just enough of SVG for the pictures: boxes, text, lines and legends, on a light ground that suits a dark page too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

INK, PALE, GRID = "#1b2733", "#5b6b7b", "#d5dce3"
COLOURS = ("#3b7dd8", "#e08a1e", "#3a9d5d", "#a859c4", "#c94f4f")
EMPTY = "#eef1f4"


class Svg:
    """A picture of a fixed width in pixels; it grows downwards."""

    def __init__(self, width: int, title: str) -> None:
        self._width = width
        self._title = title
        self._parts: list[str] = []
        self._bottom = 0.0

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "#ffffff", tip: str = ""
    ) -> None:
        """A rectangle; `tip` is shown when the mouse rests on it."""
        self._grow(y + height)
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="0.7">{inner}</rect>'
        )

    def text(self, x: float, y: float, words: str, *, size: int = 13, colour: str = INK, anchor: str = "start") -> None:
        """One line of text, its baseline at `y`."""
        self._grow(y + 4)
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, width: float = 2) -> None:
        """A polyline."""
        self._grow(max(y for _, y in points))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def legend(self, x: float, y: float, entries: Mapping[str, str]) -> None:
        """Coloured squares with their meanings, in one row."""
        for name, colour in entries.items():
            self.box(x, y - 11, 12, 12, colour)
            self.text(x + 18, y, name)
            x += 18 + 7.4 * len(name) + 22

    def __str__(self) -> str:
        height = self._bottom + 14
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} {height:.0f}" role="img" '
            f'width="{self._width}" font-family="system-ui, sans-serif"><title>{escape(self._title)}</title>\n'
            f'<rect width="100%" height="100%" rx="8" fill="#ffffff"/>\n' + "\n".join(self._parts) + "\n</svg>\n"
        )

    def _grow(self, bottom: float) -> None:
        self._bottom = max(self._bottom, bottom)
