"""From the store to the facts of a window: which requests it holds and, beside them, what everybody else tells of it.

The client's row and the engine's row of one request are joined by `request_id`: durations travel across vantages, instants
do not (each array of instants in `RequestFacts` belongs to one vantage). Warm-up requests are left out and counted.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import Facts
from diagnosis.ledger.sharing import sharing
from diagnosis.loading.clocks import engine_ahead_ns, least_routed_s, moved, moved_requests
from diagnosis.loading.handover import handovers
from diagnosis.loading.implied import with_implied
from diagnosis.loading.judged_requests import judged_requests, merged_rows
from diagnosis.loading.legs import one_a_request, with_legs
from diagnosis.loading.lineage import ASKED, StoredBlocks, block_size, lineage, names_blocks
from diagnosis.loading.requests import (
    COLUMNS,
    SERVED_FIRST,
    estimate_accepted,
    estimate_computed,
    join_vantages,
    reach,
    repeats,
    told_twice,
)
from diagnosis.loading.routing import routing
from diagnosis.loading.telemetry import clock_error, counters_and_gauges, integrity, marks_of
from diagnosis.loading.tiers import loaded_bytes
from diagnosis.loading.visible import visible_names
from diagnosis.loading.workers import block_totals, sequences_alone, serving, step_facts, worker_facts
from diagnosis.parallel import beside
from diagnosis.sampled import one_rate
from store.evidence import lineage as queries
from store.interface import Store, Window

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
    table, num_again, num_warmup = judged_requests(store, window, name, vantage)
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
    totals = pool.submit(block_totals, store, bounds, names)
    engine, engine_merged = None, False
    if vantage != "engine":
        wider = reach(window)
        engine = store.rows("request", wider, COLUMNS, where="vantage = 'engine'", order_by=SERVED_FIRST)
        engine_merged = told_twice(engine)
        if engine_merged:
            engine = merged_rows(store, wider, "engine", COLUMNS, SERVED_FIRST)
        engine = engine if engine.num_rows else None
        if engine is not None:
            engine, implied = with_implied(engine)
    requests = join_vantages(table, engine, vantage, origin, num_again, engine_merged=engine_merged)
    requests = replace(requests, sample_rate=rate, num_thinned=num_thinned, engine_ahead_ns=ahead_ns)
    requests = replace(requests, sources={**requests.sources, **dict.fromkeys(implied, "implied")})
    if window.run_id is not None:
        requests = replace(requests, repeat=repeats(table))
    workers = serving(worker_facts(store, bounds), requests)
    steps = step_facts(store, bounds, origin)
    routing_job = pool.submit(routing, store, window, requests, steps, block_size(workers))
    if steps is not None and requests.has("draft_tokens", 0.01):
        steps = sequences_alone(steps)
    samples = counters_and_gauges(store, bounds)
    routed_s = least_routed_s(store, bounds) if vantage == "engine" else {}
    marks = marks_of(store, bounds, origin)
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
    visible = visible_names(requests, steps, samples, facts_lineage, blocks)
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
        clock_error_s=clock_error(marks),
        arrivals_s=_arrivals_s(window, table),
        integrity=integrity(store, bounds),
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


def _asked_models(table: pa.Table, engine: pa.Table | None) -> frozenset[str]:
    told = pc.unique(table["model"]).drop_null()
    if not len(told) and engine is not None:
        told = pc.unique(engine["model"]).drop_null()
    return frozenset(told.to_pylist())
