"""Imported runs and arms of experiments beside each other: how many requests, how fast, how much was found, how many failed."""

from __future__ import annotations

from typing import Any, Final

from store.interface import Store
from store.metrics import metric
from store.sql_json import json_objects

MOST_RUNS: Final = 500
QUANTILES: Final = ("0.5", "0.95", "0.99")


def runs(store: Store) -> dict[str, Any]:
    """`{runs: [...], truncated}`, the newest first; each run with its numbers at the client's vantage where it has one, else the engine's.

    quantiles are nearest rank over the requests that know the metric (s); null where none does
    """
    numbers = ", ".join(
        f"quantile_disc({metric(name).expression()}, {q}) AS {name}_p{q[2:].ljust(2, '0')}_s"
        for name in ("ttft", "tpot", "e2e")
        for q in QUANTILES
    )
    sql = f"""
        WITH seen AS (SELECT run_id, CASE WHEN bool_or(vantage = 'client') THEN 'client' WHEN bool_or(vantage = 'engine')
            THEN 'engine' ELSE 'router' END AS vantage FROM request WHERE run_id IS NOT NULL GROUP BY run_id)
        SELECT r.run_id, any_value(r.vantage) AS vantage, count(*) AS requests, min(arrival_ns) AS start_ns,
            max(coalesce(end_ns, last_token_ns, arrival_ns)) AS end_ns, count(*) FILTER (state <> 'finished') AS unfinished,
            sum(prompt_tokens) AS prompt_tokens, sum(cached_tokens) AS cached_tokens,
            sum(cached_tokens) / nullif(sum(prompt_tokens) FILTER (cached_tokens IS NOT NULL), 0) AS token_hit_rate,
            avg({metric("ttft").expression()}) AS ttft_mean_s, {numbers}
        FROM request r JOIN seen USING (run_id, vantage) GROUP BY r.run_id ORDER BY start_ns DESC, r.run_id LIMIT {MOST_RUNS + 1}
    """
    found = json_objects(store.query(sql))
    return {"runs": found[:MOST_RUNS], "truncated": len(found) > MOST_RUNS}
