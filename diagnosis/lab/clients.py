"""What the callers saw, made from what the engines sent: one row a call at the client's vantage, beside the engines' rows.

A call that was asked several times, or served by several workers, is one call to its caller: it began when it was first
asked, and its tokens are those of whoever sent some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diagnosis.lab.scene import ClientView
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

SAME = (
    "request_id",
    "prompt_tokens",
    "tenant",
    "workload",
    "session_id",
    "turn",
    "prefix_hash",
    "model",
    "engine",
    "labels",
)
COUNTED = (
    *SAME,
    "attempt",
    "state",
    "arrival_ns",
    "end_ns",
    "token_ns",
    "token_counts",
    "output_tokens",
    "finish_reason",
)


def client_rows(engine: pa.Table, view: ClientView, run_id: str) -> pa.Table:
    """The engines' rows, and after them a row a call as its caller saw it."""
    import pyarrow as pa

    calls: dict[str, list[dict[str, Any]]] = {}
    for row in engine.select(list(dict.fromkeys(COUNTED))).to_pylist():
        calls.setdefault(row["request_id"], []).append(row)
    seen = [_row(rows, view, run_id) for rows in calls.values()]
    return pa.concat_tables([engine, table_from_rows("request", seen)])


def _row(rows: list[dict[str, Any]], view: ClientView, run_id: str) -> dict[str, Any]:
    """One call. Its last attempt says how it ended."""
    rows.sort(key=lambda row: (row["attempt"] or 0, row["end_ns"]))
    last = rows[-1]
    served = [row for row in rows if (row["attempt"] or 0) == (last["attempt"] or 0)]
    away_ns, head_ns = round(view.network_s * 1e9), round((view.network_s + view.first_token_s) * 1e9)
    tokens: list[int] = []
    counts: list[int] = []
    for row in served:
        tokens += row["token_ns"] or []
        counts += row["token_counts"] or [1] * len(row["token_ns"] or [])
    # A head that is held back lets no later token pass it.
    first_ns = tokens[0] + head_ns if tokens else None
    told = [max(at_ns + away_ns, first_ns) for at_ns in tokens] if first_ns is not None else []
    end_ns = max(last["end_ns"] + away_ns, told[-1] if told else 0)
    return {
        **{name: rows[0][name] for name in SAME},
        "run_id": run_id,
        "vantage": "client",
        "state": last["state"],
        "at_ns": end_ns,
        "arrival_ns": min(row["arrival_ns"] for row in rows) - away_ns,
        "first_token_ns": first_ns,
        "last_token_ns": told[-1] if told else None,
        "end_ns": end_ns,
        "token_ns": told or None,
        "token_counts": counts or None,
        "output_tokens": sum(row["output_tokens"] or 0 for row in served),
        "finish_reason": last["finish_reason"],
        "retry_count": last["attempt"] or 0,
        "labels": dict(rows[0]["labels"] or []),
    }
