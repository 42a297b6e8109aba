"""What became of the prompt blocks that one request did not find: evicted when and for whom, or never stored here.

A request tells its chain of block hashes (`prompt_blocks`) and how many tokens it found cached; the blocks behind these were
missed. Of each the last thing that happened to it on this worker before the request came says why. Source: design section 7, lineage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from store.evidence.lineage import ON_DEVICE, PAST_NS, window_sql
from store.interface import Store, Window
from store.sql_json import json_objects
from store.statements import one_text, rows_of

FATES: Final = {
    "evicted": "evicted",
    "removed": "removed",
    "cleared": "cleared",
    "offloaded": "moved to another tier",
    "stored": "stored by then, and not found all the same",
    "hit": "there by then, and not found all the same",
    "loaded": "loaded by then, and not found all the same",
}
NEVER: Final = "not stored here in the hour before"
_NOTHING: Final[Mapping[str, Any]] = {"change": None, "at_ns": None, "request_id": None, "reason": None, "idle_s": None}


def lineage_of(store: Store, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The missed blocks of a request's rows at engines, neighbours of the same fate as one.

    num_blocks, first_block (its place in the prompt), fate, at_ns and before_s (s before arrival) of what happened last,
    caused_by (request that the block made room for), idle_s (unused until then), reason
    """
    return [
        found for row in rows if row["vantage"] == "engine" and row["prompt_blocks"] for found in _missed(store, row)
    ]


def _missed(store: Store, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    size = _block_size(store, row)
    cached = row["cached_tokens"] if row["cached_tokens"] is not None else row["cached_tokens_device"]
    if size is None or cached is None or row["worker"] is None:
        return []
    found = cached // size
    missed = [int(block) for block in row["prompt_blocks"][found:]]
    last = _last_events(store, row, missed)
    told = [(place, last.get(block, _NOTHING)) for place, block in enumerate(missed, start=found)]
    return [
        _part(row, list(group))
        for _, group in groupby(
            told, key=lambda one: tuple(one[1][name] for name in ("change", "request_id", "reason"))
        )
    ]


def _part(row: Mapping[str, Any], members: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    place, event = members[0]
    at_ns = max((one["at_ns"] for _, one in members if one["at_ns"] is not None), default=None)
    return {
        "worker": row["worker"],
        "first_block": place,
        "num_blocks": len(members),
        "fate": NEVER if event["change"] is None else FATES[event["change"]],
        "at_ns": at_ns,
        "before_s": None if at_ns is None else (row["arrival_ns"] - at_ns) / 1e9,
        "caused_by": event["request_id"],
        "reason": event["reason"],
        "idle_s": max((one["idle_s"] for _, one in members if one["idle_s"] is not None), default=None),
    }


def _block_size(store: Store, row: Mapping[str, Any]) -> int | None:
    condition, params = window_sql(Window(run_id=row["run_id"]), "at_ns")
    sql = (
        f"SELECT block_size FROM worker WHERE worker = ? AND block_size IS NOT NULL AND {condition} "
        "ORDER BY at_ns DESC LIMIT 1"
    )
    found = store.query(sql, [row["worker"], *params]).column(0).to_pylist()
    return int(found[0]) if found else None


def _last_events(store: Store, row: Mapping[str, Any], blocks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Block -> the last thing that happened to it on the device before the request came."""
    if not blocks:
        return {}
    condition, params = window_sql(Window(row["arrival_ns"] - PAST_NS, row["arrival_ns"], row["run_id"]), "at_ns")
    latest = ", ".join(f"arg_max({name}, at_ns) AS {name}" for name in ("change", "request_id", "reason", "idle_s"))
    sql = (
        f"SELECT block_hash, {latest}, max(at_ns) AS at_ns FROM block WHERE worker = ? AND {condition} AND {ON_DEVICE} "
        f"AND block_hash IN (SELECT {rows_of('UBIGINT')}) GROUP BY block_hash"
    )
    events = json_objects(store.query(sql, [row["worker"], *params, one_text(blocks)]))
    return {int(event["block_hash"]): event for event in events}
