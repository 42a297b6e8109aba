"""Charts of a report as SVG text: no script, no font, no file beside it; colours follow the reader's light or dark setting.

Every chart has a title and its numbers in words for those who cannot see it; the caller puts the numbers in a table as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Final

WIDTH: Final = 940
FEW_POINTS: Final = 5
_LEFT: Final = 64
_RIGHT: Final = 16


def waterfall(start_s: float, rows: Sequence[tuple[str, float]], end_s: float, say: Callable[[float], str]) -> str:
    """From the baseline's value over each row's part to the suspect's. Rows are (name, s)."""
    height, top, bottom = 320, 18, 96
    levels = [0.0, start_s, end_s]
    level = start_s
    for _, value in rows:
        levels += [level, level + value]
        level += value
    y = _scale(min(levels), max(levels), height - bottom, top)
    step = (WIDTH - _LEFT - _RIGHT) / (len(rows) + 2)
    parts = [_grid(min(levels), max(levels), y, say)]
    level = 0.0
    bars = [("baseline", 0.0, start_s, "total")]
    level = start_s
    for name, value in rows:
        bars.append((name, level, level + value, "up" if value >= 0 else "down"))
        level += value
    bars.append(("suspect", 0.0, end_s, "total"))
    for place, (name, low, high, kind) in enumerate(bars):
        x, centre = _LEFT + place * step + step * 0.14, _LEFT + (place + 0.5) * step
        upper, lower = min(y(low), y(high)), max(y(low), y(high))
        value = high if kind == "total" else high - low
        text = say(value) if kind == "total" else f"{'+' if value > 0 else ''}{say(value)}"
        parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{upper:.1f}" width="{step * 0.72:.1f}" height="{max(lower - upper, 1):.1f}"/>'
        )
        parts.append(f'<text class="value" x="{centre:.1f}" y="{upper - 4:.1f}">{escape(text)}</text>')
        parts.append(
            f'<text class="name" transform="translate({centre:.1f},{height - bottom + 14}) rotate(35)">{escape(name)}</text>'
        )
    words = f"From {say(start_s)} to {say(end_s)}: " + ", ".join(f"{name} {say(value)}" for name, value in rows)
    return _svg(height, words, parts)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    moments: Sequence[tuple[float, str]],
    say: Callable[[float], str],
    length_s: float,
) -> str:
    """Values over the seconds since each window began, windows laid over each other; moments are drawn upright, numbered."""
    height, top, bottom = 268, 44, 40
    values = [value for points in series.values() for _, value in points]
    highest = max(values, default=1.0)
    y = _scale(0.0, highest, height - bottom, top)
    x = _scale(0.0, max(length_s, 1e-9), _LEFT, WIDTH - _RIGHT)
    parts = [_grid(0.0, highest, y, say)]
    for number, (at_s, text) in enumerate(moments, start=1):
        if 0 <= at_s <= length_s:
            parts.append(
                f'<line class="moment" x1="{x(at_s):.1f}" x2="{x(at_s):.1f}" y1="{top}" y2="{height - bottom}"><title>{escape(text)}</title></line>'
            )
            parts.append(f'<text class="number" x="{x(at_s):.1f}" y="{top - 6}">{number}</text>')
    for place, (name, points) in enumerate(series.items()):
        path = " ".join(f"{x(at_s):.1f},{y(value):.1f}" for at_s, value in points)
        parts.append(f'<polyline class="line{place}" points="{path}"/>')
        if len(points) < FEW_POINTS:  # one alone is no line
            parts += [
                f'<circle class="line{place}" cx="{x(at_s):.1f}" cy="{y(value):.1f}" r="4"/>' for at_s, value in points
            ]
        parts.append(f'<text class="legend line{place}" x="{_LEFT + 8 + place * 110}" y="14">{escape(name)}</text>')
    for tick in _ticks(0.0, length_s, 6):
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{height - bottom + 16}">{escape(say(tick))}</text>')
    parts.append(f'<text class="axis" x="{(WIDTH + _LEFT) / 2:.0f}" y="{height - 4}">since the window began</text>')
    words = "; ".join(
        f"{name}: highest {say(max(value for _, value in points))}" for name, points in series.items() if points
    )
    return _svg(height, words, parts)


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str], say: Callable[[float], str]) -> str:
    """A bar for each row, made of its parts. Rows are (label, {part: s})."""
    row_height, top, left = 24, 30, 150
    height = top + row_height * len(rows) + 8
    longest = max((sum(parts.values()) for _, parts in rows), default=1.0)
    x = _scale(0.0, max(longest, 1e-9), left, WIDTH - 90)
    drawn = []
    for place, name in enumerate(names):
        drawn.append(f'<rect class="part{place % 9}" x="{left + place * 98}" y="6" width="10" height="10"/>')
        drawn.append(f'<text class="legend" x="{left + 14 + place * 98}" y="15">{escape(name)}</text>')
    for number, (label, parts) in enumerate(rows):
        y, start = top + number * row_height, 0.0
        drawn.append(f'<text class="label" x="{left - 8}" y="{y + 15}">{escape(label)}</text>')
        for place, name in enumerate(names):
            value = parts.get(name, 0.0)
            if value > 0:
                drawn.append(
                    f'<rect class="part{place % 9}" x="{x(start):.1f}" y="{y + 3}" width="{max(x(start + value) - x(start), 0.5):.1f}" height="{row_height - 8}"><title>{escape(f"{name} {say(value)}")}</title></rect>'
                )
                start += value
        drawn.append(f'<text class="end" x="{x(start) + 6:.1f}" y="{y + 15}">{escape(say(start))}</text>')
    words = "; ".join(
        f"{label}: " + ", ".join(f"{name} {say(value)}" for name, value in parts.items()) for label, parts in rows
    )
    return _svg(height, words, drawn)


def _svg(height: int, words: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(words)}">{"".join(parts)}</svg>'


def _scale(low: float, high: float, at_low: float, at_high: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: at_low + (value - low) / span * (at_high - at_low)


def _grid(low: float, high: float, y: Callable[[float], float], say: Callable[[float], str]) -> str:
    drawn = []
    for tick in _ticks(low, high, 5):
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        drawn.append(f'<text class="scale" x="{_LEFT - 6}" y="{y(tick) + 4:.1f}">{escape(say(tick))}</text>')
    return "".join(drawn)


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from low to high."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    rough = span / about
    power: Any = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
