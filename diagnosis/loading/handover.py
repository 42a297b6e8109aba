"""Hand-overs of KV from the worker that prefilled to the one that decodes, as facts: each second of one has one reason.

    wire           bytes were under way; or waited for the link, which carried another hand-over up to that instant
    room           nothing moved, and the decode worker had not blocks enough for it; or what came was evicted there before its turn
                   and computed again, or the request preempted
    orchestration  nothing moved, and there was room
    failed         a transfer that broke: its wire, what it waited beyond those that went well, before it and behind it, and
                   the time up to it that nothing tells of (until somebody noticed), and what the decode worker then computed again
    queue          the KV was there, and the decode worker had not begun

Invariant: of a hand-over these sum (but for stalls after it) to the time from the end of its prefill to its first step at the decode worker. The link and the
room are looked at in the rows of the transfers and of the decode worker's steps, else in its scraped usage; where neither tells, room is
part of orchestration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import F64, I64, Bool, HandoverFacts, RequestFacts, StepFacts
from diagnosis.loading.moves import BETWEEN, moves
from diagnosis.loading.requests import reach, seconds_since
from store.evidence.lineage import window_sql
from store.interface import Store, Window

AT_ONCE_S: Final = 0.0005
"""A transfer that begins this soon after the end of another into the same worker waited for it."""
LOOKS: Final = 16
"""Instants of a wait at which the decode worker's blocks are looked at."""
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
    wait, wire = (np.nan_to_num(_floats(table[name])) for name in ("wait_s", "wire_s"))
    begin = end - wire
    broke = np.asarray(pc.fill_null(pc.is_in(table["outcome"], value_set=pa.array(BROKE)), False))
    link, floor = _behind_others(target, begin, end, wait)
    prompt = requests.get("prompt_tokens")[row]
    short = _without_room(steps, names, target, begin - wait + floor, begin, prompt, block_size)
    if not np.isfinite(short).any():
        short = _without_room_by_gauge(
            store, window, requests.origin_ns, names, target, begin - wait + floor, begin, prompt, block_size
        )
    room = np.where(np.isfinite(short), short, 0.0) * np.maximum(wait - floor, 0.0)
    link = np.minimum(link, np.maximum(wait - room, 0.0))
    begun = seconds_since(table["begun_ns"], requests.origin_ns)
    queue, queue_short = _queue(steps, names, target, end, begun)
    computed = _floats(table["computed_tokens"])
    lost = _computed_again(broke, computed, block_size)
    again = _again(broke | lost, _floats(table["prefill_s"]))
    idle = np.maximum(wait - room - link, 0.0)
    usual_wait = np.minimum(idle, _usual(idle[~broke]))
    untold = begin - wait - requests.engine_first_s[row]
    unnoticed = idle - usual_wait + np.nan_to_num(np.clip(untold - _usual(untold[~broke]), 0.0, None))
    queue = queue - queue_short
    usual_queue = np.where(broke, np.minimum(queue, _usual(queue[~broke])), queue)
    unnoticed += queue - usual_queue  # no KV is there to wait with
    parts = {
        "transfer_wire": np.where(broke, 0.0, wire) + link,
        "decode_block_shortage": room + queue_short + np.where(lost, again, 0.0) + _known(table["stalled_s"]),
        "transfer_orchestration": np.where(broke, usual_wait, idle),
        "transfer_failures": np.where(broke, wire + again + unnoticed, 0.0),
        "decode_queue": usual_queue,
    }
    size = len(requests)
    totals = {name: np.bincount(row, seconds, size).astype(np.float64) for name, seconds in parts.items()}
    last = np.full(size, -1, dtype=np.int64)
    last[row] = np.arange(len(row))  # rows are by time: of several hand-overs the last one decodes
    moved = last >= 0
    at = np.maximum(last, 0)
    tokens, by_caller = _floats(table["output_tokens"])[at], requests.get("output_tokens")
    return HandoverFacts(
        parts=totals,
        moved=moved,
        worker_names=names,
        worker=np.where(moved, target[at], -1),
        first_s=np.where(moved, seconds_since(table["first_ns"], requests.origin_ns)[at], np.nan),
        last_s=np.where(moved, seconds_since(table["last_ns"], requests.origin_ns)[at], np.nan),
        output_tokens=np.where(moved, tokens, np.nan),
        again={
            "transfer_failures": float(np.nansum(computed[broke])),
            "decode_block_shortage": float(np.nansum(computed[lost])),
        },
        before_first=moved & _gave_first_token(requests, totals, tokens, by_caller),
        num_bytes=_floats(table["num_bytes"]),
        wire_s=wire,
        wait_s=wait,
        link_s=link,
        broke=broke,
        of=row,
        sees_room=bool(np.isfinite(short).any()),
        tells=_tells(table),
    )


def _tells(table: pa.Table) -> frozenset[str]:
    """What is known of these moves: of recorded ones all, of others what their requests tell."""
    if pc.any(table["recorded"]).as_py():
        return frozenset(("transfer.wait_s", "transfer.wire_s", "transfer.outcome"))
    return frozenset(f"transfer.{name}" for name in ("wait_s", "wire_s") if table[name].null_count < table.num_rows)


def with_legs(requests: RequestFacts, moves: HandoverFacts) -> RequestFacts:
    """The requests with what both of their workers told of them: the joined row is that of the one who prefilled."""
    numbers = dict(requests.numbers)
    first = numbers.get("engine_output_tokens")
    if first is not None:
        given = moves.output_tokens + np.where(moves.before_first, 0.0, first)
        numbers["engine_output_tokens"] = np.where(moves.moved, given, first)
    whole = numbers.get("engine_e2e_s")
    if whole is not None:
        numbers["engine_e2e_s"] = np.where(moves.moved, moves.last_s - requests.engine_arrival_s, whole)
    return replace(requests, numbers=numbers)


def one_a_request(store: Store, window: Window, table: pa.Table) -> pa.Table:
    """Engine rows of which each request has one: that of the worker that prefilled it, with what the decode worker told of its end.

    A decode worker that was given the first token counts it to its prompt; one that was not gives the caller its first.
    """
    found = moves(store, window)
    if found is None:
        return table
    query, params = found
    sent = store.query(f"SELECT DISTINCT request_id, target_worker AS worker FROM ({query}) WHERE {BETWEEN}", params)
    if sent.num_rows == 0:
        return table
    is_leg = pc.is_in(_pairs(table), value_set=_pairs(sent).combine_chunks())
    firsts = table.filter(pc.invert(is_leg))
    legs = table.filter(pc.and_(is_leg, pc.is_in(table["request_id"], value_set=firsts["request_id"].combine_chunks())))
    if legs.num_rows == 0:
        return table
    place = pc.index_in(firsts["request_id"], value_set=legs["request_id"].combine_chunks())
    taken = legs.take(place.combine_chunks())
    moved = pc.is_valid(place)
    gives_first = pc.fill_null(pc.and_(moved, pc.less_equal(taken["prompt_tokens"], firsts["prompt_tokens"])), False)
    both = pc.add(pc.fill_null(firsts["output_tokens"], 0), taken["output_tokens"])
    first_ns = pc.if_else(gives_first, taken["first_token_ns"], firsts["first_token_ns"])
    columns = {name: pc.if_else(moved, taken[name], firsts[name]) for name in ("last_token_ns", "end_ns", "state")}
    columns |= {
        "first_token_ns": first_ns,
        "output_tokens": pc.if_else(
            moved, pc.if_else(gives_first, taken["output_tokens"], both), firsts["output_tokens"]
        ),
        "decode_s": pc.if_else(
            moved,
            pc.divide(pc.subtract(columns["last_token_ns"], first_ns).cast(pa.float64()), 1e9),
            firsts["decode_s"],
        ),
    }
    for name in ("token_ns", "token_counts"):  # the gap of the hand-over itself is no step
        columns[name] = pa.chunked_array([_either(moved, taken[name], firsts[name])])
    for name, column in columns.items():
        at = firsts.schema.get_field_index(name)
        firsts = firsts.set_column(at, firsts.schema.field(at), column.cast(firsts.schema.field(at).type))
    return firsts


def _either(moved: pa.ChunkedArray, one: pa.ChunkedArray, other: pa.ChunkedArray) -> pa.Array:
    """`one` where `moved`, else `other`: lists, of which `if_else` takes none."""
    size = len(one)
    both = pa.concat_arrays([one.combine_chunks(), other.combine_chunks()])
    return both.take(pa.array(np.where(np.asarray(moved), np.arange(size), size + np.arange(size))))


def _pairs(table: pa.Table) -> pa.ChunkedArray:
    return pc.binary_join_element_wise(table["request_id"], table["worker"], "\x00")


def _read(store: Store, window: Window) -> pa.Table | None:
    """Transfers between two workers, in order of time, each beside the row of its request at the worker that took it."""
    found = moves(store, window)
    if found is None:
        return None
    query, params = found
    legs, leg_params = window_sql(reach(window), "arrival_ns")
    table = store.query(
        "SELECT t.*, d.first_scheduled_ns AS begun_ns, d.first_token_ns AS first_ns, d.last_token_ns AS last_ns, d.prefill_s, "
        f"d.stalled_s, d.computed_tokens, d.output_tokens FROM ({query}) t LEFT JOIN (SELECT request_id, worker, first_scheduled_ns, first_token_ns, "
        f"last_token_ns, prefill_s, stalled_s, computed_tokens, output_tokens FROM request WHERE {legs} AND vantage = 'engine' "
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


def _without_room(
    steps: StepFacts | None,
    names: tuple[str, ...],
    target: I64,
    start: F64,
    end: F64,
    prompt: F64,
    block_size: int | None,
) -> F64:
    """[m] share of each wait in which the decode worker had fewer blocks free than the prompt needs; NaN where no step tells.

    When it was let in there was room: it needed no more than was free then, however many of its blocks were there already.
    """
    short = np.full(len(target), np.nan)
    if steps is None or not block_size:
        return short
    needed = np.ceil((prompt + 1) / block_size)
    for code, name in enumerate(names):
        mine = np.flatnonzero((target == code) & np.isfinite(needed))
        free_at = _free(steps, name)
        if free_at is None or len(mine) == 0:
            continue
        at, free = free_at
        looks = start[mine, None] + (end - start)[mine, None] * (np.arange(LOOKS) + 0.5) / LOOKS
        meanwhile = free[np.clip(np.searchsorted(at, looks, "right") - 1, 0, None)]
        when_let_in = free[np.clip(np.searchsorted(at, end[mine], "right") - 1, 0, None)]
        most = np.minimum(needed[mine], np.maximum(when_let_in, 1.0))
        short[mine] = np.mean(meanwhile < most[:, None], axis=1)
    return short


def _without_room_by_gauge(
    store: Store,
    window: Window,
    origin_ns: int,
    names: tuple[str, ...],
    target: I64,
    start: F64,
    end: F64,
    prompt: F64,
    block_size: int | None,
) -> F64:
    """The same by the scraped usage of the decode workers' blocks, where they tell how many they have; NaN where nothing tells.

    A scrape is a second old, so what was free when a hand-over was let in is not looked at.
    """
    short = np.full(len(target), np.nan)
    if not block_size:
        return short
    condition, params = window_sql(reach(window), "at_ns")
    table = store.query(
        f"SELECT worker, at_ns, value FROM sample WHERE {condition} AND name = 'kv_usage_ratio' AND worker IS NOT NULL ORDER BY at_ns",
        params,
    )
    past, past_params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    pools = store.query(
        f"SELECT worker, arg_max(num_blocks, at_ns) AS size FROM worker WHERE {past} AND num_blocks > 0 GROUP BY worker",
        past_params,
    )
    size = dict(zip(pools["worker"].to_pylist(), pools["size"].to_pylist(), strict=True))
    of = np.asarray(table["worker"].to_numpy(zero_copy_only=False), dtype=object)
    at, used = seconds_since(table["at_ns"], origin_ns), _floats(table["value"])
    needed = np.ceil((prompt + 1) / block_size)
    for code, name in enumerate(names):
        mine = np.flatnonzero((target == code) & np.isfinite(needed))
        scraped = np.flatnonzero(of == name)
        if name not in size or not len(scraped) or not len(mine):
            continue
        free = (1.0 - used[scraped]) * size[name]
        looks = start[mine, None] + (end - start)[mine, None] * (np.arange(LOOKS) + 0.5) / LOOKS
        last = np.clip(np.searchsorted(at[scraped], looks, "right") - 1, 0, None)
        short[mine] = np.mean(free[last] < needed[mine, None], axis=1)
    return short


def _free(steps: StepFacts, worker: str) -> tuple[F64, F64] | None:
    """(end of each step of the worker, blocks free after it); None where they do not tell."""
    if worker not in steps.worker_names:
        return None
    total, used = steps.get("blocks_total"), steps.get("blocks_used")
    known = (steps.worker == list(steps.worker_names).index(worker)) & np.isfinite(total) & np.isfinite(used)
    rows = np.flatnonzero(known)
    return None if len(rows) == 0 else (steps.at_s[rows], total[rows] - used[rows])


def _queue(steps: StepFacts | None, names: tuple[str, ...], target: I64, end: F64, begun: F64) -> tuple[F64, F64]:
    """[m] seconds from the KV's arrival to the first step, and those of them in which the worker's queue waited for blocks."""
    queue = np.nan_to_num(np.clip(begun - end, 0.0, None))
    short = np.zeros(len(queue))
    waiting = None if steps is None else steps.get("waiting_on_blocks")
    if steps is None or waiting is None or not np.isfinite(waiting).any():
        return queue, short
    for code, name in enumerate(names):
        mine = np.flatnonzero((target == code) & (queue > 0))
        if name not in steps.worker_names or len(mine) == 0:
            continue
        rows = np.flatnonzero(steps.worker == list(steps.worker_names).index(name))
        looks = end[mine, None] + queue[mine, None] * (np.arange(LOOKS) + 0.5) / LOOKS
        step = np.clip(np.searchsorted(steps.at_s[rows], looks, "left"), 0, len(rows) - 1)
        short[mine] = np.mean(np.nan_to_num(waiting[rows])[step] > 0, axis=1) * queue[mine]
    return queue, short


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


def _known(column: pa.ChunkedArray) -> F64:
    return np.nan_to_num(_floats(column))


def _floats(column: pa.ChunkedArray) -> F64:
    return np.asarray(column.cast(pa.float64()).combine_chunks().to_numpy(zero_copy_only=False), dtype=float)
