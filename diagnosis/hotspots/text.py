"""Hotspots for a terminal at three in the morning: one sentence, each hotspot with its numbers, what to change.

Invariant: no line is wider than asked, but for SQL, which stays on one line so that it can be copied, and names from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from diagnosis.telling.wording import number, percent, seconds, wrapped

WIDTH = 80
"""Columns of the text."""
STATUS = {"hotspots": "HOTSPOT", "none": "NO HOTSPOT", "not_observable": "NOT OBSERVABLE HERE"}
MOST_ROWS = 10
"""Lines of a table; the rest is in the document."""


def render(document: Mapping[str, Any], *, sql: bool = True, width: int = WIDTH) -> str:
    """Text of a document (`Hotspots.to_dict()`), `width` columns wide. `sql` False leaves the queries out."""
    parts = [
        wrapped(f"{STATUS[document['status']]}: {document['verdict']}", width),
        _about(document, width),
        *(_spot(rank, spot, sql, width) for rank, spot in enumerate(document["hotspots"], 1)),
        _regret(document),
        _cannot_tell(document, width),
    ]
    return "\n\n".join(part for part in parts if part)


def _instant(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _about(document: Mapping[str, Any], width: int) -> str:
    window = document["window"]
    policies = ", ".join(document["policies"])
    lines = [
        f"window    {_instant(window['start_ns'])} to {_instant(window['end_ns'])} UTC"
        + (f", run {window['run_id']}" if window["run_id"] else ""),
        f"judged    {number(document['num_decisions'])} {'routing decisions' if document['has_routes'] else 'requests'}"
        + (f" (policy {policies})" if policies else ""),
    ]
    if document["baseline"] is not None:
        before = document["baseline"]
        lines.append(
            f"baseline  {before['text']}: {before['num_hotspots']} hotspots, {seconds(before['regret_mean_s'])} lost a decision"
        )
    rate = (
        f"{document['num_intervals']} intervals of {document['interval_s']:g} s; in an interval without a hotspot one is told "
        f"with a probability of at most {percent(document['false_alarm_rate'])}"
    )
    return "\n".join([*lines, wrapped(rate, width, "tested    ", " " * 10)])


def _spot(rank: int, spot: Mapping[str, Any], sql: bool, width: int) -> str:
    subject = spot["subject"]
    what = (spot["kind"] or "kind unknown").replace("_", " ")
    where = subject["kind"] if subject["id"] is None else f"{subject['kind']} {subject['id']}"
    cost = "cost unknown" if spot["regret_s"] is None else f"{seconds(spot['regret_s'])} lost"
    share = "" if spot["regret_share"] is None else f" ({percent(spot['regret_share'])} of all)"
    lines = [
        f"{rank}. {what}: {where}, {cost}{share}",
        f"   {_instant(spot['interval']['start_ns'])} to {_instant(spot['interval']['end_ns'])} UTC"
        + {True: ", in the baseline too", False: ", not in the baseline", None: ""}[spot["in_baseline"]],
    ]
    for fact in spot["evidence"]:
        lines.append(wrapped(fact["statement"], width, "   - ", "     "))
        if sql and fact["sql"]:
            lines.append(f"     sql: {fact['sql']}")
        if fact["request_ids"]:
            lines.append(wrapped("requests: " + ", ".join(fact["request_ids"]), width, "     ", "     "))
    if spot["because"]:
        lines.append(wrapped("Why cannot be told: " + spot["because"] + ".", width, "   ", "   "))
    lines.append(wrapped("Do: " + spot["advice"]["text"], width, "   ", "   "))
    return "\n".join(lines)


def _regret(document: Mapping[str, Any]) -> str:
    regret = document["regret"]
    if regret["total_s"] is None:
        return ""
    lines = [
        "Seconds lost against the best worker at each decision's instant",
        "",
        f"  {'worker':<24} {'decisions':>10} {'lost':>10} {'tokens/s':>10}",
    ]
    rows = sorted(regret["by_worker"], key=lambda row: -(row["regret_s"] or 0.0))
    for row in rows[:MOST_ROWS]:
        lost, rate = row["regret_s"], row["tokens_per_s"]
        lines.append(
            f"  {row['worker']:<24} {row['decisions']:>10,} {'-' if lost is None else seconds(lost):>10} "
            f"{'-' if rate is None else number(round(rate)):>10}"
        )
    if len(rows) > MOST_ROWS:
        lines.append(f"  and {len(rows) - MOST_ROWS} more (--json has all)")
    if regret["by_prefix"]:
        lines += ["", f"  {'prefix':<24} {'decisions':>10} {'lost':>10}"]
        for row in regret["by_prefix"][:5]:
            lines.append(f"  {row['prefix']:<24} {row['decisions']:>10,} {seconds(row['regret_s']):>10}")
    return "\n".join(lines)


def _cannot_tell(document: Mapping[str, Any], width: int) -> str:
    if not document["cannot_tell"]:
        return ""
    return "\n".join(
        ["Not known here", *(wrapped(what + ".", width, "  - ", "    ") for what in document["cannot_tell"])]
    )
