"""A small SVG canvas for the pictures and plots of the documentation.

Each picture has a light and a dark version, and the browser selects one of them (``<picture>``). A drawing refers to
its colors by names such as "text" and "line". Each version has a palette that maps these names to colors.
"""

from __future__ import annotations

from html import escape

#: The color of each name, by version.
PALETTES: dict[str, dict[str, str]] = {
    "light": {
        "page": "#ffffff",
        "text": "#1f2328",
        "faint": "#59636e",
        "line": "#8c959f",
        "grid": "#d8dee4",
        "plain": "#f6f8fa",
        "blue": "#ddeeff",
        "blue line": "#0969da",
        "green": "#dafbe1",
        "green line": "#1a7f37",
        "amber": "#fff3c4",
        "amber line": "#9a6700",
        "red": "#ffe3e0",
        "red line": "#cf222e",
    },
    "dark": {
        "page": "#0d1117",
        "text": "#e6edf3",
        "faint": "#9198a1",
        "line": "#6e7681",
        "grid": "#30363d",
        "plain": "#161b22",
        "blue": "#0c2d4f",
        "blue line": "#58a6ff",
        "green": "#0f3320",
        "green line": "#3fb950",
        "amber": "#3b2a05",
        "amber line": "#d29922",
        "red": "#4a1512",
        "red line": "#f85149",
    },
}
_FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_HEAD = 7  # length of an arrowhead
_LINE_HEIGHT = 1.35


class Drawing:
    """A picture made of shapes and text. Later shapes cover earlier ones."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[tuple[str, tuple[str, ...]]] = []

    def box(self, x: float, y: float, width: float, height: float, *lines: str, color: str = "plain") -> None:
        """Draw a rounded rectangle with centered *lines* of text. The first line is bold."""
        border = f"{color} line" if color != "plain" else "line"
        self._add(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" fill="{{}}" stroke="{{}}"/>',
            color,
            border,
        )
        top = y + height / 2 - (len(lines) - 1) * 13 * _LINE_HEIGHT / 2 + 4.5
        for number, line in enumerate(lines):
            self.text(
                x + width / 2,
                top + number * 13 * _LINE_HEIGHT,
                line,
                anchor="middle",
                is_bold=number == 0,
                color="text" if number == 0 else "faint",
            )

    def bar(self, x: float, y: float, width: float, height: float, *, color: str) -> None:
        """Draw a filled rectangle without a border."""
        self._add(
            f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="2" fill="{{}}"/>',
            color,
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: int = 13,
        color: str = "text",
        is_bold: bool = False,
    ) -> None:
        """Write *text* with its baseline at *y*."""
        weight = ' font-weight="600"' if is_bold else ""
        self._add(
            f'<text x="{x:g}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight} fill="{{}}">'
            f"{_escape(text)}</text>",
            color,
        )

    def line(self, *points: tuple[float, float], color: str = "line", is_dashed: bool = False) -> None:
        """Draw a line through *points*."""
        dashes = ' stroke-dasharray="4 4"' if is_dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._add(f'<polyline points="{path}" fill="none" stroke="{{}}" stroke-width="1.5"{dashes}/>', color)

    def arrow(self, *points: tuple[float, float], color: str = "line", is_dashed: bool = False) -> None:
        """Draw a line through *points* with an arrowhead at its end.

        The last part is horizontal or vertical.
        """
        (from_x, from_y), (x, y) = points[-2:]
        along = (
            ((x > from_x) - (x < from_x)) * _HEAD,
            ((y > from_y) - (y < from_y)) * _HEAD,
        )
        base_x, base_y = x - along[0], y - along[1]
        across = (along[1] / 2, along[0] / 2)
        self.line(*points[:-1], (base_x, base_y), color=color, is_dashed=is_dashed)
        corners = (
            (x, y),
            (base_x + across[0], base_y + across[1]),
            (base_x - across[0], base_y - across[1]),
        )
        path = " ".join(f"{cx:g},{cy:g}" for cx, cy in corners)
        self._add(f'<polygon points="{path}" fill="{{}}"/>', color)

    def dot(self, x: float, y: float, *, color: str, radius: float = 6) -> None:
        """Draw a filled circle."""
        self._add(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{{}}"/>', color)

    def svg(self, palette: str) -> str:
        """Return the picture as an SVG document in the colors of *palette*, "light" or "dark"."""
        colors = PALETTES[palette]
        width, height = self._size
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{_FONT}">',
            f"<title>{escape(self._title)}</title>",
            f'<rect width="{width}" height="{height}" fill="{colors["page"]}"/>',
            *(part.format(*(colors[role] for role in roles)) for part, roles in self._parts),
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _add(self, part: str, *roles: str) -> None:
        self._parts.append((part, roles))


def _escape(text: str) -> str:
    return escape(text, quote=False).replace("{", "{{").replace("}", "}}")
