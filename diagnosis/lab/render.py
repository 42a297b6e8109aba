"""The matrix as text for a terminal and as Markdown for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = ("fault", "expected", "n", "right", "wrong", "cannot tell", "moved", "named first")
NO_FILE = "no such cause yet"


def render_text(document: Mapping[str, Any]) -> str:
    """Aligned columns, the summary below."""
    rows = [HEAD, *(_cells(row) for row in document["faults"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 1)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows]
    return "\n".join(
        [*lines, "", *_summary(document), "", "Confidence of named causes, and how many were right:", *_bins(document)]
    )


def render_markdown(document: Mapping[str, Any]) -> str:
    """Two tables and the sentences between them."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in document["faults"]]
    lines += [
        "",
        *_summary(document),
        "",
        "| confidence | causes named | mean confidence | right |",
        "|---|---|---|---|",
    ]
    for row in document["reliability"]:
        told = (
            f"{row['from']:.1f} to {row['to']:.1f}",
            str(row["n"]),
            _number(row["mean_confidence"]),
            _percent(row["right"]),
        )
        lines.append("| " + " | ".join(told) + " |")
    wrong = [
        (row["fault"], why) for row in document["faults"] if row["has_cause"] or row["is_silent"] for why in row["whys"]
    ]
    if wrong:
        lines += ["", "What was not right, where a cause exists:", "", *(f"- `{fault}`: {why}" for fault, why in wrong)]
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    expected = "nothing" if row["is_silent"] else ", ".join(row["expected"]) if row["has_cause"] else NO_FILE
    named = ", ".join(f"{name} {count}" for name, count in row["named_first"].items())
    failed = f"; failed {row['failed']}" if row["failed"] else ""
    shares = (_percent(row["right"]), _percent(row["wrong"]), _percent(row["cannot_tell"]))
    return (row["fault"], expected, str(row["n"]), *shares, f"{row['moved']}/{row['n']}", named + failed)


def _summary(document: Mapping[str, Any]) -> Sequence[str]:
    def said(name: str, told: Mapping[str, Any]) -> str:
        return (
            f"{name}: {told['n']} cells, right {_percent(told['right'])}, wrong {_percent(told['wrong'])}, "
            f"cannot tell {_percent(told['cannot_tell'])}"
        )

    lines = [
        said("All", document["all"]),
        said("Where a cause exists, or nothing is to be named", document["with_cause_file"]),
    ]
    return [*lines, f"Failed: {document['failed']} cells"] if document["failed"] else lines


def _bins(document: Mapping[str, Any]) -> Sequence[str]:
    return [
        f"  {row['from']:.1f} to {row['to']:.1f}   {row['n']:>4} named   mean {_number(row['mean_confidence']):>5}   right {_percent(row['right']):>5}"
        for row in document["reliability"]
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
