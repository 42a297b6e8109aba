"""Series over time: exact percentiles, rates and the state of the scheduler, by bucket and group.

Invariant: a percentile is never formed across vantages, and never from other percentiles; n stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from store.interface import Store, Window
from store.metrics import CACHE_SQL, THROUGHPUT, Slo, goodput_sql, metric, quantiles_sql, rank_index, rank_interval
from store.queries.scope import bucket_sql, grouping, in_window

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    return store.query(
        f"SELECT bucket_ns, {names}n, {columns} FROM (SELECT {bucket_sql('request', bucket_s, 'r')} AS bucket_ns, "
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
    found = store.query(
        f"SELECT {_names(groups)}list_sort(list({measured})) AS sorted FROM request AS r "
        f"WHERE {condition} AND r.vantage = ? AND {measured} IS NOT NULL GROUP BY ALL ORDER BY ALL",
        [*params, vantage],
    )
    rows = [_with_interval(row, quantile, confidence) for row in found.to_pylist() if row["sorted"]]
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
    """Load and yield: bucket_ns, the groups, num_arrived, num_finished, num_failed, output_tokens_per_s,
    total_tokens_per_s, requests_per_s, request_hit_ratio, token_hit_ratio, reused_tokens, and goodput_rps for an SLO.

    A request counts in the bucket of its arrival; tokens are those of finished requests, over the whole bucket.
    """
    groups = grouping("request", by)
    condition, params = in_window("request", window, "r")
    throughput = [
        f"{sql.format(r='r.')} FILTER (r.state = 'finished') / {float(bucket_s)!r} AS {unit.replace('/s', '_per_s')}"
        for unit, sql in THROUGHPUT.items()
    ]
    cache = [f"{sql.format(r='r.')} AS {name}" for name, sql in CACHE_SQL.items()]
    goodput = [f"{goodput_sql(slo, bucket_s, 'r')} AS goodput_rps"] if slo is not None else []
    counted = [
        "count(*) AS num_arrived",
        "count(*) FILTER (r.state = 'finished') AS num_finished",
        "count(*) FILTER (r.state <> 'finished') AS num_failed",
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


def _with_interval(row: dict[str, Any], quantile: str, confidence: str) -> dict[str, Any]:
    values = row.pop("sorted")
    low, high = rank_interval(len(values), quantile, confidence)
    value = values[rank_index(len(values), quantile) - 1]
    bounds = {"low": values[low - 1] if low else None, "high": values[high - 1] if high else None}
    return {**row, "n": len(values), "value": value, **bounds}


def _names(groups: Iterable[str]) -> str:
    return "".join(f"r.{name}, " for name in groups)


def _order(groups: Iterable[str]) -> str:
    return "".join(f", r.{name}" for name in groups)
