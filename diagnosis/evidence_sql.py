"""SQL that several causes show behind their numbers; it runs as it is in `kvscope sql`."""

from __future__ import annotations

from diagnosis.cause import Case


def lineage_sql(case: Case) -> str:
    """Missed prompt blocks of the suspect window that had been stored before: blocks, tokens, requests."""
    size = case.suspect.block_size()
    vantage = case.suspect.requests.vantage
    where = case.sql_where(case.suspect_window, "arrival_ns")
    return (
        "WITH stored AS (SELECT block_hash, min(at_ns) AS first_ns FROM block "
        f"WHERE {case.sql_scope(case.suspect_window)} AND change = 'stored' GROUP BY ALL HAVING count(*) > 1), "
        "missed AS (SELECT request_id, arrival_ns, "
        f"unnest(prompt_blocks[cached_tokens // {size} + 1:]) AS block_hash "
        f"FROM request WHERE vantage = '{vantage}' AND {where} AND coalesce(labels['phase'], '') <> 'warmup') "
        f"SELECT count(*) * {size} AS tokens, count(*) AS blocks, count(DISTINCT request_id) AS requests "
        "FROM missed m JOIN stored s ON m.block_hash = s.block_hash AND m.arrival_ns > s.first_ns"
    )
