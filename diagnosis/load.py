"""From the store to the facts of a window: the only module of diagnosis that reads.

The client's row and the engine's row of one request are joined by `request_id`: durations travel across vantages, instants
do not (each array of instants in `RequestFacts` belongs to one vantage). Warm-up requests are left out and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import (
    F64,
    BlockTotals,
    Facts,
    Gaps,
    LineageFacts,
    MarkFact,
    Obj,
    RequestFacts,
    StepFacts,
    WorkerFacts,
)
from engine_probe.errors import BadWindow
from store import lineage as lineage_queries
from store.interface import Store, Window

NUMBERS = [
    "frontend_s",
    "tokenize_s",
    "queue_s",
    "cache_lookup_s",
    "kv_load_s",
    "kv_transfer_s",
    "handover_s",
    "alloc_s",
    "prefill_s",
    "first_sample_s",
    "decode_s",
    "stalled_s",
    "postprocess_s",
    "tail_s",
    "unexplained_s",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "recomputed_tokens",
    "self_hit_tokens",
    "output_tokens",
    "num_preemptions",
    "prefill_chunks",
]
INSTANTS = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "last_token_ns", "end_ns")
COLUMNS = [
    *("request_id", "worker", "state", "tenant", "workload", "session_id", "prefix_hash", "labels"),
    *INSTANTS,
    *NUMBERS,
    "token_ns",
    "token_counts",
]
STEP_NUMBERS = [
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
    "probe_s",
]


def vantages(store: Store, window: Window) -> frozenset[str]:
    """Vantages that have requests in the window."""
    condition, params = lineage_queries.window_sql(window, "arrival_ns")
    table = store.query(f"SELECT DISTINCT vantage FROM request WHERE {condition}", params)
    return frozenset(table.column(0).to_pylist())


def load(store: Store, window: Window, name: str, vantage: str) -> Facts:
    """Facts of one window as seen from `vantage` (client or engine). Raises BadWindow where it holds no request."""
    table = store.rows(
        "request", window, COLUMNS, where="vantage = ?", params=[vantage], order_by="arrival_ns, request_id"
    )
    warm = _is_warmup(table)
    num_warmup = int(warm.sum())
    table = table.filter(pa.array(~warm))
    if table.num_rows == 0:
        extra = f" ({num_warmup} warm-up requests are left out)" if num_warmup else ""
        raise BadWindow(
            f"window {name} ({window}) holds no {vantage} requests{extra}; see `kvscope requests list` for what is stored",
            window=str(window),
        )
    origin = int(pc.min(table["arrival_ns"]).as_py())
    newest = max(int(pc.max(table[c]).as_py() or origin) for c in ("arrival_ns", "end_ns", "last_token_ns"))
    bounds = Window(
        window.start_ns if window.start_ns is not None else origin,
        window.end_ns if window.end_ns is not None else newest + 1_000_000_000,
        window.run_id,
    )
    engine = None
    if vantage != "engine":
        engine = store.rows(
            "request", window, COLUMNS, where="vantage = 'engine'", order_by="arrival_ns, output_tokens DESC"
        )
        engine = engine if engine.num_rows else None
    requests = _requests(table, engine, vantage, origin)
    workers = _workers(store, bounds)
    steps = _steps(store, bounds, origin, requests.worker_names)
    samples = _samples(store, bounds)
    marks = _marks(store, bounds, origin)
    blocks = _blocks(store, bounds)
    # without the life of blocks a miss can be joined to nothing
    facts_lineage = None if blocks is None else _lineage(store, window, vantage, requests, workers)
    requests = _estimate_computed(requests, samples, workers)
    visible = _visible(requests, steps, samples, facts_lineage, blocks)
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
    )


def _is_warmup(table: pa.Table) -> np.ndarray:
    found = pc.map_lookup(_as_map(table["labels"]), "phase", "first")
    return np.asarray(pc.fill_null(pc.equal(found, "warmup"), False))


def _as_map(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.map_(pa.string(), pa.string()))


def _requests(table: pa.Table, engine: pa.Table | None, vantage: str, origin: int) -> RequestFacts:
    n = table.num_rows
    instants = {name: _seconds(table[name], origin) for name in INSTANTS}
    numbers = {name: _float(table[name]) for name in NUMBERS}
    worker = table["worker"]
    own = {
        "arrival": "arrival_ns",
        "scheduled": "first_scheduled_ns",
        "first": "first_token_ns",
        "last": "last_token_ns",
    }
    if vantage == "engine":
        engine_at = {key: instants[column] for key, column in own.items()}
    elif engine is not None:
        position = pc.index_in(table["request_id"], value_set=engine["request_id"].combine_chunks())
        taken = engine.take(position.combine_chunks() if isinstance(position, pa.ChunkedArray) else position)
        engine_at = {key: _seconds(taken[column], origin) for key, column in own.items()}
        for name in NUMBERS:
            theirs = _float(taken[name])
            numbers[name] = np.where(np.isfinite(numbers[name]), numbers[name], theirs)
        worker = pc.coalesce(worker, taken["worker"])
        client_ttft = instants["first_token_ns"] - instants["arrival_ns"]
        engine_ttft = engine_at["first"] - engine_at["arrival"]
        numbers["network_s"] = np.clip(client_ttft - engine_ttft, 0.0, None)
        numbers["engine_ttft_s"] = engine_ttft
    else:
        engine_at = {key: np.full(n, np.nan) for key in own}
    computed = numbers["prompt_tokens"] - numbers["cached_tokens"]
    numbers["computed_tokens"] = np.where(np.isfinite(numbers["computed_tokens"]), numbers["computed_tokens"], computed)
    codes = (
        worker.combine_chunks().dictionary_encode()
        if isinstance(worker, pa.ChunkedArray)
        else worker.dictionary_encode()
    )
    names: list[str | None] = codes.dictionary.to_pylist()
    code = np.asarray(pc.fill_null(codes.indices, len(names))).astype(np.int64)
    if (code == len(names)).any():
        names.append(None)
    state = np.asarray(table["state"].to_pylist(), dtype=object)
    return RequestFacts(
        vantage=vantage,
        origin_ns=origin,
        worker_names=tuple(names),
        request_id=_objects(table["request_id"]),
        worker=code,
        arrival_s=instants["arrival_ns"],
        first_token_s=instants["first_token_ns"],
        last_token_s=instants["last_token_ns"],
        end_s=instants["end_ns"],
        engine_arrival_s=engine_at["arrival"],
        scheduled_s=engine_at["scheduled"],
        engine_first_s=engine_at["first"],
        engine_last_s=engine_at["last"],
        numbers=numbers,
        tenant=_objects(table["tenant"]),
        workload=_objects(table["workload"]),
        session=_objects(table["session_id"]),
        prefix=_objects(table["prefix_hash"]),
        finished=np.array([s == "finished" for s in state], dtype=bool),
        gaps=_gaps(table, origin),
    )


def _estimate_computed(
    requests: RequestFacts, samples: Mapping[str, float], workers: Sequence[WorkerFacts]
) -> RequestFacts:
    """Where no request tells its cached tokens, the engine's counters give their share; with caching off it is none."""
    if requests.has("computed_tokens", 0.01) or not requests.has("prompt_tokens"):
        return requests
    queries, hits = samples.get("prefix_queries_tokens_total"), samples.get("prefix_hits_tokens_total")
    if {w.prefix_caching for w in workers} == {False}:
        ratio = 0.0
    elif queries and hits is not None:
        ratio = hits / queries
    else:
        return requests
    computed = requests.get("prompt_tokens") * (1.0 - ratio)
    return replace(requests, numbers={**requests.numbers, "computed_tokens": computed})


def _gaps(table: pa.Table, origin: int) -> Gaps | None:
    column = table["token_ns"].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.list_(pa.int64()))
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
    if lengths.sum() == 0:
        return None
    at = np.asarray(column.flatten()).astype(np.int64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.zeros(len(at), dtype=bool)
    starts[np.cumsum(lengths)[:-1][np.cumsum(lengths)[:-1] < len(at)]] = True
    starts[0] = True
    gap = np.diff(at, prepend=at[0]) / 1e9
    counts = table["token_counts"].combine_chunks()
    tokens = np.ones(len(at))
    if counts.null_count < len(counts):
        flat = np.asarray(counts.flatten()).astype(float)
        if len(flat) == len(at):
            tokens = flat
    keep = ~starts
    return Gaps(owner[keep], (at[keep] - origin) / 1e9, gap[keep], tokens[keep])


def _steps(store: Store, window: Window, origin: int, names: Sequence[str | None]) -> StepFacts | None:
    table = store.rows(
        "step", window, ["worker", "at_ns", "duration_s", "waiting_on", *STEP_NUMBERS], order_by="worker, at_ns"
    )
    if table.num_rows == 0:
        return None
    codes = table["worker"].combine_chunks().dictionary_encode()
    numbers = {name: _float(table[name]) for name in STEP_NUMBERS}
    waiting = table["waiting_on"].combine_chunks()
    for key in ("blocks", "budget", "seats", "dependency", "unknown"):
        numbers[f"waiting_on_{key}"] = _float(pc.struct_field(waiting, key))
    at = _seconds(table["at_ns"], origin)
    worker = np.asarray(pc.fill_null(codes.indices, -1)).astype(np.int64)
    duration = _float(table["duration_s"])
    between = np.diff(at, prepend=np.nan)
    between[np.diff(worker, prepend=-2) != 0] = np.nan
    busy = np.nan_to_num(numbers["num_running"]) > 0
    duration = np.where(np.isfinite(duration), duration, np.where(busy, between, np.nan))
    return StepFacts(worker, tuple(codes.dictionary.to_pylist()), at, duration, numbers)


def _workers(store: Store, window: Window) -> list[WorkerFacts]:
    """Newest known value of each slow fact by worker, from the whole past of the run (or of the live store)."""
    past = Window(None, window.end_ns, window.run_id)
    table = store.rows("worker", past, order_by="at_ns")
    merged: dict[str | None, dict[str, Any]] = {}
    for row in table.to_pylist():
        facts = merged.setdefault(row["worker"], {"flags": {}})
        for key in ("engine", "engine_version", "block_size", "num_blocks", "prefix_caching"):
            if row.get(key) is not None:
                facts[key] = row[key]
        facts["flags"].update({k: v for k, v in dict(row.get("flags") or []).items() if v is not None})
    return [WorkerFacts(worker=name, **facts) for name, facts in merged.items()]


def _samples(store: Store, window: Window) -> Mapping[str, float]:
    out: dict[str, float] = {}
    for row in lineage_queries.counter_increases(store, window).to_pylist():
        if row["increase"] is not None:
            out[row["name"]] = float(row["increase"])
    for row in lineage_queries.gauge_summary(store, window).to_pylist():
        name = row["name"] if row["reason"] is None else f"{row['name']}_{row['reason']}"
        for key in ("mean", "max", "min"):
            if row[key] is not None:
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


def _clock_error(marks: Sequence[MarkFact]) -> float | None:
    errors = [float(m.attrs["error_s"]) for m in marks if m.mark == "clock" and "error_s" in m.attrs]
    return max(errors) if errors else None


def _lineage(
    store: Store, window: Window, vantage: str, requests: RequestFacts, workers: Sequence[WorkerFacts]
) -> LineageFacts | None:
    sizes = {w.block_size for w in workers if w.block_size}
    if len(sizes) != 1:
        return None
    size = sizes.pop()
    table = lineage_queries.lineage(store, window, vantage, size)
    if table.num_rows == 0:
        condition, params = lineage_queries.window_sql(window, "arrival_ns")
        known = store.query(
            f"SELECT count(*) FROM request WHERE {condition} AND vantage = ? AND prompt_blocks IS NOT NULL",
            [*params, vantage],
        )
        if known.column(0)[0].as_py() == 0:
            return None
    position = {rid: i for i, rid in enumerate(requests.request_id)}
    evicted, new, cleared = (np.zeros(len(requests)) for _ in range(3))
    back: list[float] = []
    blocks = 0
    for row in table.to_pylist():
        at = position.get(row["request_id"])
        if at is None:
            continue
        # a block that is still resident but lies behind a lost parent was lost with it
        lost = row["evicted"] + (row["resident"] if row["evicted"] else 0)
        evicted[at], new[at], cleared[at] = lost * size, row["new"] * size, row["cleared"] * size
        blocks += lost
        if row["back_after_s"] is not None:
            back.append(row["back_after_s"])
    worst = lineage_queries.worst_blocks(store, window, vantage, size).to_pylist() if blocks else []
    return LineageFacts(evicted, new, cleared, blocks, len(worst), float(np.median(back)) if back else None, worst)


def _blocks(store: Store, window: Window) -> BlockTotals | None:
    row = lineage_queries.block_totals(store, window).to_pylist()[0]
    if not any(row.values()):
        return None
    return BlockTotals(row["stored"], row["evicted"], row["restored"], row["cleared"])


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
    if steps is not None:
        seen.add("step")
        seen |= {f"step.{name}" for name, values in steps.numbers.items() if np.isfinite(values).any()}
    if blocks is not None:
        seen.add("block.evicted")
    if lineage is not None:
        seen.add("request.prompt_blocks")
    return frozenset(seen | {f"sample.{name.split(':')[0]}" for name in samples})


def _seconds(column: pa.ChunkedArray, origin: int) -> F64:
    """Instants (ns) -> seconds since the origin, NaN for null; subtracted as integers, so nothing is rounded."""
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    filled = np.asarray(pc.fill_null(values, origin)).astype(np.int64)
    seconds = (filled - origin) / 1e9
    seconds[np.asarray(pc.is_null(values))] = np.nan
    return seconds


def _float(column: pa.ChunkedArray) -> F64:
    return np.asarray(
        column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        if isinstance(column, pa.Array)
        else column.cast(pa.float64()).to_numpy(),
        dtype=float,
    )


def _objects(column: pa.ChunkedArray) -> Obj:
    return np.array(column.to_pylist(), dtype=object)
