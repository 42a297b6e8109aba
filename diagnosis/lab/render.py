"""The matrix as text for a terminal; the published page is made by `page.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = ("fault", "severity", "expected", "n", "right", "wrong", "cannot tell", "claimed", "named first")
NO_FILE = "no such cause yet"
MET = {True: "met", False: "MISSED", None: "not enough runs"}


def render_text(document: Mapping[str, Any]) -> str:
    """Aligned columns of the cells, then the figures that are promised."""
    rows = [HEAD, *(row_of(cell) for cell in document["cells"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 1)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows]
    return "\n".join([*lines, "", *figures(document)])


def row_of(cell: Mapping[str, Any]) -> tuple[str, ...]:
    """A cell in words."""
    expected = "nothing" if cell["is_silent"] else ", ".join(cell["expected"]) if cell["has_cause"] else NO_FILE
    named = ", ".join(f"{name} {count}" for name, count in cell["named_first"].items())
    counts = (str(cell["n"]), str(cell["right"]), str(cell["wrong"]), str(cell["cannot_tell"]))
    return (cell["fault"], cell["severity"], expected, *counts, percent(cell["claimed"]), named)


def figures(document: Mapping[str, Any]) -> Sequence[str]:
    """What is promised, line by line, and the opponent."""
    width = max(len(row["target"]) for row in document["targets"])
    lines = [
        f"{row['target'].ljust(width)}  {found(row):>8}  ({row['wanted']}, of {row['n']:,})  {MET[row['met']]}"
        for row in document["targets"]
    ]
    told = document["baseline"]
    lines.append(
        f"Thresholds on gauges, on the same {told['n']:,} runs: right {percent(told['accuracy'])}, the diagnosis {percent(told['diagnosis'])}"
    )
    return [*lines, f"Failed: {document['failed']} runs"] if document["failed"] else lines


def found(row: Mapping[str, Any]) -> str:
    """The value of a target in its unit."""
    value = row["found"]
    if value is None:
        return "-"
    return f"{value:.1%}" if row["unit"] == "ratio" else f"{value} {row['unit']}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
