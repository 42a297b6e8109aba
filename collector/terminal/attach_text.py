"""What an attach says at its end: what was written, what the engine counted, and what nobody saw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from engine_probe.attach.fleet import FleetSummary
    from engine_probe.attach.session import Summary

SHOWN_COUNTERS: Final = (
    "requests_finished_total",
    "prompt_tokens_total",
    "output_tokens_total",
    "prefix_queries_tokens_total",
    "prefix_hits_tokens_total",
    "preemptions_total",
)
MAX_NAMED: Final = 20


def of_one(summary: Summary, target: str) -> str:
    """One engine."""
    rows = _rows(summary.rows)
    lines = [f"Followed {summary.worker} for {summary.seconds:.0f} s and wrote to {target}: {rows}."]
    gains = {name: summary.counter_gains[name] for name in SHOWN_COUNTERS if name in summary.counter_gains}
    if gains:
        lines.append(
            "In this time the engine counted: "
            + ", ".join(f"{name} +{gain:,.0f}" for name, gain in gains.items())
            + "."
        )
    if summary.restarts:
        lines.append(
            f"It restarted {summary.restarts} times; the counts above are of all its lives, as far as scraped."
        )
    for unseen in summary.unseen:
        seconds = (unseen["last_ns"] - unseen["first_ns"]) / 1e9
        lines.append(
            f"Not seen: the counters of at most {seconds:.1f} s before an end of the engine ({unseen['reason']})."
        )
    events = summary.kv_events or {}
    if events.get("lost_messages"):
        lines.append(f"Not seen: {events['lost_messages']:,} KV-event messages (each hole is a gap mark).")
    lines += _lost(summary.lost_rows, summary.sink_error)
    return "\n".join(lines)


def of_fleet(summary: FleetSummary, target: str) -> str:
    """A fleet: a line a worker that restarted, failed or was never found; the others are counted."""
    workers = summary.workers
    lines = [
        f"Followed {len(workers)} {'worker' if len(workers) == 1 else 'workers'} for {summary.seconds:.0f} s and wrote to {target}: {_rows(summary.rows)}."
    ]
    troubled = {name: seen for name, seen in workers.items() if seen["restarts"] or seen["failed_scrapes"]}
    for name, seen in list(troubled.items())[:MAX_NAMED]:
        lines.append(f"{name}: {seen['restarts']} restarts, {seen['failed_scrapes']} of {_tries(seen)} scrapes failed.")
    if len(troubled) > MAX_NAMED:
        lines.append(f"... and {len(troubled) - MAX_NAMED} more with restarts or failed scrapes (--json names them).")
    for url, why in list(summary.never_found.items())[:MAX_NAMED]:
        lines.append(f"Never found: {url}: {why}")
    lines += _lost(summary.lost_rows, summary.sink_error)
    return "\n".join(lines)


def _tries(seen: Mapping[str, Any]) -> int:
    return int(seen["scrapes"]) + int(seen["failed_scrapes"])


def _rows(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(rows.items())) or "no rows"


def _lost(lost: Mapping[str, int], error: str | None) -> list[str]:
    return [
        f"Lost: {count:,} {kind} rows could not be written ({error or 'see the log'})."
        for kind, count in sorted(lost.items())
    ]
