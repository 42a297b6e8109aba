"""The live picture as lines of text that fit a terminal; what was told by others cannot drive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from collector.output import printable
from diagnosis.wording import seconds

MOST_WORKERS: Final = 40
MOST_LATENCIES: Final = 20
UNKNOWN: Final = "-"


def screen(seen: Mapping[str, Any], width: int) -> str:
    """The whole screen of `/api/v1/now`'s answer, no line wider than `width` columns."""
    totals = seen["totals"]
    at = datetime.fromtimestamp(seen["now_ns"] / 1e9).astimezone().strftime("%H:%M:%S %Z")
    lines = [
        f"kvscope top  {at}" + ("  (the collector is stopping)" if seen["is_draining"] else ""),
        f"running {_known(totals['num_running'])}  waiting: prefill {_known(totals['num_waiting_prefill'])}, "
        f"decode {_known(totals['num_waiting_decode'])}  oldest wait {_span(totals['oldest_wait_s'])}  open {_known(totals['open'])}",
        "",
        *_firing(seen["alerts"]),
        *_workers(seen["workers"]),
        "",
        *_latencies(seen["latencies"], seen["recent_minutes"]),
        "",
        *_findings(seen["findings"]),
    ]
    return "\n".join(_cut(line, width) for line in lines)


def _firing(alerts: Sequence[Mapping[str, Any]] | None) -> list[str]:
    if not alerts:
        return []
    return [*(f"FIRING {printable(one['alert'])}: {printable(one['summary'])}" for one in alerts), ""]


def _workers(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    if not workers:
        return ["No worker sends its steps, so what runs at this moment is not known."]
    rows = [
        [
            printable(one["worker"] or "(no name)"),
            _span(one["age_s"]),
            _known(one["num_running"]),
            f"{_known(one['num_waiting_prefill'])}/{_known(one['num_waiting_decode'])}",
            _span(one["oldest_wait_s"]),
            _share(one["blocks_used"], one["blocks_total"]),
            _share(one["blocks_cached"], one["blocks_total"]),
            UNKNOWN if one["hit_ratio"] is None else f"{100 * one['hit_ratio']:.0f} %",
        ]
        for one in workers[:MOST_WORKERS]
    ]
    more = [f"... and {len(workers) - MOST_WORKERS} more workers"] if len(workers) > MOST_WORKERS else []
    return [*_table(["worker", "seen", "run", "wait p/d", "oldest", "KV used", "cached", "hits"], rows), *more]


def _latencies(rows: Sequence[Mapping[str, Any]], minutes: int) -> list[str]:
    if not rows:
        return [f"No live request ended in the last {minutes} minutes."]
    told = [
        [
            printable(row["worker"] or row["model"] or "?"),
            row["vantage"],
            _known(row["requests"]),
            *(_pair(row["metrics"].get(name)) for name in ("ttft", "tpot", "e2e")),
        ]
        for row in rows[:MOST_LATENCIES]
    ]
    header = [f"last {minutes} min", "seen by", "requests", "TTFT p50/p99", "TPOT p50/p99", "E2E p50/p99"]
    return _table(header, told)


def _findings(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    if not findings:
        return ["No verdict yet; `kvscope diagnose` asks for one."]
    return [f"{printable(one['status'].replace('_', ' '))}: {printable(one['verdict'])}" for one in findings[:5]]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns that align: the first to the left, numbers to the right."""
    whole = [list(header), *map(list, rows)]
    widths = [min(max(len(row[place]) for row in whole), 24) for place in range(len(header))]
    return [
        "  ".join(
            cell[:size].ljust(size) if place == 0 else cell.rjust(size)
            for place, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in whole
    ]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(width - 1, 0)] + "…"


def _known(value: object) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _span(value: float | None) -> str:
    return UNKNOWN if value is None else seconds(max(value, 0.0))


def _share(part: int | None, whole: int | None) -> str:
    return f"{100 * part / whole:.0f} %" if part is not None and whole else UNKNOWN


def _pair(cell: Mapping[str, float | None] | None) -> str:
    return UNKNOWN if cell is None else f"{_span(cell['p50_s'])}/{_span(cell['p99_s'])}"
