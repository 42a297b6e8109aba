"""One row a request and vantage: rows that tell of the same request are merged, and each column is what any of them knows.

Why there are several: an engine's plugin and its spans tell of the same request at the same vantage, and a sender without a
batch identity delivers at least once. Rows of one run, `request_id` and vantage are one request where each arrived within
`SAME_NS` of the one before. Rows that name different attempts, generations or workers are not (a prefill and a decode
worker each have their row), nor are rows of prompts of different lengths; but for one case of workers: a span names its service and not the plugin's worker, so a span and a row
that is none are one where their arrivals are two readings of one stamp (`SAME_STAMP_NS`).

Invariant: the merged row has every column that one of its rows has; where they differ, the row of no span that knows most is taken.
Both the facts of a diagnosis and the SQL behind its numbers are made from this one statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from store.conform import contract_types

if TYPE_CHECKING:
    import pyarrow as pa

    from store.interface import Store

SAME_NS: Final = 1_000_000
"""Arrivals of one request at one vantage that two rows tell differ by less: they are rounded, or taken a call apart."""
SAME_STAMP_NS: Final = 2_000
"""Two readings of one stamp differ by less: a double holds the nanoseconds since 1970 to within 256."""
KNOWING: Final = ("queue_s", "prefill_s", "decode_s", "cached_tokens", "first_token_ns")
"""A row that knows more of these is taken before one that knows fewer, and any row before a span."""

_KEY: Final = "run_id, request_id, vantage"
_NEEDED: Final = (
    *_KEY.split(", "),
    "worker",
    "at_ns",
    "arrival_ns",
    "attempt",
    "generation_id",
    "labels",
    "prompt_tokens",
    *KNOWING,
)
_SPAN: Final = "labels['span_id']"
IS_SPAN: Final = f"(trace_id IS NOT NULL AND {_SPAN} IS NOT NULL)"
"""SQL: whether a row is a span of OTLP, which tells of a request that another row of the engine may tell as well. Every span
has a trace; that column has statistics by which DuckDB knows at once where there is none.
"""
_GENERATION: Final = "coalesce(generation_id, labels['engine_request_id'])"


def one_request_sql(condition: str, columns: Sequence[str] | None = None) -> str:
    """SELECT text: the `request` rows that meet `condition`, merged; columns of the contract (None: all) under their names."""
    wanted = "*" if columns is None else ", ".join(dict.fromkeys((*_NEEDED, *columns)))
    poorer = " + ".join(f"({name} IS NULL)::INT" for name in KNOWING)
    ranked = (
        f"SELECT {wanted}, row_number() OVER (ORDER BY {_SPAN} IS NOT NULL, {poorer}, at_ns, worker, attempt, generation_id) "
        f"AS rank FROM request WHERE {condition}"
    )
    reach = (
        f"CASE WHEN coalesce(worker = lag(worker) OVER told, true) THEN {SAME_NS} "
        f"WHEN ({_SPAN} IS NULL) <> (lag({_SPAN}) OVER told IS NULL) THEN {SAME_STAMP_NS} ELSE -1 END"
    )
    # two that are no spans and tell prompts of other lengths are two requests that happen to have one id
    other = f"{_SPAN} IS NULL AND lag({_SPAN}) OVER told IS NULL AND coalesce(prompt_tokens <> lag(prompt_tokens) OVER told, false)"
    same = (
        f"NOT ({other}) AND arrival_ns - lag(arrival_ns) OVER told <= {reach} AND coalesce(attempt = lag(attempt) OVER told, true) "
        f"AND coalesce({_GENERATION} = lag({_GENERATION}) OVER told, true)"
    )
    told = f"(PARTITION BY {_KEY} ORDER BY arrival_ns, rank)"
    begun = f"SELECT *, CASE WHEN {same} THEN 0 ELSE 1 END AS begins FROM ({ranked}) WINDOW told AS {told}"
    counted = f"SELECT *, sum(begins) OVER {told} AS place FROM ({begun})"
    told_by_each = [name for name in columns or () if name != "sample_rate"]
    shown = (
        "* EXCLUDE (rank, begins, place, sample_rate)"
        if columns is None
        else f"[{', '.join(map(_quoted, told_by_each))}]"
    )
    # whoever kept more decides whether the request is here at all: at a higher rate everything is kept that is kept at a lower
    rate = "CASE WHEN count(sample_rate) = count(*) THEN max(sample_rate) END AS sample_rate"
    rates = f", {rate}" if columns is None or "sample_rate" in columns else ""
    return f"SELECT arg_min(COLUMNS({shown}), rank){rates} FROM ({counted}) GROUP BY {_KEY}, place"


def one_requests(
    store: Store, condition: str, params: Sequence[Any], columns: Sequence[str], *, order_by: str
) -> pa.Table:
    """Those rows as a table of the contract's types. `condition`, `order_by`: our own SQL text; `?` takes `params`."""
    sql = f"SELECT * FROM ({one_request_sql(condition, columns)}) ORDER BY {order_by}"
    return contract_types("request", store.query(sql, params))


def _quoted(name: str) -> str:
    return f"'{name}'"
