"""SQL that several causes show behind their numbers; it runs as it is in `kvscope sql`."""

from __future__ import annotations

from diagnosis.cause import Case


def lineage_sql(case: Case) -> str:
    """Missed prompt blocks of the suspect window by the last change of that very block before the miss."""
    size = case.suspect.block_size()
    vantage = case.suspect.requests.vantage
    where = case.sql_where(case.suspect_window, "arrival_ns")
    return (
        "WITH missed AS (SELECT request_id, arrival_ns AS at_ns, "
        f"unnest(prompt_blocks[cached_tokens // {size} + 1:]) AS block_hash "
        f"FROM request WHERE vantage = '{vantage}' AND {where}), "
        "life AS (SELECT block_hash, at_ns, max(change) AS change FROM block "
        f"WHERE {case.sql_scope(case.suspect_window)} AND change IN ('stored', 'evicted') GROUP BY ALL) "
        f"SELECT coalesce(l.change, 'never stored') AS last_change, count(*) AS blocks, count(*) * {size} AS tokens "
        "FROM missed m ASOF LEFT JOIN life l ON m.block_hash = l.block_hash AND m.at_ns > l.at_ns GROUP BY ALL"
    )
