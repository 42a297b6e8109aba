"""What else is stored of a window: counters and gauges that were scraped, marks, and the checks of what was delivered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pyarrow.compute as pc

from diagnosis.facts import BY_BLOCKS, MarkFact
from store.evidence import lineage as queries
from store.interface import Store, Window


def counters_and_gauges(store: Store, window: Window) -> Mapping[str, float]:
    """Increase of each counter (and `:span_s` it took), `:mean`, `:max`, `:min` and `:n` of each gauge, by name."""
    out: dict[str, float] = {}
    for row in queries.counter_increases(store, window).to_pylist():
        if row["increase"] is not None and math.isfinite(row["increase"]):
            out[row["name"]] = float(row["increase"])
            out[f"{row['name']}:span_s"] = float(row["span_s"])
    for row in queries.gauge_summary(store, window).to_pylist():
        name = row["name"] if row["reason"] is None else f"{row['name']}_{row['reason']}"
        for key in ("mean", "max", "min", "n"):
            if row[key] is not None and math.isfinite(row[key]):
                out[f"{name}:{key}"] = float(row[key])
    return out


def marks_of(store: Store, window: Window, origin: int) -> list[MarkFact]:
    """Marks inside the window and in the minute before it (a start just before is what makes a cache cold).

    That a worker cleared its blocks is a `cache_reset` too, whoever marked it: engines tell it among their block events.
    """
    before = None if window.start_ns is None else window.start_ns - 60_000_000_000
    table = store.rows("mark", Window(before, window.end_ns, window.run_id), order_by="at_ns")
    marks = [
        MarkFact(row["mark"], (row["at_ns"] - origin) / 1e9, row["subject"], row["text"], dict(row["attrs"] or []))
        for row in table.to_pylist()
    ]
    resets = [
        MarkFact("cache_reset", (row["at_ns"] - origin) / 1e9, row["worker"], None, BY_BLOCKS)
        for row in queries.cache_resets(store, window).to_pylist()
        if before is None or row["at_ns"] >= before
    ]
    return sorted(marks + resets, key=lambda mark: mark.at_s)


def integrity(store: Store, window: Window) -> dict[str, tuple[int, int]]:
    """(how often it was told, how often it failed) of each check; unknown outcomes are left out."""
    table = store.rows("check", window, ["check", "outcome"])
    if table.num_rows == 0:
        return {}
    counted = table.filter(pc.not_equal(table["outcome"], "unknown"))
    found = {}
    for name in pc.unique(counted["check"]).to_pylist():
        mine = counted.filter(pc.equal(counted["check"], name))
        found[name] = (mine.num_rows, pc.sum(pc.equal(mine["outcome"], "failed")).as_py() or 0)
    return found


def clock_error(marks: Sequence[MarkFact]) -> float | None:
    """The largest that marks of clocks tell, in seconds; None where none does."""
    errors = [m.number("error_s") for m in marks if m.mark == "clock"]
    known = [error for error in errors if error is not None]
    return max(known) if known else None
