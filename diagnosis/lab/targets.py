"""The figures that are promised of a published matrix, and whether this one keeps them: by code, not by hand.

`met` is None where too few runs were made to say; what is None is not met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diagnosis.lab.reliability import FEWEST, MOST_APART

ACCURACY, ABSTAINED = 0.95, 0.10
OF_A_CELL, RUNS_OF_A_CELL = 0.8, 20
NULLS, FALSE_CAUSES = 1000, 0.01
ATTRIBUTION, UNEXPLAINED = 0.10, 0.15
BOTH = 0.85
LESS_SEEN, WRONG_HIGH = 300, 0.01


@dataclass(frozen=True, slots=True)
class Figures:
    """The document so far, and the cells that count."""

    found: dict[str, Any]
    cells: Sequence[dict[str, Any]]


def targets(figures: Figures) -> list[dict[str, Any]]:
    """A row a promise: what is wanted, what was found, of how many runs, whether it is met."""
    found = figures.found
    nulls, pairs, marks, less = found["nulls"], found["pairs"], found["marks"], found["observed"]["all"]
    told = found["attribution"]
    weak = [cell for cell in figures.cells if cell["right"] < OF_A_CELL * cell["n"]]
    thin = min((cell["n"] for cell in figures.cells), default=0)
    full = thin >= RUNS_OF_A_CELL
    n = found["n"]
    wrong_high = less["wrong_high"] / less["n"] if less["n"] else None
    apart = [row for row in found["reliability"] if row["n"] >= FEWEST]
    worst = max((abs(row["apart"]) for row in apart), default=None)
    return [
        _row("first verdict right, pooled over typical and strong", f"{ACCURACY:.0%} or more", found["accuracy"], n, _least(found["accuracy"], ACCURACY), enough=full),
        _row("cells (fault at typical or strong) with fewer than 16 of 20 right", "0", len(weak), len(figures.cells), not weak or not full, enough=full, unit="cells"),
        _row("abstained there", f"{ABSTAINED:.0%} or less", found["abstained"], n, _most(found["abstained"], ABSTAINED), enough=full),
        _row("false causes, nothing being wrong", f"{FALSE_CAUSES:.0%} or less", found["false_cause_rate"], nulls["n"], _most(found["false_cause_rate"], FALSE_CAUSES), enough=nulls["n"] >= NULLS),
        _row("false causes with high confidence", "0", nulls["false_high"], nulls["n"], nulls["false_high"] == 0, enough=nulls["n"] >= NULLS, unit="runs"),
        _row("claim of the true cause against the truth, median", f"within {ATTRIBUTION:.0%}", told["error"], told["n"], _most(told["error"], ATTRIBUTION), enough=full),
        _row("unexplained share of the change, median", f"under {UNEXPLAINED:.0%}", told["unexplained"], told["n"], _most(told["unexplained"], UNEXPLAINED), enough=full),
        _row("two causes at once: both in the first three", f"{BOTH:.0%} or more", pairs["both"], pairs["n"], _least(pairs["both"], BOTH), enough=pairs["n"] >= RUNS_OF_A_CELL),
        _row("verdicts that an innocent mark changed", "0", marks["changed"], marks["n"], marks["changed"] == 0, enough=marks["n"] >= RUNS_OF_A_CELL, unit="runs"),
        _row("with less to see: wrong with high confidence", f"{WRONG_HIGH:.0%} or less", wrong_high, less["n"], _most(wrong_high, WRONG_HIGH), enough=less["n"] >= LESS_SEEN),
        _row(f"stated against observed confidence, worst bin of {FEWEST} runs or more", f"within {MOST_APART:.0%}", worst, sum(row["n"] for row in apart), _most(worst, MOST_APART), enough=bool(apart)),
    ]  # fmt: skip


def _row(
    target: str, wanted: str, value: float | None, n: int, met: bool, *, enough: bool, unit: str = "ratio"
) -> dict[str, Any]:
    """A target that is missed is missed with few runs too; one that is kept needs the runs it is promised of."""
    known = value is not None and n > 0
    return {
        "target": target,
        "wanted": wanted,
        "found": value,
        "unit": unit,
        "n": n,
        "met": None if not known or (met and not enough) else met,
    }


def _least(value: float | None, bound: float) -> bool:
    return value is not None and value >= bound


def _most(value: float | None, bound: float) -> bool:
    return value is not None and value <= bound
