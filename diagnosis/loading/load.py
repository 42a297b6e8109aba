"""From the store to the facts of a window: the only module of diagnosis that reads.

The client's row and the engine's row of one request are joined by `request_id`: durations travel across vantages, instants
do not (each array of instants in `RequestFacts` belongs to one vantage). Warm-up requests are left out and counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import (
    BlockTotals,
    Facts,
    LineageFacts,
    MarkFact,
    RequestFacts,
    StepFacts,
    WorkerFacts,
)
from diagnosis.ledger.sharing import sharing
from diagnosis.loading.caching_flags import caching_by_flags
from diagnosis.loading.clocks import engine_ahead_ns, least_routed_s, moved, moved_requests
from diagnosis.loading.handover import handovers
from diagnosis.loading.implied import with_implied
from diagnosis.loading.legs import one_a_request, with_legs
from diagnosis.loading.lineage import ASKED, StoredBlocks, block_size, lineage, names_blocks
from diagnosis.loading.requests import (
    COLUMNS,
    SERVED_FIRST,
    estimate_accepted,
    estimate_computed,
    floats,
    in_arrival_order,
    is_warmup,
    join_vantages,
    reach,
    repeats,
    seconds_since,
    told_twice,
)
from diagnosis.loading.routing import routing
from diagnosis.loading.tiers import loaded_bytes
from diagnosis.parallel import beside
from diagnosis.sampled import one_rate
from diagnosis.windows import holds_nothing, shown
from engine_probe.errors import BadWindow
from store.evidence import lineage as queries
from store.evidence.one_request import one_requests
from store.interface import Store, Window

NOTHING = np.array(None, dtype=object)
STEP_NUMBERS = [
    "step",
    "num_running",
    "num_waiting_prefill",
    "num_waiting_decode",
    "prefill_tokens",
    "decode_tokens",
    "recomputed_tokens",
    "num_preempted",
    "blocks_total",
    "blocks_used",
    "blocks_evicted",
    "oldest_wait_s",
    "schedule_s",
    "alloc_s",
    "probe_s",
]


AT_ONCE_S = 1.0
"""Requests of a run that came within less came at once: a rate would tell of milliseconds between them."""


def load(store: Store, window: Window, name: str, vantage: str) -> Facts:
    """Facts of one window as seen from `vantage` (client or engine). Raises BadWindow where it holds no request."""
    ahead_ns = engine_ahead_ns(store, window, vantage)
    with beside() as pool:
        stored = StoredBlocks(store, moved(window, ahead_ns), vantage, pool)
        return _load(store, window, name, vantage, stored, ahead_ns, pool)


def _load(
    store: Store, window: Window, name: str, vantage: str, stored: StoredBlocks, ahead_ns: int, pool: Executor
) -> Facts:
    table, num_again, num_warmup = _judged(store, window, name, vantage)
    implied: tuple[str, ...] = ()
    if vantage == "engine":
        table, implied = with_implied(table)
        table = one_a_request(store, window, table)
    table, rate, num_thinned = one_rate(store, table)
    table, window = moved_requests(table, ahead_ns), moved(window, ahead_ns)
    origin = int(pc.min(table["arrival_ns"]).as_py())
    newest = max(int(pc.max(table[c]).as_py() or origin) for c in ("arrival_ns", "end_ns", "last_token_ns"))
    bounds = Window(
        window.start_ns if window.start_ns is not None else origin,
        window.end_ns if window.end_ns is not None else newest + 1_000_000_000,
        window.run_id,
    )
    names = table["worker"].combine_chunks().unique().to_pylist()
    totals = pool.submit(_blocks, store, bounds, names)
    engine, engine_merged = None, False
    if vantage != "engine":
        wider = reach(window)
        engine = store.rows("request", wider, COLUMNS, where="vantage = 'engine'", order_by=SERVED_FIRST)
        engine_merged = told_twice(engine)
        if engine_merged:
            engine = _merged(store, wider, "engine", COLUMNS, SERVED_FIRST)
        engine = engine if engine.num_rows else None
        if engine is not None:
            engine, implied = with_implied(engine)
    requests = join_vantages(table, engine, vantage, origin, num_again, engine_merged=engine_merged)
    requests = replace(requests, sample_rate=rate, num_thinned=num_thinned, engine_ahead_ns=ahead_ns)
    requests = replace(requests, sources={**requests.sources, **dict.fromkeys(implied, "implied")})
    if window.run_id is not None:
        requests = replace(requests, repeat=repeats(table))
    workers = _serving(_workers(store, bounds), requests)
    steps = _steps(store, bounds, origin, requests.worker_names)
    routing_job = pool.submit(routing, store, window, requests, steps, block_size(workers))
    if steps is not None and requests.has("draft_tokens", 0.01):
        steps = _sequences_alone(steps)
    samples = _samples(store, bounds)
    routed_s = least_routed_s(store, bounds) if vantage == "engine" else {}
    marks = _marks(store, bounds, origin)
    size = block_size(workers) if names_blocks(table) else None
    facts_lineage = None
    if size is not None:
        facts_lineage = lineage(store, window, requests, table.select(ASKED), stored.of(table), size)
    blocks = totals.result()
    if blocks is None:  # without the life of blocks a miss can be joined to nothing
        facts_lineage = None
    if blocks is not None and facts_lineage is None and blocks.stored:
        blocks = replace(blocks, restored=queries.restored_blocks(store, bounds))
    routed = routing_job.result()
    moves = handovers(store, window, requests, steps, block_size(workers))
    requests = requests if moves is None else with_legs(requests, moves)
    requests = estimate_accepted(estimate_computed(requests, samples, workers), samples)
    visible = _visible(requests, steps, samples, facts_lineage, blocks)
    if routed is not None:
        visible |= routed.visible
    if moves is not None:
        visible |= moves.tells
    shared = None if size is None else sharing(table["prompt_blocks"], size)
    if shared is not None:  # how prompts begin is theirs to tell, whoever tells of the cache
        visible |= {"request.prompt_blocks"}
    if any(w.prefix_caching is not None for w in workers):
        visible |= {"worker.prefix_caching"}
    if any(w.flags for w in workers):
        visible |= {"worker.flags"}
    return Facts(
        name=name,
        start_s=(bounds.start_ns or origin) / 1e9 - origin / 1e9,
        end_s=((bounds.end_ns or newest) - origin) / 1e9,
        requests=requests,
        steps=steps,
        workers=workers,
        samples=samples,
        marks=marks,
        lineage=facts_lineage,
        blocks=blocks,
        visible=visible,
        num_warmup=num_warmup,
        num_unfinished=int((~requests.finished).sum()),
        clock_error_s=_clock_error(marks),
        arrivals_s=_arrivals_s(window, table),
        integrity=_integrity(store, bounds),
        routed_s=routed_s,
        routing=routed,
        handover=moves,
        sharing=shared,
        loaded_bytes=loaded_bytes(store, bounds, requests),
        asked_models=_asked_models(table, engine),
        scraped_workers=queries.scraped_workers(store, bounds),
        hit_tokens=queries.hit_tokens(store, bounds) if samples.get("prefix_hits_tokens_total") == 0 else 0.0,
    )


def _arrivals_s(window: Window, table: pa.Table) -> float | None:
    """Seconds from where the window begins (else the first arrival) to its end (else the last arrival); None where both are told.

    Without either end the gaps between n arrivals span n - 1 of n shares of the time.
    """
    if window.start_ns is not None and window.end_ns is not None:
        return None
    edges = pc.min_max(table["arrival_ns"])
    first, last = edges["min"].as_py(), edges["max"].as_py()
    start = first if window.start_ns is None else window.start_ns
    end = last if window.end_ns is None else window.end_ns
    both = window.start_ns is None and window.end_ns is None and table.num_rows > 1
    span_s: float = (end - start) / 1e9 * (table.num_rows / (table.num_rows - 1) if both else 1.0)
    return max(span_s, AT_ONCE_S)


def _judged(store: Store, window: Window, name: str, vantage: str) -> tuple[pa.Table, int, int]:
    """(the window's requests in arrival order, one row each and without warm-up; rows merged into others; warm-up requests)."""
    columns = [*COLUMNS, "prompt_blocks"]
    table = in_arrival_order(store.rows("request", window, columns, where="vantage = ?", params=[vantage]))
    delivered = table.num_rows
    if told_twice(table):
        table = _merged(store, window, vantage, columns, "arrival_ns, request_id")
    num_again = delivered - table.num_rows
    warm = is_warmup(table)
    num_warmup = int(warm.sum())
    table = table.filter(pa.array(~warm)) if num_warmup else table
    if table.num_rows == 0:
        extra = f" ({num_warmup} warm-up requests are left out)" if num_warmup else ""
        raise BadWindow(
            holds_nothing(store, window, f"window {name} ({shown(window)}) holds no {vantage} requests{extra}"),
            window=str(window),
        )
    return table, num_again, num_warmup


def _merged(store: Store, window: Window, vantage: str, columns: Sequence[str], order_by: str) -> pa.Table:
    condition, params = queries.window_sql(window, "arrival_ns")
    return one_requests(store, f"{condition} AND vantage = ?", [*params, vantage], columns, order_by=order_by)


def _asked_models(table: pa.Table, engine: pa.Table | None) -> frozenset[str]:
    told = pc.unique(table["model"]).drop_null()
    if not len(told) and engine is not None:
        told = pc.unique(engine["model"]).drop_null()
    return frozenset(told.to_pylist())


def _steps(store: Store, window: Window, origin: int, names: Sequence[str | None]) -> StepFacts | None:
    table = store.rows(
        "step", window, ["worker", "at_ns", "duration_s", "waiting_on", *STEP_NUMBERS], order_by="worker, at_ns"
    )
    if table.num_rows == 0:
        return None
    codes = table["worker"].combine_chunks().dictionary_encode()
    numbers = {name: floats(table[name]) for name in STEP_NUMBERS}
    waiting = table["waiting_on"].combine_chunks()
    for key in ("blocks", "budget", "seats", "dependency", "unknown"):
        numbers[f"waiting_on_{key}"] = floats(pc.struct_field(waiting, key))
    at = seconds_since(table["at_ns"], origin)
    worker = np.asarray(pc.fill_null(codes.indices, -1)).astype(np.int64)
    duration = floats(table["duration_s"])
    between = np.diff(at, prepend=np.nan)
    between[np.diff(worker, prepend=-2) != 0] = np.nan
    busy = np.nan_to_num(numbers["num_running"]) > 0
    duration = np.where(np.isfinite(duration), duration, np.where(busy, between, np.nan))
    return StepFacts(worker, tuple(codes.dictionary.to_pylist()), at, duration, numbers)


def _sequences_alone(steps: StepFacts) -> StepFacts:
    """Steps whose decode tokens are counted by sequence, as work is fitted: a step that speculates gives a sequence several."""
    sequences = np.fmin(steps.get("decode_tokens"), steps.get("num_running"))
    return replace(steps, numbers={**steps.numbers, "decode_tokens": sequences})


def _workers(store: Store, window: Window) -> list[WorkerFacts]:
    """Newest known value of each slow fact by worker, from the whole past of the run (or of the live store)."""
    past = Window(None, window.end_ns, window.run_id)
    table = store.rows("worker", past, order_by="at_ns")
    merged: dict[str | None, dict[str, Any]] = {}
    for row in table.to_pylist():
        facts = merged.setdefault(row["worker"], {"flags": {}})
        for key in ("engine", "engine_version", "model", "block_size", "num_blocks", "prefix_caching"):
            if row.get(key) is not None and (row[key] or key == "prefix_caching"):  # no pool has blocks of size 0
                facts[key] = row[key]
        facts["flags"].update({k: v for k, v in dict(row.get("flags") or []).items() if v is not None})
        if "prefix_caching" not in facts and (told := caching_by_flags(facts["flags"])) is not None:
            facts["prefix_caching"] = told
    return [WorkerFacts(worker=name, **facts) for name, facts in merged.items()]


def _serving(workers: list[WorkerFacts], requests: RequestFacts) -> list[WorkerFacts]:
    """Those that served the window's requests: a live store remembers workers that are long gone. All, where no row tells."""
    serving = [w for w in workers if w.worker in requests.worker_names]
    return serving or workers


def _samples(store: Store, window: Window) -> Mapping[str, float]:
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


def _marks(store: Store, window: Window, origin: int) -> list[MarkFact]:
    """Marks inside the window and in the minute before it (a start just before is what makes a cache cold)."""
    before = None if window.start_ns is None else window.start_ns - 60_000_000_000
    table = store.rows("mark", Window(before, window.end_ns, window.run_id), order_by="at_ns")
    return [
        MarkFact(row["mark"], (row["at_ns"] - origin) / 1e9, row["subject"], row["text"], dict(row["attrs"] or []))
        for row in table.to_pylist()
    ]


def _integrity(store: Store, window: Window) -> dict[str, tuple[int, int]]:
    table = store.rows("check", window, ["check", "outcome"])
    if table.num_rows == 0:
        return {}
    counted = table.filter(pc.not_equal(table["outcome"], "unknown"))
    found = {}
    for name in pc.unique(counted["check"]).to_pylist():
        mine = counted.filter(pc.equal(counted["check"], name))
        found[name] = (mine.num_rows, pc.sum(pc.equal(mine["outcome"], "failed")).as_py() or 0)
    return found


def _clock_error(marks: Sequence[MarkFact]) -> float | None:
    errors = [m.number("error_s") for m in marks if m.mark == "clock"]
    known = [error for error in errors if error is not None]
    return max(known) if known else None


def _blocks(store: Store, window: Window, workers: Sequence[str | None]) -> BlockTotals | None:
    """None where these workers tell of no blocks; a window without a change of any is one in which nothing was evicted, if they do."""
    row = queries.block_totals(store, window)
    if not any(row.values()) and not queries.tells_of_blocks(store, window, workers):
        return None
    rate = queries.block_rate(store, window)
    tier = {name: row[name] for name in ("tier_taken", "tier_given_up", "tier_loaded")}
    return BlockTotals(row["stored"], row["evicted"], None, row["cleared"], rate, **tier)


def _visible(
    requests: RequestFacts,
    steps: StepFacts | None,
    samples: Mapping[str, float],
    lineage: LineageFacts | None,
    blocks: BlockTotals | None,
) -> frozenset[str]:
    seen = {f"request.{name}" for name, values in requests.numbers.items() if np.isfinite(values).any()}
    if requests.gaps is not None:
        seen.add("request.token_ns")
    words = {"request.tenant": requests.tenant, "request.workload": requests.workload}
    seen |= {name for name, column in words.items() if (column != NOTHING).any()}
    if requests.model is not None:
        seen.add("request.model")
    if steps is not None:
        seen.add("step")
        seen |= {f"step.{name}" for name, values in steps.numbers.items() if np.isfinite(values).any()}
    if blocks is not None:
        seen.add("block.evicted")
        seen |= {"block.offloaded"} if blocks.tier_taken else set()
    if lineage is not None:
        seen.add("request.prompt_blocks")
    return frozenset(seen | {f"sample.{name.split(':')[0]}" for name in samples})
