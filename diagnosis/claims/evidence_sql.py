"""The SQL behind a number of the evidence; it runs as it is in `kvscope sql`.

Invariant: the statement gives one row, and its first column is the number that the evidence states. It leaves out what
judgement leaves out (warm-up, rows that were delivered twice, rows kept at a higher rate than others) and takes from the engine's row of a request what the judged
vantage does not tell, as `loading/requests.py` does. A number that no SQL gives (seconds of the ledger, a fit) has none.
"""

from __future__ import annotations

from diagnosis.cause import Case
from diagnosis.facts import Facts
from diagnosis.ledger.spent import COLD_PERIOD_S
from diagnosis.loading.clocks import moved
from diagnosis.loading.requests import SERVED_FIRST, reach
from diagnosis.sampled import one_rate_sql, rate_of
from store.evidence.lineage import ON_DEVICE, past_of
from store.evidence.one_request import one_request_sql
from store.interface import Window
from store.metrics import count_sql

HIT_RATE = "sum(cached_tokens) / sum(prompt_tokens) AS hit_rate"
NOT_WARMUP = "coalesce(labels['phase'], '') <> 'warmup'"


def request_sql(case: Case, facts: Facts, select: str, columns: str = "", where: str = "true") -> str | None:
    """`select` over the window's judged requests; `columns` names what it reads, so that their source can be joined in.

    None where one of the columns was estimated, is implied by others, or is the engine's and its rows are not told apart by id.
    """
    sources = {name: facts.requests.sources.get(name) for name in columns.split()}
    if {"estimated", "implied"} & set(sources.values()) or (
        facts.requests.num_shared_ids and "engine" in sources.values()
    ):
        return None
    window, vantage = case.window_of(facts), facts.requests.vantage
    kept = f"vantage = '{vantage}' AND {case.sql_where(window, 'arrival_ns')} AND {NOT_WARMUP}"
    if vantage == "engine" and facts.handover is not None:  # a request's row is that of the worker that prefilled it
        sent = f"SELECT request_id, target_worker FROM transfer WHERE {case.sql_scope(window)} AND target_worker IS NOT NULL"
        kept += (
            f" AND (request_id, worker) NOT IN ({sent} AND request_id IS NOT NULL AND source_worker <> target_worker)"
        )
    rows = "request"
    if facts.requests.num_duplicates:
        rows, kept = f"({one_request_sql(kept)})", "true"
    at_one_rate = one_rate_sql(facts.requests)
    kept = " AND ".join(part for part in (kept, at_one_rate) if part != "true") or "true"
    borrowed = [name for name, source in sources.items() if source == "engine"]
    if borrowed:
        told = ", ".join(f"coalesce(mine.{name}, theirs.{name}) AS {name}" for name in borrowed)
        among = reach(moved(window, facts.requests.engine_ahead_ns))
        engine = f"vantage = 'engine' AND {case.sql_where(among, 'arrival_ns')}"
        engine_rows = f"({one_request_sql(engine)})" if facts.requests.engine_merged else f"request WHERE {engine}"
        rows = (
            f"(SELECT mine.* REPLACE ({told}) FROM (SELECT * FROM {rows} WHERE {kept}) mine LEFT JOIN "
            f"(SELECT * FROM {engine_rows} "
            f"QUALIFY row_number() OVER (PARTITION BY request_id ORDER BY {SERVED_FIRST}) = 1) theirs USING (request_id))"
        )
        kept = "true"
    condition = " AND ".join(part for part in (kept, where) if part != "true")
    return f"SELECT {select} FROM {rows}" + (f" WHERE {condition}" if condition else "")


def request_pairs_sql(case: Case, facts: Facts, select: str, worker: str) -> str | None:
    """`select` over the window's requests as the judged vantage tells them (`mine`) and as this worker does (`theirs`).

    None where a request has several rows at either.
    """
    r = facts.requests
    if r.num_duplicates or r.engine_merged or r.num_thinned or r.num_shared_ids:
        return None
    kept = f"vantage = '{r.vantage}' AND {case.sql_where(case.window_of(facts), 'arrival_ns')} AND {NOT_WARMUP}"
    among = case.sql_where(reach(moved(case.window_of(facts), r.engine_ahead_ns)), "arrival_ns")
    return (
        f"SELECT {select} FROM (SELECT * FROM request WHERE {kept}) mine JOIN (SELECT * FROM request WHERE vantage = 'engine' "
        f"AND worker = {text(worker)} AND {among}) theirs USING (request_id)"
    )


def num_requests_sql(facts: Facts, column: str | None = None) -> str:
    """How many requests of the window the selected rows stand for; `column` names what they had to know."""
    return _scaled("count(*)", rate_of(facts.requests, column))


def sum_sql(facts: Facts, column: str) -> str:
    """Sum of a column over the requests of the window that the selected rows stand for."""
    return _scaled(f"sum({column})", rate_of(facts.requests, column))


def num_lost_sql(case: Case) -> str:
    """How many misses of lost blocks those that `lost_sql` finds stand for: of a share of the requests, and of the blocks."""
    lineage = case.suspect.lineage
    of_blocks = 1.0 if lineage is None or lineage.block_rate is None else lineage.block_rate
    return _scaled("count(*)", rate_of(case.suspect.requests), of_blocks)


def _scaled(aggregate: str, *rates: float) -> str:
    return aggregate + "".join(f" / {rate!r}" for rate in rates if rate < 1.0)


def median_gap_sql(case: Case, facts: Facts) -> str | None:
    """Median gap between streamed chunks of the window's requests."""
    gaps = request_sql(case, facts, "unnest(token_ns[2:]) - unnest(token_ns[:-2]) AS gap_ns")
    return f"SELECT median(gap_ns) / 1e9 AS median_gap_s FROM ({gaps}) WHERE gap_ns >= 0"


def counter_sql(case: Case, facts: Facts, name: str) -> str:
    """Increase of a counter over the window, restarts counted from zero."""
    return (
        "SELECT sum(CASE WHEN before IS NULL THEN 0 WHEN value < before THEN value ELSE value - before END) AS increase FROM "
        "(SELECT value, lag(value) OVER (PARTITION BY worker, CAST(labels AS VARCHAR) ORDER BY at_ns) AS before FROM sample "
        f"WHERE name = '{name}' AND {event_where(case, facts)})"
    )


def event_where(case: Case, facts: Facts) -> str:
    """The condition on `at_ns` that events of the window meet."""
    return case.sql_where(bounds(case, facts), "at_ns")


def bounds(case: Case, facts: Facts) -> Window:
    """The window with both its ends on the engine's clock, for kinds that are not placed by their request's arrival."""
    window, origin = moved(case.window_of(facts), facts.requests.engine_ahead_ns), facts.requests.origin_ns
    start = window.start_ns if window.start_ns is not None else origin + round(facts.start_s * 1e9)
    end = window.end_ns if window.end_ns is not None else origin + round(facts.end_s * 1e9)
    return Window(start, end, window.run_id)


def pool_sql(case: Case, facts: Facts) -> str:
    """KV blocks of the workers that served the window, newest word of each."""
    names = sorted(w.worker for w in facts.workers if w.worker is not None)
    among = f" AND worker IN ({', '.join(map(text, names))})" if names else ""
    end = bounds(case, facts).end_ns
    scope = case.sql_scope(case.window_of(facts))
    return (
        "SELECT sum(num_blocks) AS num_blocks FROM (SELECT arg_max(num_blocks, at_ns) AS num_blocks FROM worker "
        f"WHERE {scope} AND at_ns < {end} AND num_blocks > 0{among} GROUP BY worker)"
    )


def lost_sql(case: Case, select: str, where: str = "true") -> str:
    """`select` over the prompt blocks that the suspect window missed although they had been stored before, a row a miss.

    A lost block that was asked for again is stored twice, so only such blocks are looked at; where no store is told, those that were
    evicted (as `store.evidence.lost_blocks` does).
    """
    facts, window, lineage = case.suspect, case.suspect_window, case.suspect.lineage
    worker = ", worker" if lineage is not None and lineage.by_worker else ""
    ahead_ns = facts.requests.engine_ahead_ns
    past = case.sql_where(past_of(moved(window, ahead_ns)), "at_ns")
    missed = request_sql(
        case,
        facts,
        f"request_id, worker, arrival_ns{f' + {ahead_ns}' if ahead_ns else ''} AS at_ns, unnest(prompt_blocks[cached_tokens // {facts.block_size()} + 1:]) AS block_hash",
    )
    conditions = [where]
    if lineage is not None and float(lineage.cleared_tokens.sum()) > 0:
        conditions.append(
            f"NOT EXISTS (SELECT 1 FROM block WHERE {case.sql_scope(window)} AND change = 'cleared' "
            f"AND m.at_ns BETWEEN at_ns AND at_ns + {round(COLD_PERIOD_S)}000000000)"
        )
    kept = " AND ".join(c for c in conditions if c != "true")
    change, times = "= 'stored'", " HAVING count(*) > 1"
    if lineage is not None and lineage.by_evictions:
        change, times = "IN ('evicted', 'removed')", ""
    return (
        f"SELECT {select} FROM ({missed}) m JOIN (SELECT block_hash{worker}, min(at_ns) AS first_ns FROM block WHERE {past} "
        f"AND change {change} AND {ON_DEVICE} GROUP BY ALL{times}) s USING (block_hash{worker}) "
        "WHERE m.at_ns > s.first_ns" + (f" AND {kept}" if kept else "")
    )


def restored_sql(case: Case) -> str:
    """Blocks stored after an eviction of the same block in the same window."""
    where = event_where(case, case.suspect)
    return (
        f"SELECT {_num_blocks(case.suspect, 'b')} FROM block b JOIN (SELECT worker, block_hash, min(at_ns) AS at_ns FROM block WHERE {where} AND change "
        f"IN ('evicted', 'removed') AND {ON_DEVICE} GROUP BY ALL) g ON b.block_hash = g.block_hash AND b.worker IS NOT DISTINCT "
        f"FROM g.worker AND b.at_ns > g.at_ns WHERE b.change = 'stored' AND coalesce(b.tier, 'device') = 'device' AND "
        + " AND ".join(f"b.{part}" for part in where.split(" AND "))
    )


def evicted_sql(case: Case, facts: Facts) -> str:
    """Blocks evicted in the window."""
    return f"SELECT {_num_blocks(facts)} FROM block WHERE change IN ('evicted', 'removed') AND {ON_DEVICE} AND {event_where(case, facts)}"


def _num_blocks(facts: Facts, alias: str = "") -> str:
    sampled = facts.blocks is not None and facts.blocks.sample_rate is not None
    return f"round({count_sql(alias)})" if sampled else "count(*)"


def text(value: str) -> str:
    """A string as an SQL literal."""
    return "'" + value.replace("'", "''") + "'"
