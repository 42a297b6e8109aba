"""Series over time: exact percentiles, rates and the state of the scheduler, by bucket and group.

Invariant: a percentile is never formed across vantages, and never from other percentiles; n, the rows really seen, stands
beside it. Rows at one sampling rate need no weights for a percentile; where rates differ, it is the nearest rank by weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from store.interface import Store, Window
from store.metrics import (
    CACHE_SQL,
    THROUGHPUT,
    Slo,
    count_sql,
    goodput_sql,
    metric,
    quantiles_sql,
    rank_interval,
    weight_sql,
    weighted_rank,
)
from store.queries.scope import bucket_sql, grouping, in_window, sample_rates

if TYPE_CHECKING:
    from collections.abc import Iterable


FINISHED = "r.state = 'finished'"
FAILED = "r.state <> 'finished'"


def percentile_series(
    store: Store,
    window: Window,
    *,
    metric_name: str = "ttft_s",
    quantiles: Sequence[str] = ("0.5", "0.99"),
    by: Sequence[str] = ("worker",),
    bucket_s: float = 60.0,
    vantage: str | None = None,
) -> pa.Table:
    """Exact nearest-rank percentiles of a metric: bucket_ns, the groups, n, and a column `p50`, `p99`, ... (s).

    Without `vantage` the vantage is a group. Requests without the value are not counted in n.
    """
    measured = metric(metric_name).expression("r")
    groups = grouping("request", by if vantage is not None else (*by, "vantage"))
    condition, params = in_window("request", window, "r")
    if vantage is not None:
        condition += " AND r.vantage = ?"
        params.append(vantage)
    columns = ", ".join(f"q[{position}] AS {percentile_name(q)}" for position, q in enumerate(quantiles, 1))
    names = "".join(f"{name}, " for name in groups)
    bucket = bucket_sql("request", bucket_s, "r")
    if sample_rates(store, f"request AS r WHERE {condition}", params)[1]:
        found = _lists(store, f"{bucket} AS bucket_ns, {_names(groups)}", measured, condition, params)
        ranked = [[weighted_rank(*row, q) for row in _arrays(found)] for q in quantiles]
        for q, column in zip(quantiles, ranked, strict=True):
            found = found.append_column(percentile_name(q), pa.array(column, pa.float64()))
        return found.drop_columns(["measured", "weights"])
    return store.query(
        f"SELECT bucket_ns, {names}n, {columns} FROM (SELECT {bucket} AS bucket_ns, "
        f"{_names(groups)}count(*) AS n, {quantiles_sql(measured, quantiles)} AS q "
        f"FROM request AS r WHERE {condition} AND {measured} IS NOT NULL GROUP BY ALL) ORDER BY ALL",
        params,
    )


def percentile_intervals(
    store: Store,
    window: Window,
    *,
    metric_name: str = "ttft_s",
    quantile: str = "0.99",
    by: Sequence[str] = (),
    vantage: str,
    confidence: str = "0.95",
) -> pa.Table:
    """One percentile a group with n and the interval of its order statistics: the groups, n, value, low, high (s).

    `low` or `high` is null where n is too small for a bound. For independent requests: bursts make it wider.
    """
    measured = metric(metric_name).expression("r")
    groups = grouping("request", by)
    condition, params = in_window("request", window, "r")
    found = _lists(store, _names(groups), measured, f"{condition} AND r.vantage = ?", [*params, vantage])
    named = found.select(groups).to_pylist() if groups else [{}] * found.num_rows
    rows = [
        {**row, **_interval(*arrays, quantile, confidence)}
        for row, arrays in zip(named, _arrays(found), strict=True)
        if len(arrays[0])
    ]
    fields: list[Any] = [(name, pa.string()) for name in groups]
    fields += [("n", pa.int64()), ("value", pa.float64()), ("low", pa.float64()), ("high", pa.float64())]
    return pa.Table.from_pylist(rows, schema=pa.schema(fields))


def rate_series(
    store: Store,
    window: Window,
    *,
    by: Sequence[str] = ("worker",),
    bucket_s: float = 60.0,
    vantage: str,
    slo: Slo | None = None,
) -> pa.Table:
    """Load and yield: bucket_ns, the groups, num_seen, num_arrived, num_finished, num_failed, output_tokens_per_s,
    total_tokens_per_s, requests_per_s, request_hit_ratio, token_hit_ratio, reused_tokens, and goodput_rps for an SLO.

    A request counts in the bucket of its arrival; tokens are those of finished requests, over the whole bucket. `num_seen` is
    the number of rows; all else is estimated from them by their weight, which is exact where every request was kept.
    """
    groups = grouping("request", by)
    condition, params = in_window("request", window, "r")
    none = {"requests/s": 0}  # no finished request is 0 of them, but unknown tokens
    throughput = [
        f"coalesce({sql.format(r='r.')} FILTER (r.state = 'finished'), {none.get(unit, 'NULL')}) / {float(bucket_s)!r} "
        f"AS {unit.replace('/s', '_per_s')}"
        for unit, sql in THROUGHPUT.items()
    ]
    cache = [f"{sql.format(r='r.')} AS {name}" for name, sql in CACHE_SQL.items()]
    goodput = [f"{goodput_sql(slo, bucket_s, 'r')} AS goodput_rps"] if slo is not None else []
    counted = [
        "count(*) AS num_seen",
        f"round({count_sql('r')})::BIGINT AS num_arrived",
        f"round({count_sql('r', where=FINISHED)})::BIGINT AS num_finished",
        f"round({count_sql('r', where=FAILED)})::BIGINT AS num_failed",
    ]
    return store.query(
        f"SELECT {bucket_sql('request', bucket_s, 'r')} AS bucket_ns, {_names(groups)}"
        f"{', '.join([*counted, *throughput, *cache, *goodput])} "
        f"FROM request AS r WHERE {condition} AND r.vantage = ? GROUP BY ALL ORDER BY bucket_ns{_order(groups)}",
        [*params, vantage],
    )


def step_series(store: Store, window: Window, *, bucket_s: float = 10.0) -> pa.Table:
    """The scheduler by worker: bucket_ns, worker, num_steps, step_mean_s, step_max_s; the highest num_running,
    num_waiting, blocks_used_ratio; the sums num_preempted, blocks_evicted, prefill_tokens, decode_tokens,
    recomputed_tokens.
    """
    condition, params = in_window("step", window)
    return store.query(
        f"SELECT {bucket_sql('step', bucket_s)} AS bucket_ns, worker, count(*) AS num_steps, "
        "avg(duration_s) AS step_mean_s, max(duration_s) AS step_max_s, max(num_running) AS num_running, "
        "max(coalesce(num_waiting_prefill + num_waiting_decode, num_waiting_prefill, num_waiting_decode)) "
        "AS num_waiting, max(blocks_used / nullif(blocks_total, 0)) AS blocks_used_ratio, sum(num_preempted)::BIGINT AS num_preempted, "
        "sum(blocks_evicted)::BIGINT AS blocks_evicted, sum(prefill_tokens)::BIGINT AS prefill_tokens, "
        "sum(decode_tokens)::BIGINT AS decode_tokens, sum(recomputed_tokens)::BIGINT AS recomputed_tokens "
        f"FROM step WHERE {condition} GROUP BY ALL ORDER BY bucket_ns, worker",
        params,
    )


def percentile_name(q: str) -> str:
    """Column name of a quantile: 0.5 is p50, 0.999 is p99_9."""
    if q.startswith("1"):
        return "p100"
    digits = q.partition(".")[2].ljust(2, "0")
    rest = digits[2:].rstrip("0")
    return f"p{int(digits[:2])}" + (f"_{rest}" if rest else "")


def _lists(store: Store, groups: str, measured: str, condition: str, params: Sequence[Any]) -> pa.Table:
    """`groups` as they are selected, n, and the known values with their weights as two lists, a row a group."""
    return store.query(
        f"SELECT {groups}count(*) AS n, list({measured}) AS measured, list({weight_sql('r')}) AS weights "
        f"FROM request AS r WHERE {condition} AND {measured} IS NOT NULL GROUP BY ALL ORDER BY ALL",
        list(params),
    )


def _arrays(lists: pa.Table) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """(values, weights) of each row of `_lists`."""
    return [
        tuple(np.asarray(lists[name][row].as_py() or [], dtype=np.float64) for name in ("measured", "weights"))  # type: ignore[misc]
        for row in range(lists.num_rows)
    ]


def _interval(
    values: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], quantile: str, confidence: str
) -> dict[str, Any]:
    """n (rows seen), value, low, high. Where rates differ, the interval is that of as many equal rows as they are worth."""
    worth = float(weights.sum()) ** 2 / float((weights**2).sum())  # Kish 1965; n where all weigh the same
    low, high = rank_interval(round(worth), quantile, confidence)
    bounds = [
        None if rank is None else weighted_rank(values, weights, f"{(rank - 0.5) / round(worth):.12f}")
        for rank in (low, high)
    ]
    return {"n": len(values), "value": weighted_rank(values, weights, quantile), "low": bounds[0], "high": bounds[1]}


def _names(groups: Iterable[str]) -> str:
    return "".join(f"r.{name}, " for name in groups)


def _order(groups: Iterable[str]) -> str:
    return "".join(f", r.{name}" for name in groups)
