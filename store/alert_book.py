"""The book of alerts: what was found, what is told to whom, and what is still to be delivered; on disk, beside the rows.

Invariant: a change of state and the messages that tell it are one transaction, so a crash between the two cannot be: either
nobody was to be told, or the message waits in the outbox. Alerting has few rows; each write replaces whole rows by their key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import sqlalchemy as sa

from store.alert_rows import OPEN_STATES, Alert, Changes, Delivery, DeliveryState, Group, Silence
from store.statements import render
from store.tables import ALERT, ALERT_DELIVERY, ALERT_GROUP, FINDING, SILENCE

if TYPE_CHECKING:
    import duckdb

    from store.duckdb_store import DuckDBStore

T = TypeVar("T")
Row = dict[str, Any]

KEPT_ALERTS: Final = 2_000
"""Ended episodes that are kept, newest first."""
KEPT_DELIVERIES: Final = 2_000
"""Delivered messages that are kept, and as many dead ones; waiting ones all are."""
_JSON: Final = frozenset({"labels", "annotations", "matchers", "told"})


class AlertBook:
    """Reads and writes of alerting; safe from several threads. Writes come between two commits of batches."""

    def __init__(self, store: DuckDBStore) -> None:
        self._store = store

    def open_alerts(self) -> list[Alert]:
        """Episodes that are pending or firing, oldest first."""
        return self._read(Alert, sa.select(ALERT).where(ALERT.c.state.in_(OPEN_STATES)).order_by(ALERT.c.starts_ns))

    def alerts(
        self, states: Sequence[str] | None = None, *, ids: Sequence[str] | None = None, limit: int = 1000
    ) -> list[Alert]:
        """Episodes of these states (all where None) or ids, most recently changed first."""
        asked = sa.select(ALERT).order_by(ALERT.c.updated_ns.desc(), ALERT.c.alert_id).limit(limit)
        if states is not None:
            asked = asked.where(ALERT.c.state.in_(states))
        if ids is not None:
            asked = asked.where(ALERT.c.alert_id.in_(ids))
        return self._read(Alert, asked)

    def latest_of(self, fingerprints: Sequence[str]) -> dict[str, Alert]:
        """The newest episode of each fingerprint that has one."""
        if not fingerprints:
            return {}
        asked = sa.select(ALERT).where(ALERT.c.fingerprint.in_(fingerprints)).order_by(ALERT.c.updated_ns)
        return {alert.fingerprint: alert for alert in self._read(Alert, asked)}

    def groups(self) -> list[Group]:
        """What every receiver knows."""
        return self._read(Group, sa.select(ALERT_GROUP))

    def silences(self, since_ns: int | None = None) -> list[Silence]:
        """Silences that end after `since_ns` (all where None), the first to end first."""
        asked = sa.select(SILENCE).order_by(SILENCE.c.ends_ns, SILENCE.c.silence_id)
        return self._read(Silence, asked if since_ns is None else asked.where(SILENCE.c.ends_ns > since_ns))

    def deliveries(
        self,
        state: DeliveryState | None = None,
        *,
        ids: Sequence[str] | None = None,
        limit: int = 1000,
        newest_first: bool = False,
    ) -> list[Delivery]:
        """Messages in the order of the queue."""
        order = ALERT_DELIVERY.c.seq.desc() if newest_first else ALERT_DELIVERY.c.seq
        asked = sa.select(ALERT_DELIVERY).order_by(order).limit(limit)
        if state is not None:
            asked = asked.where(ALERT_DELIVERY.c.state == state)
        if ids is not None:
            asked = asked.where(ALERT_DELIVERY.c.delivery_id.in_(ids))
        return self._read(Delivery, asked)

    def next_deliveries(self) -> list[Delivery]:
        """The first waiting message of every receiver that has one."""
        column = ALERT_DELIVERY.c
        first = sa.select(sa.func.min(column.seq)).where(column.state == "waiting").group_by(column.receiver)
        return self._read(Delivery, sa.select(ALERT_DELIVERY).where(column.seq.in_(first)).order_by(column.seq))

    def next_delivery(self, receiver: str) -> Delivery | None:
        """The first waiting message of a receiver."""
        column = ALERT_DELIVERY.c
        waiting = sa.select(ALERT_DELIVERY).where(column.state == "waiting", column.receiver == receiver)
        return next(iter(self._read(Delivery, waiting.order_by(column.seq).limit(1))), None)

    def counts(self) -> dict[tuple[str, str], int]:
        """Messages by (receiver, state)."""
        count = sa.select(ALERT_DELIVERY.c.receiver, ALERT_DELIVERY.c.state, sa.func.count().label("n"))
        found = self._rows(count.group_by(ALERT_DELIVERY.c.receiver, ALERT_DELIVERY.c.state))
        return {(row["receiver"], row["state"]): row["n"] for row in found}

    def save(self, changes: Changes) -> None:
        """Make all of it true at once, and forget the oldest of what has ended. On disk when this returns."""

        def work(cursor: duckdb.DuckDBPyConnection) -> None:
            cursor.execute("BEGIN")
            _replace(cursor, ALERT, ("alert_id",), changes.alerts)
            _replace(cursor, SILENCE, ("silence_id",), changes.silences)
            _replace(cursor, ALERT_GROUP, ("receiver", "group_key"), changes.groups)
            for key in changes.forgotten:
                _execute(cursor, sa.delete(ALERT_GROUP).where(_is(ALERT_GROUP, ("receiver", "group_key"), key)))
            _put_deliveries(cursor, changes.deliveries)
            if changes.discarded:
                _execute(cursor, sa.delete(ALERT_DELIVERY).where(ALERT_DELIVERY.c.delivery_id.in_(changes.discarded)))
            ended = ALERT.c.state.not_in(OPEN_STATES)
            _prune(cursor, ALERT, ALERT.c.alert_id, ended, ALERT.c.updated_ns, KEPT_ALERTS)
            for state in ("delivered", "dead"):
                column = ALERT_DELIVERY.c
                _prune(cursor, ALERT_DELIVERY, column.delivery_id, column.state == state, column.seq, KEPT_DELIVERIES)
            cursor.execute("COMMIT")

        self._store.call(work, is_transaction=True)

    def keep_finding(self, finding: Mapping[str, Any], keep: int) -> int:
        """Keep a verdict in short under the next number, with the newest `keep - 1` others; answers with the number."""

        def work(cursor: duckdb.DuckDBPyConnection) -> int:
            cursor.execute("BEGIN")
            number = _next(cursor, FINDING.c.finding_id)
            document = msgspec.json.encode({"id": number, **finding}).decode()
            row = {"finding_id": number, "made_ns": finding["made_ns"], "document": document}
            _execute(cursor, sa.insert(FINDING).values(row))
            _execute(cursor, sa.delete(FINDING).where(FINDING.c.finding_id <= number - keep))
            cursor.execute("COMMIT")
            return number

        return self._store.call(work, is_transaction=True)

    def findings(self, limit: int = 1000) -> list[dict[str, Any]]:
        """The newest verdicts in short, newest first."""
        asked = sa.select(FINDING.c.document).order_by(FINDING.c.finding_id.desc()).limit(limit)
        return [msgspec.json.decode(row["document"]) for row in self._rows(asked)]

    def _rows(self, statement: Any) -> list[Row]:
        found: list[Row] = self._store.query(*render(statement)).to_pylist()
        return found

    def _read(self, kind: type[T], statement: Any) -> list[T]:
        names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # T is a dataclass, which a TypeVar cannot say
        return [kind(**{name: _from_row(name, row[name]) for name in names}) for row in self._rows(statement)]


def _from_row(name: str, value: Any) -> Any:
    if name not in _JSON:
        return value
    found = msgspec.json.decode(value)
    return tuple(found) if isinstance(found, list) else found


def _to_row(item: Any) -> Row:
    row = {field.name: getattr(item, field.name) for field in fields(item)}
    return {name: msgspec.json.encode(value).decode() if name in _JSON else value for name, value in row.items()}


def _is(table: sa.Table, key: Sequence[str], values: Sequence[str]) -> sa.ColumnElement[bool]:
    return sa.and_(*(table.c[name] == value for name, value in zip(key, values, strict=True)))


def _execute(cursor: duckdb.DuckDBPyConnection, statement: Any) -> None:
    cursor.execute(*render(statement))


def _replace(cursor: duckdb.DuckDBPyConnection, table: sa.Table, key: Sequence[str], items: Sequence[Any]) -> None:
    """Write each item as the one row of its key."""
    for item in items:
        row = _to_row(item)
        _execute(cursor, sa.delete(table).where(_is(table, key, [row[name] for name in key])))
        _execute(cursor, sa.insert(table).values(row))


def _put_deliveries(cursor: duckdb.DuckDBPyConnection, deliveries: Sequence[Delivery]) -> None:
    """As `_replace`; a message that is new gets the next number of the queue."""
    for delivery in deliveries:
        row = _to_row(delivery)
        if not delivery.seq:
            row["seq"] = _next(cursor, ALERT_DELIVERY.c.seq)
        _execute(cursor, sa.delete(ALERT_DELIVERY).where(ALERT_DELIVERY.c.delivery_id == delivery.delivery_id))
        _execute(cursor, sa.insert(ALERT_DELIVERY).values(row))


def _next(cursor: duckdb.DuckDBPyConnection, column: sa.Column[int]) -> int:
    found = cursor.execute(*render(sa.select(sa.func.coalesce(sa.func.max(column), 0)))).fetchone()
    return int(found[0]) + 1 if found else 1


def _prune(
    cursor: duckdb.DuckDBPyConnection,
    table: sa.Table,
    key: sa.Column[str],
    which: sa.ColumnElement[bool],
    order: sa.Column[int],
    keep: int,
) -> None:
    """Keep the newest `keep` rows of those meant, looking only when there are a tenth more."""
    found = cursor.execute(*render(sa.select(sa.func.count()).select_from(table).where(which))).fetchone()
    if found and int(found[0]) > keep + keep // 10:
        newest = sa.select(key).where(which).order_by(order.desc(), key).limit(keep)
        _execute(cursor, sa.delete(table).where(which, key.not_in(newest)))
