"""Draws a sweep: panels of lines as SVG, without any dependency, and bars for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 240  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 40  # its margins
NUM_TICKS = 4
COLORS = ("#2563eb", "#db2777", "#059669")
BAR_WIDTH = 30
EIGHTHS = " ▏▎▍▌▋▊▉"
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#374151}.title{font-weight:600}"
    ".grid{stroke:#e5e7eb}.line{fill:none;stroke-width:2}"
    "@media(prefers-color-scheme:dark){rect{fill:#111827}text{fill:#d1d5db}.grid{stroke:#374151}}"
)


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    values: Sequence[float | None]  # one for each point; None: not measured


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    series: Sequence[Series]


def svg(panels: Sequence[Panel], points: Sequence[float], label: str) -> str:
    """Draws the panels in a row, over the same `points`, whose axis has the title `label`."""
    width = WIDTH * len(panels)
    drawn = [
        f'<g transform="translate({WIDTH * place},0)">{_panel(panel, points, label)}</g>'
        for place, panel in enumerate(panels)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}">'
    background = f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", background, *drawn, "</svg>", ""])


def _panel(panel: Panel, points: Sequence[float], label: str) -> str:
    top = _round_up(max((value for one in panel.series for value in one.values if value is not None), default=1.0))
    low, high = min(points), max(points)

    def x(point: float) -> float:
        share = (point - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT}" y="18">{escape(panel.title)}</text>']
    for tick in range(NUM_TICKS + 1):
        value = top * tick / NUM_TICKS
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    below = f'y="{HEIGHT - BOTTOM + 16}" text-anchor="middle"'
    parts += [f'<text x="{x(point):.1f}" {below}>{point:g}</text>' for point in points]
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(label)}</text>')
    for place, (series, color) in enumerate(zip(panel.series, COLORS, strict=False)):
        found = [(x(point), y(value)) for point, value in zip(points, series.values, strict=True) if value is not None]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in found)
        parts.append(f'<polyline class="line" stroke="{color}" points="{path}"/>')
        parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{color}"/>' for across, down in found]
        if len(panel.series) > 1:
            where = f'x="{WIDTH - RIGHT}" y="{18 + 14 * place}"'
            parts.append(f'<text {where} text-anchor="end" style="fill:{color}">{escape(series.name)}</text>')
    return "".join(parts)


def _round_up(value: float) -> float:
    """Returns the next of 1, 2, 4, 5, 8 times a power of ten, so that quarters of the axis are easy to read."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value)


def bars(title: str, labels: Sequence[str], values: Sequence[float | None]) -> str:
    """Draws a bar for each value, followed by the value."""
    top = max((value for value in values if value is not None), default=0.0)
    width = max(map(len, labels))
    lines = [title]
    for label, value in zip(labels, values, strict=True):
        shown = "-" if value is None else f"{_bar(value / top if top else 0.0)} {value:,.1f}"
        lines.append(f"  {label:>{width}} {shown}")
    return "\n".join(lines)


def _bar(share: float) -> str:
    eighths = round(share * BAR_WIDTH * 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
