"""Request rows of a window as aligned arrays: the client's and the engine's row of one request joined (`pairing.py`).

Durations travel across vantages, instants do not: each array of instants belongs to one vantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import F64, Gaps, Obj, RequestFacts, WorkerFacts
from diagnosis.loading.pairing import pair
from store.interface import Window

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
    "cached_tokens_device",
    "cached_tokens_host",
    "cached_tokens_remote",
    "computed_tokens",
    "recomputed_tokens",
    "self_hit_tokens",
    "output_tokens",
    "draft_tokens",
    "accepted_tokens",
    "num_preemptions",
    "prefill_chunks",
    "retry_count",
]


TOLD_BY_BOTH = ("cached_tokens", "output_tokens")
"""Numbers of which the engine's are kept beside the caller's, to be compared."""


SERVED_FIRST = "first_token_ns IS NULL, coalesce(attempt, 0) DESC, arrival_ns, output_tokens DESC"
"""Of several engine rows of one request the one that served it: with a first token, of the last attempt, earliest."""


UNSEEN_TOKENS = 1
"""Output tokens that no chunk shows: the one that ends the answer."""


CHUNKED = 0.02
"""Share of the requests that may get two tokens in one chunk by chance: what waited in a buffer."""


JOIN_REACH_NS = 60_000_000_000
"""How far from the window the engine's row of a request is looked for: its clock differs, and it arrives there later."""


INSTANTS = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "last_token_ns", "end_ns")


COLUMNS = [
    *("request_id", "attempt", "generation_id", "worker", "state", "tenant", "workload", "session_id"),
    *("prefix_hash", "labels", "sample_rate", "model"),
    *INSTANTS,
    *NUMBERS,
    "token_ns",
    "token_counts",
]


def is_warmup(table: pa.Table) -> np.ndarray:
    return _is_labelled(table, "phase", "warmup")


def is_assumed(table: pa.Table) -> np.ndarray:
    """Requests whose arrival their source did not tell: an importer laid them somewhere."""
    return _is_labelled(table, "arrival", "assumed")


def repeats(table: pa.Table) -> np.ndarray | None:
    """Which repeat of an experiment's arm each request is of (label `repeat`), [n]; None unless all tell, and of two at least."""
    if table.num_rows == 0 or not dict(table["labels"][0].as_py() or []).get("repeat"):
        return None
    names = pc.map_lookup(_as_map(table["labels"]), "repeat", "first").combine_chunks().dictionary_encode()
    if names.null_count or len(names.dictionary) < 2:
        return None
    return np.asarray(names.indices).astype(np.int64)


def _is_labelled(table: pa.Table, key: str, value: str) -> np.ndarray:
    found = pc.map_lookup(_as_map(table["labels"]), key, "first")
    return np.asarray(pc.fill_null(pc.equal(found, value), False))


def _as_map(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.map_(pa.string(), pa.string()))


def reach(window: Window) -> Window:
    """Where the engine's rows of the window's requests are looked for."""
    return Window(
        None if window.start_ns is None else window.start_ns - JOIN_REACH_NS,
        None if window.end_ns is None else window.end_ns + JOIN_REACH_NS,
        window.run_id,
    )


def in_arrival_order(table: pa.Table) -> pa.Table:
    """The rows by arrival, those of one instant by id: as they are where they came in that order."""
    arrival = np.asarray(table["arrival_ns"])
    if bool((arrival[1:] > arrival[:-1]).all()):
        return table
    return table.sort_by([("arrival_ns", "ascending"), ("request_id", "ascending")])


def told_twice(table: pa.Table) -> bool:
    """Whether any request has several rows here: told by plugin and spans, delivered twice, or tried again."""
    ids = table["request_id"].combine_chunks()
    return len(ids.dictionary_encode().dictionary) < len(ids)  # a third of what counting distinct ones takes


def join_vantages(
    table: pa.Table,
    engine: pa.Table | None,
    vantage: str,
    origin: int,
    num_duplicates: int = 0,
    *,
    engine_merged: bool = False,
) -> RequestFacts:
    n = table.num_rows
    instants = {name: seconds_since(table[name], origin) for name in INSTANTS}
    done = np.asarray(pc.fill_null(pc.equal(table["state"], "finished"), False))
    if not any(np.isfinite(instants[name]).any() for name in ("first_token_ns", "last_token_ns")):
        # nobody streamed: an answer that comes at once has its last token when it ends
        instants["last_token_ns"] = np.where(done, instants["end_ns"], np.nan)
    numbers = {name: floats(table[name]) for name in NUMBERS}
    invalid = sum(int(np.isnan(numbers[name]).sum()) - table[name].null_count for name in NUMBERS)
    worker, model = table["worker"], table["model"]
    sources: dict[str, str] = {}
    num_shared_ids = 0
    own = {
        "arrival": "arrival_ns",
        "scheduled": "first_scheduled_ns",
        "first": "first_token_ns",
        "last": "last_token_ns",
    }
    if vantage == "engine":
        engine_at = {key: instants[column] for key, column in own.items()}
    elif engine is not None:
        position, num_shared_ids = pair(table, engine)
        taken = engine.take(position)
        engine_at = {key: seconds_since(taken[column], origin) for key, column in own.items()}
        for name in NUMBERS:
            theirs = floats(taken[name])
            if name in TOLD_BY_BOTH and (np.isfinite(theirs) & np.isfinite(numbers[name])).any():
                numbers[f"engine_{name}"] = theirs
            if (np.isfinite(theirs) & ~np.isfinite(numbers[name])).any():
                sources[name] = "engine"
            numbers[name] = np.where(np.isfinite(numbers[name]), numbers[name], theirs)
        worker = pc.coalesce(worker, taken["worker"])
        model = taken["model"] if model.null_count == n else model
        client_ttft = instants["first_token_ns"] - instants["arrival_ns"]
        engine_ttft = engine_at["first"] - engine_at["arrival"]
        numbers["network_s"] = np.clip(client_ttft - engine_ttft, 0.0, None)
        numbers["engine_ttft_s"] = engine_ttft
        numbers["engine_e2e_s"] = engine_at["last"] - engine_at["arrival"]
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
    num_assumed = int(is_assumed(table).sum())
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
        finished=done,
        # gaps are compared at equal concurrency, and who ran beside whom is not known where arrivals are assumed
        gaps=None if num_assumed else _gaps(table, origin, numbers["output_tokens"]),
        sources=sources,
        engine_rate=_rate(engine) if vantage != "engine" and engine is not None else None,
        num_invalid=invalid,
        num_duplicates=num_duplicates,
        model=_models(model),
        num_assumed=num_assumed,
        engine_merged=engine_merged,
        num_shared_ids=num_shared_ids,
    )


def _models(column: pa.ChunkedArray) -> Obj | None:
    """What each request asked for; None where all that tell asked for the same."""
    return _objects(column) if len(pc.unique(column).drop_null()) > 1 else None


def _rate(table: pa.Table) -> float | None:
    """Lowest share of requests that was kept, None where all were."""
    lowest = pc.min(table["sample_rate"]).as_py()
    return None if lowest is None else float(lowest)


def estimate_computed(
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
    return replace(
        requests,
        numbers={**requests.numbers, "computed_tokens": computed},
        sources={**requests.sources, "computed_tokens": "estimated"},
    )


DRAFTS = (
    ("accepted_tokens_total", "draft_tokens_total"),
    ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    ("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
)
"""Counters of accepted and of drafted tokens: by their canonical names, or as rows from elsewhere name them."""
ACCEPT_LENGTHS = ("sglang:spec_accept_length:mean", "spec_accept_length:mean")
"""Gauges of the tokens that a decode step gives a sequence."""


def estimate_accepted(requests: RequestFacts, samples: Mapping[str, float]) -> RequestFacts:
    """Where no request tells what was drafted and accepted, the engine's counters give it: in proportion to the tokens decoded."""
    decoded = np.maximum(requests.get("output_tokens") - 1.0, 0.0)
    total = float(np.nansum(decoded)) / (requests.sample_rate or 1.0)
    if requests.has("accepted_tokens", 0.01) or not total > 0:
        return requests
    found: dict[str, F64] = {}
    for accepted, drafted in DRAFTS:
        if samples.get(drafted) and samples.get(accepted, total) < total:
            found = {
                "accepted_tokens": decoded * samples[accepted] / total,
                "draft_tokens": decoded * samples[drafted] / total,
            }
            break
    lengths = [samples[name] for name in ACCEPT_LENGTHS if samples.get(name, 0.0) >= 1.0]
    if not found and lengths:
        found = {"accepted_tokens": decoded * (1.0 - 1.0 / lengths[0])}
    sources = {**requests.sources, **dict.fromkeys(found, "estimated")}
    return replace(requests, numbers={**requests.numbers, **found}, sources=sources) if found else requests


def _gaps(table: pa.Table, origin: int, output: F64) -> Gaps | None:
    """The gaps between chunks, each with the tokens that it brought: as `token_counts` tells, else one, or the request's mean where
    its `output` [n] is more tokens than there are instants.
    """
    column = table["token_ns"].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.list_(pa.int64()))
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
    if lengths.sum() == 0:
        return None
    flat = column.flatten()
    unknown = np.asarray(pc.is_null(flat))
    at = np.asarray(pc.fill_null(flat, 0)).astype(np.int64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.zeros(len(at), dtype=bool)
    starts[np.cumsum(lengths)[:-1][np.cumsum(lengths)[:-1] < len(at)]] = True
    starts[0] = True
    gap = np.diff(at, prepend=at[0]) / 1e9
    counts = table["token_counts"].combine_chunks()
    told = np.asarray(pc.fill_null(pc.list_value_length(counts), 0)) == lengths
    several = ~told & (lengths > 1) & (output > lengths + UNSEEN_TOKENS)
    mean = np.divide(output - 1.0, lengths - 1.0, out=np.ones(len(lengths)), where=several)
    tokens = mean[owner]
    tokens[told[owner]] = np.asarray(counts.filter(pa.array(told)).flatten()).astype(float)
    # a gap needs both its ends, in order
    whole = ~starts & ~unknown & ~np.roll(unknown, 1)
    keep = whole & (gap >= 0)
    backward = len(np.unique(owner[whole & (gap < 0)]))
    is_even = float(several.sum()) > CHUNKED * float((lengths > 1).sum())
    return Gaps(owner[keep], (at[keep] - origin) / 1e9, gap[keep], tokens[keep], backward, is_even)


def seconds_since(column: pa.ChunkedArray, origin: int) -> F64:
    """Instants (ns) -> seconds since the origin, NaN for null; subtracted as integers, so nothing is rounded."""
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    filled = np.asarray(pc.fill_null(values, origin)).astype(np.int64)
    seconds = (filled - origin) / 1e9
    seconds[np.asarray(pc.is_null(values))] = np.nan
    return seconds


def floats(column: pa.ChunkedArray) -> F64:
    """Durations, lengths and counts as floats. NaN for null and for what cannot be: negative or infinite."""
    plain = column.cast(pa.float64(), safe=False)  # counts beyond 2^53 lose their last digits, which nobody needs
    values = np.array(
        plain.to_numpy(zero_copy_only=False) if isinstance(plain, pa.Array) else plain.to_numpy(), dtype=float
    )
    values[~(np.isfinite(values) & (values >= 0))] = np.nan
    return values


def _objects(column: pa.ChunkedArray) -> Obj:
    """Words, and None for null."""
    if column.null_count == len(column):
        return np.full(len(column), None, dtype=object)
    if pa.types.is_string(column.type) and isinstance(column, pa.ChunkedArray):
        return np.asarray(column.combine_chunks().to_numpy(zero_copy_only=False), dtype=object)
    return np.array(column.to_pylist(), dtype=object)
