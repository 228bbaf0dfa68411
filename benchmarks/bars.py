"""Horizontal bar charts as SVG text: grouped, with values, readable on light and dark pages, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LABELS, VALUES = 760, 190, 70
"""Pixels: of the picture, of the group labels at the left, and of the values at the right."""
BAR, GAP, LINE = 13, 10, 18
COLOURS = ("#3366cc", "#e08214", "#2a9d6f", "#b5417a", "#7b6bb5", "#8c8c8c", "#5aa6c8", "#b08d3c")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1b1f24}.title{font-size:14px;font-weight:600}.quiet{fill:#59636e}"
    "line{stroke:#b9c0c8}@media(prefers-color-scheme:dark){text{fill:#e6e9ec}.quiet{fill:#9aa4ae}line{stroke:#4a535d}}"
)


@dataclass(frozen=True)
class Group:
    """Bars under one label: (series, value)."""

    label: str
    bars: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Chart:
    """A title, what the length of a bar means, and groups. ``line`` marks a value; ``logarithmic`` starts at ``least``."""

    title: str
    meaning: str
    groups: Sequence[Group]
    show: Callable[[float], str]
    line: float | None = None
    logarithmic: bool = False
    least: float = 0.0

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(name for group in self.groups for name, _ in group.bars))


def position(chart: Chart, value: float) -> float:
    """Share of the axis that ``value`` takes, 0 to 1."""
    most = max([value for group in chart.groups for _, value in group.bars] + ([] if chart.line is None else [chart.line]))
    if chart.logarithmic:
        low, high = math.log10(chart.least), math.log10(max(most, 10 * chart.least))
        return max(0.0, (math.log10(max(value, chart.least)) - low) / (high - low))
    return value / most


def svg(chart: Chart) -> str:
    """The chart as the text of a file."""
    colours = dict(zip(chart.series, COLOURS, strict=False))
    if len(colours) < len(chart.series):
        raise ValueError(f"{chart.title}: {len(chart.series)} series; at most {len(COLOURS)}")
    length = WIDTH - LABELS - VALUES
    parts, top = [], 2 * LINE
    for place, name in enumerate(chart.series):
        column, row = place % 4, place // 4
        x, y = 10 + column * (WIDTH - 20) // 4, top + row * LINE
        parts.append(
            f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colours[name]}"/><text x="{x + 15}" y="{y + 10}">{escape(name)}</text>'
        )
    top += ((len(chart.series) + 3) // 4) * LINE + GAP
    begin = top
    for group in chart.groups:
        middle = top + len(group.bars) * BAR / 2 + 4
        parts.append(f'<text x="{LABELS - 8}" y="{middle:.1f}" text-anchor="end">{escape(group.label)}</text>')
        for name, value in group.bars:
            width = position(chart, value) * length
            parts.append(f'<rect x="{LABELS}" y="{top}" width="{width:.1f}" height="{BAR - 2}" fill="{colours[name]}"/>')
            parts.append(f'<text class="quiet" x="{LABELS + width + 5:.1f}" y="{top + BAR - 3}">{escape(chart.show(value))}</text>')
            top += BAR
        top += GAP
    if chart.line is not None:
        mark = LABELS + position(chart, chart.line) * length
        parts.append(f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="{begin - 4}" y2="{top - GAP + 2}" stroke-dasharray="3 3"/>')
    scale = ", logarithmic" if chart.logarithmic else ""
    title = f'<text class="title" x="10" y="16">{escape(chart.title)}</text>'
    meaning = f'<text class="quiet" x="10" y="{top + 4}">{escape(chart.meaning + scale)}</text>'
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 14}" width="{WIDTH}" height="{top + 14}">'
    return "\n".join([frame, f"<style>{STYLE}</style>", title, *parts, meaning, "</svg>", ""])
