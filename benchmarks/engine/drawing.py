"""Lines as one small SVG, so that a result can be looked at without anything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _GAP = 760, 200, 70, 66
_MARKED = 12  # points of a line that are few enough to be distinguished
# Of ranges: a row's height, where they begin beside the labels, and marks for each 1 of the axis.
_ROW, _LABELS, _TICKS = 46, 130, 10
_COLOURS = ("#1f6feb", "#d1803c", "#3a9d5d", "#8250df")


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a title, and lines by their names; `from_zero`: of amounts, which begin at zero."""

    title: str
    lines: Mapping[str, Points]
    from_zero: bool = False


def draw(panels: Sequence[Panel], title: str, to: Path) -> None:
    """Write the panels one below the other; x is the same in all of them."""
    out = _beginning(len(panels) * (_HEIGHT + _GAP) + 60, title, _LEFT)
    for number, panel in enumerate(panels):
        out += _panel(panel, 60 + number * (_HEIGHT + _GAP))
    to.write_text("\n".join([*out, "</svg>\n"]), encoding="utf-8")


def draw_ranges(
    rows: Mapping[str, Mapping[str, tuple[float, float, float]]], title: str, to: Path
) -> None:
    """Write a line for each row, with a dot and a whisker for each name: middle, low, high."""
    names = list(dict.fromkeys(name for of in rows.values() for name in of))
    colours = dict(zip(names, _COLOURS, strict=False))
    most = max(high for of in rows.values() for _, _, high in of.values())
    height = 60 + _ROW * len(rows)

    def at(x: float) -> float:
        return _LABELS + (_LEFT + _WIDTH - _LABELS) * x / most

    out = _beginning(height + 30, title, 10)
    for number, name in enumerate(names):
        out.append(
            f'<text x="{_LABELS + 130 * number}" y="44" '
            f'fill="{colours[name]}">{escape(name)}</text>'
        )
    for tick in range(int(most * _TICKS) + 1):
        x = f"{at(tick / _TICKS):.1f}"
        out.append(
            f'<line x1="{x}" x2="{x}" y1="54" y2="{height}" stroke="#ddd"/>'
            f'<text x="{x}" y="{height + 16}" text-anchor="middle">{tick / _TICKS:g}</text>'
        )
    for number, (label, of) in enumerate(rows.items()):
        top = 60 + _ROW * number
        out.append(f'<text x="10" y="{top + _ROW / 2:.0f}">{escape(label)}</text>')
        for place, (name, (middle, low, high)) in enumerate(of.items()):
            y = top + _ROW * (place + 0.5) / (len(names) + 0.5)
            out.append(
                f'<line x1="{at(low):.1f}" x2="{at(high):.1f}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="{colours[name]}" stroke-width="2"/>'
                f'<circle cx="{at(middle):.1f}" cy="{y:.1f}" r="4" fill="{colours[name]}"/>'
            )
    to.write_text("\n".join([*out, "</svg>\n"]), encoding="utf-8")


def _beginning(height: int, title: str, left: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + _LEFT + 20} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{left}" y="22" '
        f'font-size="15">{escape(title)}</text>',
    ]


def _panel(panel: Panel, top: int) -> list[str]:
    xs = [x for points in panel.lines.values() for x, _ in points]
    ys = [y for points in panel.lines.values() for _, y in points]
    low, high = min(ys), max(ys)
    margin = 0.05 * (high - low) or 1.0
    low, high = 0.0 if panel.from_zero else low - margin, high + margin
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def at(x: float, y: float) -> str:
        right = _LEFT + _WIDTH * (x - first) / (last - first)
        return f"{right:.1f},{top + _HEIGHT * (high - y) / (high - low):.1f}"

    out = [
        f'<text x="{_LEFT}" y="{top - 8}">{escape(panel.title)}</text>',
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#ccc"/>',
        f'<text x="{_LEFT}" y="{top + _HEIGHT + 15}">{first:g}</text>'
        f'<text x="{_LEFT + _WIDTH}" y="{top + _HEIGHT + 15}" text-anchor="end">{last:g}</text>',
    ]
    out += [
        f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{value:.4g}</text>'
        for y, value in ((top + 12, high), (top + _HEIGHT, low))
    ]
    for number, (name, points) in enumerate(panel.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(at(x, y) for x, y in points)
        out.append(f'<polyline fill="none" stroke="{colour}" points="{path}"/>')
        if len(points) <= _MARKED:
            for right, down in (at(x, y).split(",") for x, y in points):
                out.append(f'<circle cx="{right}" cy="{down}" r="3" fill="{colour}"/>')
        out.append(
            f'<text x="{_LEFT + number * _WIDTH / len(panel.lines):.0f}" '
            f'y="{top + _HEIGHT + 33}" fill="{colour}">{escape(name)}</text>'
        )
    return out
