"""Does confidence mean what it says? Of the causes that were named first with about so much, how many were right.

A bin has the mean of the stated confidence and the share that was right; what is promised is that they differ by at most
MOST_APART in every bin of FEWEST runs or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

BINS = ((0.0, 0.2), (0.2, 0.5), (0.5, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 1.0))
MOST_APART = 0.10
FEWEST = 50
SIZE, LEFT, TOP = 320, 48, 16


def reliability(named: Iterable[tuple[float, bool]]) -> list[dict[str, Any]]:
    """A row a bin: n, mean confidence, share that was right, and its 95 % interval (Wilson)."""
    told = list(named)
    found = []
    for low, high in BINS:
        inside = [(c, right) for c, right in told if low <= c < high or (high == 1.0 and c == 1.0)]
        n, right = len(inside), sum(is_right for _, is_right in inside)
        stated = sum(c for c, _ in inside) / n if n else None
        observed = right / n if n else None
        found.append(
            {
                "from": low,
                "to": high,
                "n": n,
                "stated": stated,
                "observed": observed,
                "interval_95": wilson(right, n) if n else None,
                "apart": None if stated is None or observed is None else observed - stated,
            }
        )
    return found


def wilson(hits: int, n: int) -> tuple[float, float]:
    """95 % interval of a share. Source: Wilson 1927."""
    z = 1.959964
    share = hits / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def chart(bins: Sequence[dict[str, Any]]) -> str:
    """Stated against observed as an SVG: a dot a bin, as large as its runs are many, with its interval; the diagonal is honesty."""
    width, height = LEFT + SIZE + 16, TOP + SIZE + 44

    def x(value: float) -> float:
        return LEFT + SIZE * value

    def y(value: float) -> float:
        return TOP + SIZE * (1.0 - value)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        "<title>Stated confidence against the share that was right</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<polygon points="{x(0)},{y(0.1):.0f} {x(0.9):.0f},{y(1)} {x(1)},{y(1)} {x(1)},{y(0.9):.0f} {x(0.1):.0f},{y(0)} {x(0)},{y(0)}" fill="#e8f1e8"/>',
        f'<line x1="{x(0)}" y1="{y(0)}" x2="{x(1)}" y2="{y(1)}" stroke="#7a8f7a" stroke-dasharray="4 3"/>',
        f'<rect x="{x(0)}" y="{y(1)}" width="{SIZE}" height="{SIZE}" fill="none" stroke="#444444"/>',
    ]
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        lines.append(f'<text x="{x(tick):.0f}" y="{y(0) + 16}" text-anchor="middle">{tick:.1f}</text>')
        lines.append(f'<text x="{x(0) - 6}" y="{y(tick) + 4:.0f}" text-anchor="end">{tick:.1f}</text>')
    lines.append(f'<text x="{x(0.5):.0f}" y="{y(0) + 34}" text-anchor="middle">stated confidence</text>')
    lines.append(
        f'<text x="12" y="{y(0.5):.0f}" text-anchor="middle" transform="rotate(-90 12 {y(0.5):.0f})">share that was right</text>'
    )
    for row in bins:
        if not row["n"]:
            continue
        at, low, high = x(row["stated"]), *(y(value) for value in row["interval_95"])
        colour = "#1f5fa8" if row["n"] >= FEWEST else "#9ab3cf"
        lines.append(f'<line x1="{at:.1f}" y1="{low:.1f}" x2="{at:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
        lines.append(
            f'<circle cx="{at:.1f}" cy="{y(row["observed"]):.1f}" r="{3 + math.log10(row["n"]):.1f}" fill="{colour}"/>'
        )
        below = min(low, y(0)) + 12 if row["stated"] > 0.1 else low
        lines.append(f'<text x="{at:.1f}" y="{below:.1f}" text-anchor="middle">n {row["n"]}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
