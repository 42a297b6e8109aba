"""Table metadata: one table a kind, its columns derived from the event contract, and the small relational side.

Invariant: the contract (`engine_probe/events.py`) is typed once. The columns of a kind's table are the contract's, in
its order, followed by what only the store knows: `source` (who sent the row) and `received_ns` (when we got it). The
numbered migrations were written from this metadata and are frozen once released; a contract test compares the two.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from duckdb_sqlalchemy.datatypes import Map, Struct, UBigInteger
from sqlalchemy.dialects import postgresql

from engine_probe.events import KINDS, Column

METADATA: Final = sa.MetaData()

STORE_COLUMNS: Final = ("source", "received_ns")
"""Columns of every kind's table that the contract does not have. `received_ns` never falls in the order of arrival."""

_SCALARS: Final[dict[str, Any]] = {
    "string": sa.String,
    "int64": sa.BigInteger,
    "uint64": UBigInteger,
    "float64": sa.DOUBLE,
    "bool": sa.Boolean,
}


def column_type(column: Column) -> Any:
    """SQLAlchemy type of a contract column."""
    if column.type in _SCALARS:
        return _SCALARS[column.type]()
    if column.type == "map<string,string>":
        return Map(sa.String, sa.String)
    if column.type in ("struct", "list<struct>"):
        struct = Struct({name: _SCALARS[type_] for name, type_ in column.fields})
        return struct if column.type == "struct" else postgresql.ARRAY(struct)
    if column.type.startswith("list<"):
        return postgresql.ARRAY(_SCALARS[column.type[5:-1]]())
    raise ValueError(f"column {column.name} has unknown type {column.type}")


def _kind_table(kind: str) -> sa.Table:
    columns = [sa.Column(c.name, column_type(c), nullable=not c.required) for c in KINDS[kind]]
    columns.append(sa.Column("source", sa.String, nullable=False))
    columns.append(sa.Column("received_ns", sa.BigInteger, nullable=False))
    return sa.Table(kind, METADATA, *columns)


TABLES: Final[dict[str, sa.Table]] = {kind: _kind_table(kind) for kind in KINDS}
"""Kind -> its table."""

SENDER: Final = sa.Table(
    "sender",
    METADATA,
    sa.Column("source", sa.String, nullable=False),
    sa.Column("epoch", sa.String, nullable=False),
    sa.Column("first_received_ns", sa.BigInteger, nullable=False),
    sa.Column("last_received_ns", sa.BigInteger, nullable=False),
    sa.Column("num_batches", sa.BigInteger, nullable=False),
    sa.Column("num_rows", Map(sa.String, sa.BigInteger), nullable=False),
    sa.Column("clock_offset_s", sa.DOUBLE),
    sa.Column("clock_error_s", sa.DOUBLE),
)
"""One row a sender and epoch; rows accepted by kind. The clock offset is the sender's clock minus ours."""

BATCH_RANGE: Final = sa.Table(
    "batch_range",
    METADATA,
    sa.Column("source", sa.String, nullable=False),
    sa.Column("epoch", sa.String, nullable=False),
    sa.Column("first_seq", sa.BigInteger, nullable=False),
    sa.Column("last_seq", sa.BigInteger, nullable=False),
)
"""Which batches were applied: disjoint inclusive ranges, neighbours merged. Outlives the rows."""

BATCH_JOURNAL: Final = sa.Table(
    "batch_journal",
    METADATA,
    sa.Column("source", sa.String, nullable=False),
    sa.Column("epoch", sa.String, nullable=False),
    sa.Column("first_seq", sa.BigInteger),
    sa.Column("last_seq", sa.BigInteger),
    sa.Column("received_ns", sa.BigInteger, nullable=False),
    sa.Column("num_batches", sa.BigInteger, nullable=False),
    sa.Column("num_rows", Map(sa.String, sa.BigInteger), nullable=False),
    sa.Column("clock_offset_s", sa.DOUBLE),
    sa.Column("clock_error_s", sa.DOUBLE),
)
"""The tail of the two tables above: one row a range of batches in a commit, folded into them now and then.
No range where the sender gave no identity."""

KIND_STATE: Final = sa.Table(
    "kind_state",
    METADATA,
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("num_removed", sa.BigInteger, nullable=False),
    sa.Column("sealed_through_ns", sa.BigInteger),
)
"""Rows that retention removed, and up to which `received_ns` the rows of the kind are in Parquet."""

SEAL_LOG: Final = sa.Table(
    "seal_log",
    METADATA,
    sa.Column("seal_id", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("path", sa.String, nullable=False),
    sa.Column("run_id", sa.String),
    sa.Column("num_rows", sa.BigInteger, nullable=False),
    sa.Column("num_bytes", sa.BigInteger),
    sa.Column("after_ns", sa.BigInteger, nullable=False),
    sa.Column("through_ns", sa.BigInteger, nullable=False),
    sa.Column("sealed_ns", sa.BigInteger),
)
"""One row a Parquet file (path relative to the Parquet folder) with the rows received in (after_ns, through_ns].
Written before the file with `sealed_ns` null, which the transaction sets that moves `kind_state.sealed_through_ns`."""

RUN: Final = sa.Table(
    "run",
    METADATA,
    sa.Column("run_id", sa.String, nullable=False),
    sa.Column("first_received_ns", sa.BigInteger, nullable=False),
)
"""One row a run that has rows, with when its first row came."""

SETTING: Final = sa.Table(
    "setting",
    METADATA,
    sa.Column("name", sa.String, nullable=False),
    sa.Column("value", sa.String, nullable=False),
)
"""What the database says about itself: who made it, which views it holds."""

SQL_AUDIT: Final = sa.Table(
    "sql_audit",
    METADATA,
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("who", sa.String),
    sa.Column("sql", sa.String, nullable=False),
    sa.Column("outcome", sa.String, nullable=False),
    sa.Column("num_rows", sa.BigInteger),
    sa.Column("duration_s", sa.DOUBLE),
    sa.Column("message", sa.String),
)
"""Every SQL text that people ran, and how it ended (ok, refused, killed, failed)."""

ALERT: Final = sa.Table(
    "alert",
    METADATA,
    sa.Column("alert_id", sa.String, nullable=False),
    sa.Column("fingerprint", sa.String, nullable=False),
    sa.Column("origin", sa.String, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("labels", sa.String, nullable=False),
    sa.Column("annotations", sa.String, nullable=False),
    sa.Column("starts_ns", sa.BigInteger, nullable=False),
    sa.Column("claimed_until_ns", sa.BigInteger, nullable=False),
    sa.Column("looks", sa.BigInteger, nullable=False),
    sa.Column("baseline", sa.String),
    sa.Column("fired_ns", sa.BigInteger),
    sa.Column("last_seen_ns", sa.BigInteger, nullable=False),
    sa.Column("ends_ns", sa.BigInteger),
    sa.Column("updated_ns", sa.BigInteger, nullable=False),
)
"""One row an episode of an alert (pending, firing, resolved, dismissed); labels and annotations are JSON objects."""

SILENCE: Final = sa.Table(
    "silence",
    METADATA,
    sa.Column("silence_id", sa.String, nullable=False),
    sa.Column("matchers", sa.String, nullable=False),
    sa.Column("starts_ns", sa.BigInteger, nullable=False),
    sa.Column("ends_ns", sa.BigInteger, nullable=False),
    sa.Column("created_by", sa.String, nullable=False),
    sa.Column("comment", sa.String, nullable=False),
)
"""What is not told to anybody for a while; matchers are a JSON list of texts such as `worker="w1"`."""

ALERT_GROUP: Final = sa.Table(
    "alert_group",
    METADATA,
    sa.Column("receiver", sa.String, nullable=False),
    sa.Column("group_key", sa.String, nullable=False),
    sa.Column("labels", sa.String, nullable=False),
    sa.Column("first_ns", sa.BigInteger, nullable=False),
    sa.Column("told_ns", sa.BigInteger),
    sa.Column("told", sa.String, nullable=False),
)
"""What a receiver was last told of a group of alerts: a JSON object, alert_id to state."""

ALERT_DELIVERY: Final = sa.Table(
    "alert_delivery",
    METADATA,
    sa.Column("delivery_id", sa.String, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("receiver", sa.String, nullable=False),
    sa.Column("group_key", sa.String, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("content_type", sa.String, nullable=False),
    sa.Column("body", sa.String, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("attempts", sa.BigInteger, nullable=False),
    sa.Column("next_ns", sa.BigInteger, nullable=False),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Column("message", sa.String),
)
"""The outbox: one row a message to a receiver (waiting, delivered, dead). Written with what it tells, in one transaction."""

FINDING: Final = sa.Table(
    "finding",
    METADATA,
    sa.Column("finding_id", sa.BigInteger, nullable=False),
    sa.Column("made_ns", sa.BigInteger, nullable=False),
    sa.Column("document", sa.String, nullable=False),
)
"""Verdicts in short, as JSON, by number: those that people asked for, and those that the evaluator made."""

RELATIONAL: Final = (
    SENDER,
    BATCH_RANGE,
    BATCH_JOURNAL,
    KIND_STATE,
    SEAL_LOG,
    SETTING,
    SQL_AUDIT,
    RUN,
    ALERT,
    SILENCE,
    ALERT_GROUP,
    ALERT_DELIVERY,
    FINDING,
)
