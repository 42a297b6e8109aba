"""From runs of the lab to `diagnosis/calibration.toml`: what chance reaches where nothing is wrong, and what certainty is worth.

A threshold is the larger of what is declared as material, and why, and MARGIN times what 99 of 100 null runs stay within. Its origin says which:

    chance     what null runs reach, with the margin
    material   what is declared: null runs stay below it, in so many runs as are told
    chosen     what is declared, and no null run measured it: in none of them is there anything that it could be asked of

Confidence is
an isotonic fit of "the first cause is right" on certainty, in few levels of at least FEWEST runs, read off by straight lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from diagnosis.calibration import MARGIN, declared
from diagnosis.lab.confusion import is_first_right
from diagnosis.lab.plan import is_null
from diagnosis.lab.results import from_document
from diagnosis.quantiles import nearest_rank

EDGES = (0.0, 0.3, 0.5, 0.7, 0.85, 0.95, 0.995, 1.0)
FEWEST = 20
WITHIN = "0.99"


def calibrated(documents: Sequence[Mapping[str, Any]], seeds: str) -> str:
    """The file's text. documents: of finished runs (`cell.run_cell`); seeds: which, in words."""
    nulls = [each for each in documents if is_null(each["fault"])]
    results = [from_document(each) for each in documents]
    named = [(r.certainty, is_first_right(r)) for r in results if r.certainty is not None and r.observe == "full"]
    lines = [
        "# Made by `kvscope lab calibrate`; change nothing here by hand.",
        "",
        "[origin]",
        f'seeds = "{seeds}"',
        f"runs = {len(documents)}",
        f"null_runs = {len(nulls)}",
        f"margin = {MARGIN}",
        "",
        *_confidence(named),
        *_thresholds(nulls),
    ]
    return "\n".join(lines)


def levels(named: Sequence[tuple[float, bool]]) -> list[tuple[float, float, int]]:
    """(mean certainty, share that was right, n) by level, both never falling; levels of fewer than FEWEST runs are joined.

    A share is (right + 1) / (n + 2): few runs never give 0 or 1.
    """
    groups: list[list[tuple[float, bool]]] = []
    for low, high in pairwise(EDGES):
        inside = [each for each in named if low <= each[0] < high or (high == 1.0 and each[0] >= high)]
        if inside and groups and (len(groups[-1]) < FEWEST or len(inside) < FEWEST):
            groups[-1] = groups[-1] + inside
        elif inside:
            groups.append(inside)
    pooled: list[list[tuple[float, bool]]] = []
    for group in groups:
        pooled.append(group)
        while len(pooled) > 1 and _right(pooled[-2]) > _right(pooled[-1]):
            last = pooled.pop()
            pooled[-1] = pooled[-1] + last
    return [(sum(c for c, _ in group) / len(group), _right(group), len(group)) for group in pooled]


def _right(group: Sequence[tuple[float, bool]]) -> float:
    return (sum(right for _, right in group) + 1) / (len(group) + 2)


def _confidence(named: Sequence[tuple[float, bool]]) -> list[str]:
    found = levels(named)
    points = [(0.0, 0.0, 0), *((round(c, 4), round(r, 4), n) for c, r, n in found if c > 0)]
    if points[-1][0] < 1.0:
        points.append((1.0, points[-1][1] if found else 1.0, 0))
    return [
        "[confidence]",
        "# Certainty of the first cause (share of bootstrap replicates in which it is first, times penalties), and how often it was right.",
        f"certainty = {[c for c, _, _ in points]}",
        f"right = {[r for _, r, _ in points]}",
        f"runs = {[n for _, _, n in points]}",
        "",
    ]


def _thresholds(nulls: Sequence[Mapping[str, Any]]) -> list[str]:
    lines: list[str] = []
    for name, told in declared().items():
        heard = [each["noted"][name] for each in nulls if name in each.get("noted", {})]
        within = nearest_rank(np.asarray(heard), WITHIN) if heard else None
        value = told.least if within is None else max(told.least, MARGIN * within)
        origin = "chosen" if within is None else "chance" if value > told.least else "material"
        lines += [
            f'[thresholds."{name}"]',
            f'says = "{told.says}"',
            f'unit = "{told.unit}"',
            f"value = {value:.6g}",
            f'origin = "{origin}"',
            f"least = {told.least:.6g}",
            f'why = "{told.why}"',
            f"measured_in = {len(heard)}",
            *([] if within is None else [f"within = {within:.6g}"]),
            "",
        ]
    return lines
