"""From runs of the lab to `diagnosis/calibration.toml`: what chance reaches where nothing is wrong, and what certainty is worth.

A threshold is the larger of what is declared as material, and why, and MARGIN times what 99 of 100 null runs stay within. Its origin says which:

    chance     what null runs reach, with the margin
    material   what is declared: null runs stay below it, in so many runs as are told
    chosen     what is declared, and no null run measured it: in none of them is there anything that it could be asked of

Confidence is
an isotonic fit of "the first cause is right" on certainty, in few levels of at least FEWEST runs, read off by straight lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from diagnosis.calibration import MARGIN, declared
from diagnosis.lab.confusion import is_first_right
from diagnosis.lab.plan import is_null
from diagnosis.lab.results import from_document
from diagnosis.statistics.quantiles import nearest_rank

EDGES = (0.0, 0.3, 0.5, 0.7, 0.85, 0.95, 0.995, 1.0)
FEWEST = 20
PARTS = ("thresholds", "confidence")
WITHIN = "0.99"
Measured = tuple[int, "float | None"]
"""In how many null runs a threshold was asked, and what so many of them stay within; None: in none."""


def calibrated(
    documents: Sequence[Mapping[str, Any]], seeds: str, kept: Mapping[str, Any] | None = None, only: str | None = None
) -> str:
    """The file's text. documents: of finished runs (`cell.run_cell`); seeds: which, in words.

    only   thresholds | confidence: what these runs are for; the other part stays as it is in `kept`, with its own origin
    """
    kept = {} if kept is None else kept
    origin, heard = _heard(documents, seeds)
    confidence = _confidence(documents, seeds)
    if only == "confidence":
        origin = kept["origin"]
        heard = {name: (row["measured_in"], row.get("within")) for name, row in kept["thresholds"].items()}
    elif only == "thresholds":
        confidence = kept["confidence"]
    lines = [
        "# Made by `kvscope lab calibrate`; change nothing here by hand.",
        "",
        "[origin]",
        "# Of the thresholds.",
        *_table(origin),
        "[confidence]",
        "# Certainty of the first cause (share of bootstrap replicates in which it is first, times penalties), and how often it was right.",
        *_table(confidence),
        *_thresholds(heard),
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


def _table(rows: Mapping[str, Any]) -> list[str]:
    """Lines of a TOML table of words and numbers, and an empty one."""
    return [*(f"{key} = {json.dumps(value)}" for key, value in rows.items()), ""]


def _confidence(documents: Sequence[Mapping[str, Any]], seeds: str) -> dict[str, Any]:
    results = [from_document(each) for each in documents]
    named = [(r.certainty, is_first_right(r)) for r in results if r.certainty is not None and r.observe == "full"]
    found = levels(named)
    points = [(0.0, 0.0, 0), *((round(c, 4), round(r, 4), n) for c, r, n in found if c > 0)]
    if points[-1][0] < 1.0:
        points.append((1.0, points[-1][1] if found else 1.0, 0))
    certainty, right, runs = (list(column) for column in zip(*points, strict=True))
    return {"seeds": seeds, "certainty": certainty, "right": [round(each, 4) for each in right], "runs": runs}


def _heard(documents: Sequence[Mapping[str, Any]], seeds: str) -> tuple[dict[str, Any], dict[str, Measured]]:
    """(where thresholds come from, what was measured of each by name)."""
    nulls = [each for each in documents if is_null(each["fault"])]
    found: dict[str, Measured] = {}
    for name in declared():
        heard = [each["noted"][name] for each in nulls if name in each.get("noted", {})]
        found[name] = len(heard), nearest_rank(np.asarray(heard), WITHIN) if heard else None
    return {"seeds": seeds, "runs": len(documents), "null_runs": len(nulls), "margin": MARGIN}, found


def _thresholds(heard: Mapping[str, Measured]) -> list[str]:
    """One table each of all that are declared; one that is new was measured in no run."""
    lines: list[str] = []
    for name, told in declared().items():
        num, within = heard.get(name, (0, None))
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
            f"measured_in = {num}",
            *([] if within is None else [f"within = {within:.6g}"]),
            "",
        ]
    return lines
