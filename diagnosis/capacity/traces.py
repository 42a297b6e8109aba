"""From `request` and `worker` rows to what a capacity replay needs: one trace for each cache.

Idea: every worker has a cache of its own, so its requests are replayed alone and a size means blocks *of each worker*.
Where several vantages name the blocks of a request, one is used (the client's before the router's before the engine's),
so that no request counts twice. Warm-up requests fill the cache and are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from diagnosis.capacity.block_cache import BlockTrace, block_trace
from diagnosis.capacity.curve import CapacityPoint, hit_rate_curve
from engine_probe.digits import whole_number
from engine_probe.errors import DiagnosisError
from store.evidence.lineage import window_sql
from store.evidence.one_request import one_requests
from store.interface import Window

if TYPE_CHECKING:
    import pyarrow as pa

    from store.interface import Store

REQUEST_COLUMNS = ("worker", "vantage", "arrival_ns", "prompt_tokens", "prompt_blocks", "labels")
WORKER_COLUMNS = ("worker", "at_ns", "block_size", "num_blocks")
SESSION = "session_id"
"""Read where it is there: routing by session asks for it, capacity alone does not."""
TIMES = ("first_token_ns", "prefill_s", "cached_tokens")
"""Read where they are there: what a hit is worth in seconds."""
VANTAGES = ("client", "router", "engine")
MAX_BLOCK_TOKENS: Final = 1 << 30
"""More is no block size."""


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """What one worker's cache was asked for. Unknown is None.

    counted       [num_requests] bool, false for warm-up
    arrival_s     [num_requests] seconds after the first request
    input_tokens  [num_requests] NaN where unknown
    num_blocks    blocks the worker really has
    sessions      [num_requests] names of the sessions, None where unknown
    ttft_s, prefill_s, cached_tokens   [num_requests] as it was, NaN where unknown
    """

    worker: str | None
    trace: BlockTrace
    counted: npt.NDArray[np.bool_]
    arrival_s: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.float64]
    block_tokens: int | None
    num_blocks: int | None
    sessions: list[str | None]
    ttft_s: npt.NDArray[np.float64]
    prefill_s: npt.NDArray[np.float64]
    cached_tokens: npt.NDArray[np.float64]


def stored_requests(store: Store, window: Window) -> tuple[pa.Table, pa.Table]:
    """(requests that name their prompt blocks, workers) of a window, as `cache_loads` takes them; each request once."""
    condition, params = window_sql(window, "arrival_ns")
    named = f"{condition} AND prompt_blocks IS NOT NULL"
    requests = one_requests(store, named, params, (*REQUEST_COLUMNS, SESSION, *TIMES), order_by="arrival_ns")
    return requests, store.rows("worker", Window(run_id=window.run_id), WORKER_COLUMNS)


def cache_loads(requests: pa.Table, workers: pa.Table | None = None) -> list[CacheLoad]:
    """One load a worker, in order of name. Raises DiagnosisError where no row names its prompt blocks.

    requests  columns REQUEST_COLUMNS (session_id may be there), any order of rows; rows without prompt_blocks are left out
    workers   columns WORKER_COLUMNS, or None
    """
    import pyarrow.compute as pc

    known = requests.filter(pc.is_valid(requests.column("prompt_blocks")))
    vantages = set(known.column("vantage").unique().to_pylist())
    vantage = next((v for v in VANTAGES if v in vantages), None)
    if vantage is None:
        raise DiagnosisError(
            f"none of the {requests.num_rows} requests names its prompt blocks: nothing can be replayed. A client or "
            "proxy that hashes prompts (request.prompt_blocks of the contract) or a trace with hash_ids gives them.",
            requests=requests.num_rows,
        )
    known = known.filter(pc.equal(known.column("vantage"), vantage)).sort_by("arrival_ns")
    geometry = {} if workers is None else {row["worker"]: row for row in workers.sort_by("at_ns").to_pylist()}
    loads = []
    for worker in sorted(known.column("worker").unique().to_pylist(), key=lambda name: name or ""):
        names = known.column("worker")
        rows = known.filter(pc.is_null(names) if worker is None else pc.equal(names, worker))
        arrival = rows.column("arrival_ns").to_numpy()
        labels = [dict(pairs or ()) for pairs in rows.column("labels").to_pylist()]
        facts = geometry.get(worker, {})
        loads.append(
            CacheLoad(
                worker,
                block_trace(rows.column("prompt_blocks")),
                np.array([label.get("phase") != "warmup" for label in labels], dtype=bool),
                (arrival - arrival[0]) / 1e9,
                _numbers(rows, "prompt_tokens"),
                facts.get("block_size") or _block_tokens(labels),
                facts.get("num_blocks"),
                rows.column(SESSION).to_pylist() if SESSION in rows.column_names else [None] * rows.num_rows,
                (_numbers(rows, "first_token_ns") - arrival) / 1e9,
                _numbers(rows, "prefill_s"),
                _numbers(rows, "cached_tokens"),
            )
        )
    return loads


def _numbers(rows: pa.Table, name: str) -> npt.NDArray[np.float64]:
    """A column as floats, NaN where unknown or not there."""
    import pyarrow as pa

    if name not in rows.column_names:
        return np.full(rows.num_rows, np.nan)
    return np.asarray(rows.column(name).cast(pa.float64(), safe=False).fill_null(float("nan")).to_numpy())


def pooled_load(requests: pa.Table) -> CacheLoad:
    """All requests as one load in order of arrival, whoever served them. Raises DiagnosisError as `cache_loads` does."""
    import pyarrow as pa

    place = requests.column_names.index("worker")
    [load] = cache_loads(requests.set_column(place, "worker", pa.nulls(requests.num_rows, pa.string())))
    return load


def curve_over(loads: Sequence[CacheLoad], policy: str, sizes: Sequence[int | None]) -> list[CapacityPoint]:
    """Hit rate when each worker has a cache of that size: hits and requested blocks are summed over the workers."""
    curves = [hit_rate_curve(load.trace, policy, sizes, counted=load.counted) for load in loads]
    points = []
    for size, of_workers in zip(sizes, zip(*curves, strict=True), strict=True):
        hits, requested = sum(p.hit_blocks for p in of_workers), sum(p.requested_blocks for p in of_workers)
        points.append(CapacityPoint(size, hits / requested if requested else None, hits, requested))
    return points


def common(values: Sequence[int | None]) -> int | None:
    """The one value that all have, None where they differ or one is unknown."""
    return values[0] if values and len(set(values)) == 1 else None


def _block_tokens(labels: Sequence[dict[str, str]]) -> int | None:
    """Tokens in a block, where the trace itself says so in a label."""
    said = {label.get("block_tokens") for label in labels}
    text = said.pop() if len(said) == 1 else None
    return whole_number(text, MAX_BLOCK_TOKENS) if text else None
