"""Hand-overs of KV from the worker that prefilled to the one that decodes, as facts: each second of one has one reason.

    wire           bytes were under way; or waited for the link, which carried another hand-over up to that instant
    room           nothing moved, and the decode worker had not blocks enough for it; or what came was evicted there before its turn
                   and computed again, or the request preempted
    seat           nothing moved, there were blocks, and as many requests ran as the decode worker has seats; it is part of queue
    orchestration  nothing moved, and there was room
    failed         a transfer that broke: its wire, what it waited beyond those that went well, before it and behind it, and
                   the time up to it that nothing tells of (until somebody noticed), and what the decode worker then computed again
    queue          the KV was there, and the decode worker had not begun; with it what waited for a seat before the KV came

Invariant: of a hand-over these sum (but for stalls after it) to the time from the end of its prefill to its first step at the decode worker. The link
is looked at in the rows of the transfers; where nobody tells of the decode worker's room or seats (`decode_room`), it is part of
orchestration.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import F64, I64, Bool, HandoverFacts, RequestFacts, StepFacts
from diagnosis.hotspots.columns import numbers
from diagnosis.loading.decode_room import Waits, queued, seats_taken, without_room, without_room_by_gauge
from diagnosis.loading.moves import moves
from diagnosis.loading.requests import reach, seconds_since
from store.evidence.lineage import window_sql
from store.interface import Store, Window

AT_ONCE_S: Final = 0.0005
"""A transfer that begins this soon after the end of another into the same worker waited for it."""
MOSTLY: Final = 0.5
"""Share of what waited while nothing is known to be in the way that must have had a seat, before it is said that seats were free."""
BROKE: Final = ("fell_back", "failed", "refused")


def handovers(
    store: Store, window: Window, requests: RequestFacts, steps: StepFacts | None, block_size: int | None
) -> HandoverFacts | None:
    """Of the window's requests; None where no move between two workers is told of any of them."""
    table = _read(store, window)
    if table is None:
        return None
    found = pc.index_in(table["request_id"], value_set=pa.array(requests.request_id, pa.string())).combine_chunks()
    table, row = table.filter(pc.is_valid(found)), np.asarray(found.drop_null()).astype(np.int64)
    # what a request itself calls a load came from a tier, whatever the tier's name
    is_load = requests.get("kv_load_s")[row] > 0
    table, row = table.filter(pa.array(~is_load)), row[~is_load]
    if len(row) == 0:
        return None
    codes = table["target_worker"].combine_chunks().dictionary_encode()
    target, names = np.asarray(codes.indices).astype(np.int64), tuple(codes.dictionary.to_pylist())
    end = seconds_since(table["at_ns"], requests.origin_ns)
    wait, wire = (np.nan_to_num(numbers(table[name])) for name in ("wait_s", "wire_s"))
    begin = end - wire
    broke = np.asarray(pc.fill_null(pc.is_in(table["outcome"], value_set=pa.array(BROKE)), False))
    link, floor = _behind_others(target, begin, end, wait)
    prompt = requests.get("prompt_tokens")[row]
    unlinked = Waits(names, target, begin - wait + floor, begin)
    short = without_room(steps, unlinked, prompt, block_size)
    if not np.isfinite(short).any():
        short = without_room_by_gauge(store, window, requests.origin_ns, unlinked, prompt, block_size)
    room = np.where(np.isfinite(short), short, 0.0) * np.maximum(wait - floor, 0.0)
    seats = seats_taken(store, window, requests.origin_ns, steps, Waits(names, target, begin - wait, begin))
    seat = np.minimum(np.nan_to_num(seats.taken) * wait, np.maximum(wait - room, 0.0))
    link = np.minimum(link, np.maximum(wait - room - seat, 0.0))
    begun = seconds_since(table["begun_ns"], requests.origin_ns)
    queue, queue_short = queued(steps, names, target, end, begun)
    computed = numbers(table["computed_tokens"])
    lost = _computed_again(broke, computed, block_size)
    again = _again(broke | lost, numbers(table["prefill_s"]))
    idle = np.maximum(wait - room - seat - link, 0.0)
    perhaps = np.where(np.isfinite(seats.taken), 0.0, seats.busiest) * idle
    usual_wait = np.minimum(idle, _usual(idle[~broke]))
    untold = begin - wait - requests.engine_first_s[row]
    unnoticed = idle - usual_wait + np.nan_to_num(np.clip(untold - _usual(untold[~broke]), 0.0, None))
    queue = queue - queue_short
    usual_queue = np.where(broke, np.minimum(queue, _usual(queue[~broke])), queue)
    unnoticed += queue - usual_queue  # no KV is there to wait with
    parts = {
        "transfer_wire": np.where(broke, 0.0, wire) + link,
        "decode_block_shortage": room
        + queue_short
        + np.where(lost, again, 0.0)
        + np.nan_to_num(numbers(table["stalled_s"])),
        "transfer_orchestration": np.where(broke, usual_wait, idle),
        "transfer_failures": np.where(broke, wire + again + unnoticed, 0.0),
        "decode_queue": usual_queue + seat,
    }
    size = len(requests)
    totals = {name: np.bincount(row, seconds, size).astype(np.float64) for name, seconds in parts.items()}
    last = np.full(size, -1, dtype=np.int64)
    last[row] = np.arange(len(row))  # rows are by time: of several hand-overs the last one decodes
    moved = last >= 0
    at = np.maximum(last, 0)
    first_s = np.where(moved, seconds_since(table["first_ns"], requests.origin_ns)[at], np.nan)
    told = np.nan_to_num(numbers(table["queue_s"])[at]) + np.nan_to_num(numbers(table["prefill_s"])[at])
    tokens, by_caller = numbers(table["output_tokens"])[at], requests.get("output_tokens")
    return HandoverFacts(
        parts=totals,
        moved=moved,
        worker_names=names,
        worker=np.where(moved, target[at], -1),
        first_s=first_s,
        last_s=np.where(moved, seconds_since(table["last_ns"], requests.origin_ns)[at], np.nan),
        output_tokens=np.where(moved, tokens, np.nan),
        again={
            "transfer_failures": float(np.nansum(computed[broke])),
            "decode_block_shortage": float(np.nansum(computed[lost])),
        },
        before_first=moved & _gave_first_token(requests, totals, tokens, by_caller),
        num_bytes=numbers(table["num_bytes"]),
        wire_s=wire,
        wait_s=wait,
        link_s=link,
        broke=broke,
        of=row,
        sees_room=bool(np.isfinite(short).any()),
        sees_seats=bool(perhaps.sum() <= MOSTLY * idle.sum()),
        seats=seats.num,
        tells=_tells(table),
        # who decodes may be asked as early as who prefills: what it queues until then is that prefill's
        told_s=np.clip(np.minimum(told, np.nan_to_num(first_s - requests.engine_first_s)), 0.0, None),
    )


def _tells(table: pa.Table) -> frozenset[str]:
    """What is known of these moves: of recorded ones all, of others what their requests tell."""
    if pc.any(table["recorded"]).as_py():
        return frozenset(("transfer.wait_s", "transfer.wire_s", "transfer.outcome"))
    return frozenset(f"transfer.{name}" for name in ("wait_s", "wire_s") if table[name].null_count < table.num_rows)


def _read(store: Store, window: Window) -> pa.Table | None:
    """Transfers between two workers, in order of time, each beside the row of its request at the worker that took it."""
    found = moves(store, window)
    if found is None:
        return None
    query, params = found
    legs, leg_params = window_sql(reach(window), "arrival_ns")
    table = store.query(
        "SELECT t.*, d.first_scheduled_ns AS begun_ns, d.first_token_ns AS first_ns, d.last_token_ns AS last_ns, d.queue_s, d.prefill_s, "
        f"d.stalled_s, d.computed_tokens, d.output_tokens FROM ({query}) t LEFT JOIN (SELECT request_id, worker, first_scheduled_ns, first_token_ns, "
        f"last_token_ns, queue_s, prefill_s, stalled_s, computed_tokens, output_tokens FROM request WHERE {legs} AND vantage = 'engine' "
        "QUALIFY row_number() OVER (PARTITION BY request_id, worker ORDER BY arrival_ns DESC) = 1) d "
        "ON t.request_id = d.request_id AND t.target_worker = d.worker ORDER BY t.at_ns, t.request_id",
        [*params, *leg_params],
    )
    return table if table.num_rows else None


def _behind_others(target: I64, begin: F64, end: F64, wait: F64) -> tuple[F64, F64]:
    """([m] seconds that each waited while the link into its worker carried others, [m] what hand-overs wait there at least)."""
    link, floor = np.zeros(len(begin)), np.zeros(len(begin))
    for worker in np.unique(target):
        mine = np.flatnonzero(target == worker)
        mine = mine[np.argsort(begin[mine], kind="stable")]
        joined = np.zeros(len(mine), dtype=bool)
        joined[1:] = np.abs(begin[mine][1:] - end[mine][:-1]) <= AT_ONCE_S
        first = np.maximum.accumulate(np.where(joined, 0, np.arange(len(mine))))
        alone = wait[mine][~joined]
        usual = float(np.quantile(alone, 0.1, method="inverted_cdf")) if len(alone) else 0.0
        floor[mine] = np.minimum(usual, wait[mine])
        busy = begin[mine] - begin[mine][first]
        link[mine] = np.clip(np.minimum(wait[mine] - floor[mine], busy), 0.0, None)
    return link, floor


def _computed_again(broke: Bool, computed: F64, block_size: int | None) -> Bool:
    """[m] hand-overs that went well, and of which the decode worker computed more than the last, partial block all the same."""
    again: Bool = ~broke & (computed > 2.0 * (block_size or np.inf))
    return again


def _usual(seconds: F64) -> float:
    """Median of what is known and not below 0; 0 where nothing is."""
    known = seconds[np.isfinite(seconds)]
    return max(float(np.median(known)), 0.0) if len(known) else 0.0


def _again(again: Bool, prefill: F64) -> F64:
    """[m] seconds that the decode worker computed what it should have been sent: beyond its usual first step."""
    usual = prefill[~again & np.isfinite(prefill)]
    step = float(np.median(usual)) if len(usual) else 0.0
    return np.where(again, np.nan_to_num(np.clip(prefill - step, 0.0, None)), 0.0)


def _gave_first_token(requests: RequestFacts, totals: dict[str, F64], tokens: F64, by_caller: F64) -> np.ndarray:
    """Whether the caller's first token came from the worker that decodes, [n]: it gave all of them, or the first came later."""
    counted = np.isfinite(tokens) & np.isfinite(by_caller)
    spent = sum(totals.values(), np.zeros(len(requests)))
    ttft = requests.first_token_s - requests.arrival_s
    prefilled = requests.engine_first_s - requests.engine_arrival_s
    later: np.ndarray = (spent > 0) & (ttft - prefilled >= 0.9 * spent)
    return np.where(counted, tokens >= by_caller, later)
