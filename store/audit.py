"""The audit of SQL for people: who asked what, and how it ended. Kept beside the rows, the newest entries only.

The statement's text is kept, its answer is not. Writing an entry never fails the statement it speaks of.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import sqlalchemy as sa

from engine_probe.errors import KvscopeError, QueryKilled, QueryRefused, StoreBusy
from store.statements import render
from store.tables import SQL_AUDIT

if TYPE_CHECKING:
    import duckdb

    from store.duckdb_store import DuckDBStore

log = logging.getLogger(__name__)

KEPT: Final = 10_000
"""Newest entries that are kept."""
_LONGEST: Final = 20_000

Outcome = Literal["ok", "refused", "killed", "failed"]


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One statement. `at_ns` is when it ended; `num_rows` of its answer, None where there was none."""

    at_ns: int
    who: str | None
    sql: str
    outcome: Outcome
    num_rows: int | None
    duration_s: float
    message: str | None = None


def record(store: DuckDBStore, entry: AuditEntry) -> bool:
    """Write an entry and forget the oldest ones; False where that was not possible (it is logged)."""

    def work(cursor: duckdb.DuckDBPyConnection) -> None:
        insert = sa.insert(SQL_AUDIT).values(
            at_ns=entry.at_ns,
            who=entry.who,
            sql=entry.sql[:_LONGEST],
            outcome=entry.outcome,
            num_rows=entry.num_rows,
            duration_s=entry.duration_s,
            message=None if entry.message is None else entry.message[:_LONGEST],
        )
        cursor.execute(*render(insert))
        (count,) = cursor.execute(*render(sa.select(sa.func.count()).select_from(SQL_AUDIT))).fetchone() or (0,)
        if count > KEPT + KEPT // 10:
            newest = sa.select(SQL_AUDIT.c.at_ns).order_by(SQL_AUDIT.c.at_ns.desc()).offset(KEPT - 1).limit(1)
            cursor.execute(*render(sa.delete(SQL_AUDIT).where(SQL_AUDIT.c.at_ns < newest.scalar_subquery())))

    try:
        store.call(work)
    except KvscopeError as error:
        log.warning("audit entry not written", extra={"outcome": entry.outcome, "reason": error.message})
        return False
    return True


@contextmanager
def audited(store: DuckDBStore, sql: str, who: str | None = None) -> Iterator[None]:
    """Run a statement inside: an entry tells how it ended, and its error passes on."""
    started = time.perf_counter()
    outcome: Outcome = "failed"
    message = None
    try:
        yield
        outcome = "ok"
    except (QueryRefused, QueryKilled, StoreBusy) as error:
        outcome = "killed" if isinstance(error, QueryKilled) else "refused"
        message = error.message
        raise
    except Exception as error:
        message = str(error)
        raise
    finally:
        took = time.perf_counter() - started
        record(store, AuditEntry(store.now_ns(), who, sql, outcome, None, took, message))


def recent(store: DuckDBStore, limit: int = 100) -> list[AuditEntry]:
    """The newest entries, newest first."""
    columns = [SQL_AUDIT.c[name] for name in AuditEntry.__dataclass_fields__]
    found = store.query(*render(sa.select(*columns).order_by(SQL_AUDIT.c.at_ns.desc()).limit(limit)))
    return [AuditEntry(**row) for row in found.to_pylist()]
