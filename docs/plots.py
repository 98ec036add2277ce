"""Draws the results of the benches as bar charts.

Each file in docs/figures contains the measurements for one chart, with their date and machine. To update the charts:

1. Run the benches with ``BENCH_JSON=docs/figures pytest -m bench``.
2. Run `docs/generate.py`.

The benches measure only the agent. Other programs ran alongside the agent for 90 minutes in a manual run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from drawing import Drawing

FIGURES = Path(__file__).parent / "figures"
_COLORS = ("blue line", "amber line")  # of the first and the second value of a row
_LEFT = 290  # the space for the names of the rows
_RIGHT = 150  # the space for the label of the longest bar
_WIDTH = 960
_BAR = 16


def plot(path: Path) -> Drawing:
    """Draw the rows of the JSON file at *path* as horizontal bars."""
    figure = json.loads(path.read_text(encoding="utf-8"))
    rows = figure["rows"]
    heights = [len(row["values"]) * (_BAR + 3) + 12 for row in rows]
    dates = sorted({row["date"] for row in rows})
    machines = sorted({row["machine"] for row in rows})
    drawing = Drawing(_WIDTH, 84 + sum(heights) + 18 * len(machines), figure["title"])
    drawing.text(20, 28, figure["title"], is_bold=True, size=15)
    series = [name for name in rows[0]["values"] if name]
    for number, name in enumerate(series):
        drawing.bar(_LEFT + number * 200, 42, 12, 12, color=_COLORS[number])
        drawing.text(_LEFT + 18 + number * 200, 53, name, color="faint")
    scale = (_WIDTH - _LEFT - _RIGHT) / max(value for row in rows for value in row["values"].values())
    y = 66.0
    for row, height in zip(rows, heights, strict=True):
        drawing.text(_LEFT - 12, y + (height - 12) / 2 + 3, row["name"], anchor="end")
        for number, value in enumerate(row["values"].values()):
            is_peer = not series and not row["name"].startswith("agent")
            top = y + number * (_BAR + 3)
            drawing.bar(_LEFT, top, value * scale, _BAR, color="line" if is_peer else _COLORS[number])
            measured_on = f" ({row['date']})" if len(dates) > 1 else ""
            label = f"{value:g} {figure['unit']}".strip() + measured_on
            drawing.text(_LEFT + value * scale + 6, top + _BAR - 3.5, label, size=12, color="faint")
        y += height
    for machine in machines:
        y += 18
        drawing.text(20, y, f"Measured on {' and '.join(dates)}: {machine}", size=12, color="faint")
    return drawing


#: Name of a chart -> the function that draws it.
PLOTS: dict[str, Callable[[], Drawing]] = {
    f"plot-{path.stem}": partial(plot, path) for path in sorted(FIGURES.glob("*.json"))
}
