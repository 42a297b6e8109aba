"""The live picture as lines of text that fit a terminal; what was told by others cannot drive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from collector.terminal.output import printable
from collector.terminal.width import cut, padded, told_apart, width_of
from diagnosis.telling.wording import seconds, wrapped

MOST_WORKERS: Final = 40
MOST_LATENCIES: Final = 20
LINES_OF_WORDS: Final = 3
"""Most lines of one verdict or alert."""
WIDEST: Final = 24
"""Columns of a cell."""
NARROWEST_NAME: Final = 8
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
        *_firing(seen["alerts"], width),
        *_workers(seen["workers"], width),
        "",
        *_latencies(seen["latencies"], seen["recent_minutes"], width),
        "",
        *_findings(seen["findings"], width),
    ]
    return "\n".join(cut(line, width) for line in lines)


def old_screen(before: str, why: str, width: int) -> str:
    """A screen that could not be renewed, below why; `before` may be such a one itself."""
    kept = before.partition(_OLD)[2] or before
    return "\n".join([*_words(printable(why), width), _OLD + kept])


_OLD: Final = "what is shown below is older; trying again\n\n"


def _firing(alerts: Sequence[Mapping[str, Any]] | None, width: int) -> list[str]:
    if not alerts:
        return []
    told = [_words(f"FIRING {printable(one['alert'])}: {printable(one['summary'])}", width) for one in alerts]
    return [*(line for lines in told for line in lines), ""]


def _words(text: str, width: int) -> list[str]:
    """The text in a few lines; an ellipsis where it has more."""
    lines = wrapped(text, max(width, 20), rest="  ").splitlines()
    return lines if len(lines) <= LINES_OF_WORDS else [*lines[: LINES_OF_WORDS - 1], f"{lines[LINES_OF_WORDS - 1]} …"]


def _workers(workers: Sequence[Mapping[str, Any]], width: int) -> list[str]:
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
    return [*_table(["worker", "seen", "run", "wait p/d", "oldest", "KV used", "cached", "hits"], rows, width), *more]


def _latencies(rows: Sequence[Mapping[str, Any]], minutes: int, width: int) -> list[str]:
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
    return _table(header, told, width)


def _findings(findings: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    if not findings:
        return ["No verdict yet; `kvscope diagnose` asks for one."]
    told = [f"{printable(one['status'].replace('_', ' '))}: {printable(one['verdict'])}" for one in findings[:5]]
    return [line for text in told for line in _words(text, width)]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Columns that align: the first to the left, numbers to the right. Names give way before numbers do."""
    whole = [list(header), *map(list, rows)]
    sizes = [min(max(width_of(row[place]) for row in whole), WIDEST) for place in range(len(header))]
    room = width - sum(sizes[1:]) - 2 * (len(header) - 1)
    sizes[0] = min(sizes[0], max(room, NARROWEST_NAME))
    names = [header[0], *told_apart([row[0] for row in rows], sizes[0])]
    return [
        "  ".join(
            padded(name if place == 0 else cut(row[place], size), size, right=place > 0)
            for place, size in enumerate(sizes)
        ).rstrip()
        for name, row in zip(names, whole, strict=True)
    ]


def _known(value: object) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _span(value: float | None) -> str:
    return UNKNOWN if value is None else seconds(max(value, 0.0))


def _share(part: int | None, whole: int | None) -> str:
    return f"{100 * part / whole:.0f} %" if part is not None and whole else UNKNOWN


def _pair(cell: Mapping[str, float | None] | None) -> str:
    return UNKNOWN if cell is None else f"{_span(cell['p50_s'])}/{_span(cell['p99_s'])}"
