"""What the writer knows of senders, applied batches and row counts: a mirror in memory of four small tables.

Invariant: the mirror equals the tables after every commit. A change is written inside the transaction of the rows it speaks of,
and the mirror takes it over (`settle`) only when that transaction is on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import duckdb
import sqlalchemy as sa

from engine_probe.events import KINDS
from store.clock import SenderClock
from store.interface import BatchId, SourceInfo
from store.ranges import SeqRanges
from store.statements import render
from store.tables import BATCH_RANGE, ROW_COUNT, SOURCE

Key = tuple[str, str]  # (source, epoch)


@dataclass(slots=True)
class SenderState:
    """Totals of one sender and epoch."""

    first_received_ns: int
    last_received_ns: int
    num_batches: int = 0
    num_rows: int = 0
    clock_offset_s: float | None = None
    clock_error_s: float | None = None


@dataclass(slots=True)
class KindState:
    """The books of one kind: rows in the table = appended - removed."""

    appended: int = 0
    removed: int = 0
    sealed_through_ns: int | None = None


@dataclass(slots=True)
class Change:
    """What one transaction will change; collected, written, then settled."""

    ranges: dict[Key, SeqRanges] = field(default_factory=dict)
    senders: dict[Key, SenderState] = field(default_factory=dict)
    appended: dict[str, int] = field(default_factory=dict)


class Books:
    """Mirror of `source`, `batch_range` and `row_count`; owned by the writer's thread, read by others in snapshots."""

    def __init__(self) -> None:
        self.ranges: dict[Key, SeqRanges] = {}
        self.senders: dict[Key, SenderState] = {}
        self.kinds: dict[str, KindState] = {kind: KindState() for kind in KINDS}
        self._clocks: dict[str, SenderClock] = {}
        self.last_received_ns = 0

    @classmethod
    def load(cls, cursor: duckdb.DuckDBPyConnection, *, clocks_of: Books | None = None) -> Books:
        """Read the tables; the clocks, which live in memory only, are taken over from `clocks_of`."""
        books = cls()
        if clocks_of is not None:
            books._clocks = clocks_of._clocks
        ranges: dict[Key, list[tuple[int, int]]] = {}
        for source, epoch, first, last in _fetch(cursor, sa.select(BATCH_RANGE)):
            ranges.setdefault((source, epoch), []).append((first, last))
        books.ranges = {key: SeqRanges(found) for key, found in ranges.items()}
        for source, epoch, *facts in _fetch(cursor, sa.select(SOURCE)):
            books.senders[source, epoch] = SenderState(*facts)
        for kind, *facts in _fetch(cursor, sa.select(ROW_COUNT)):
            books.kinds[kind] = KindState(*facts)
        received = [state.last_received_ns for state in books.senders.values()]
        sealed = [state.sealed_through_ns or 0 for state in books.kinds.values()]
        books.last_received_ns = max([0, *received, *sealed])
        return books

    def is_applied(self, identity: BatchId) -> bool:
        """The batch was committed before."""
        found = self.ranges.get((identity.source, identity.epoch))
        return found is not None and identity.seq in found

    def note(
        self,
        change: Change,
        identity: BatchId | None,
        source: str,
        *,
        sent_ns: int | None,
        received_ns: int,
        row_ns: int,
        rows: Mapping[str, int],
    ) -> None:
        """Add one batch to a change. `received_ns` is when it came, `row_ns` the instant its rows carry."""
        key = (source, identity.epoch if identity else "")
        if identity is not None:
            if key not in change.ranges:
                change.ranges[key] = self.ranges[key].copy() if key in self.ranges else SeqRanges()
            change.ranges[key].add(identity.seq)
        if key not in change.senders:
            known = self.senders.get(key)
            change.senders[key] = (
                SenderState(row_ns, row_ns)
                if known is None
                else SenderState(known.first_received_ns, row_ns, known.num_batches, known.num_rows)
            )
            if known is not None:
                change.senders[key].clock_offset_s, change.senders[key].clock_error_s = (
                    known.clock_offset_s,
                    known.clock_error_s,
                )
        state = change.senders[key]
        state.last_received_ns = max(state.last_received_ns, row_ns)
        state.num_batches += 1
        state.num_rows += sum(rows.values())
        if sent_ns is not None:
            clock = self._clocks.setdefault(source, SenderClock())
            clock.saw(sent_ns, received_ns)
            state.clock_offset_s, state.clock_error_s = clock.offset_s, clock.error_s
        for kind, count in rows.items():
            change.appended[kind] = change.appended.get(kind, 0) + count

    def write(self, cursor: duckdb.DuckDBPyConnection, change: Change) -> None:
        """Write a change inside the transaction that is open on `cursor`."""
        for key, ranges in change.ranges.items():
            self._write_ranges(cursor, key, ranges)
        for key, state in change.senders.items():
            _write_sender(cursor, key, state, is_new=key not in self.senders)
        for kind, count in change.appended.items():
            cursor.execute("UPDATE row_count SET appended = appended + ? WHERE kind = ?", [count, kind])

    def settle(self, change: Change) -> None:
        """The transaction is on disk: take the change over."""
        self.ranges.update(change.ranges)
        self.senders.update(change.senders)
        for kind, count in change.appended.items():
            self.kinds[kind].appended += count
        for state in change.senders.values():
            self.last_received_ns = max(self.last_received_ns, state.last_received_ns)

    def infos(self) -> list[SourceInfo]:
        """Every sender with its newest epoch, most recently heard first."""
        newest: dict[str, tuple[Key, SenderState]] = {}
        for key, state in list(self.senders.items()):
            held = newest.get(key[0])
            if held is None or state.last_received_ns >= held[1].last_received_ns:
                newest[key[0]] = (key, state)
        ordered = sorted(newest.values(), key=lambda pair: -pair[1].last_received_ns)
        return [self._info(key, state) for key, state in ordered]

    def _info(self, key: Key, state: SenderState) -> SourceInfo:
        ranges = self.ranges.get(key, SeqRanges())
        return SourceInfo(
            source=key[0],
            epoch=key[1],
            last_seq=ranges.last,
            missing=ranges.missing(),
            last_received_ns=state.last_received_ns,
            clock_offset_s=state.clock_offset_s,
            clock_error_s=state.clock_error_s,
        )

    def _write_ranges(self, cursor: duckdb.DuckDBPyConnection, key: Key, ranges: SeqRanges) -> None:
        """Bring the rows of one sender from the mirror's ranges to `ranges`, touching what differs."""
        old = dict(self.ranges.get(key, ()))
        new = dict(ranges)
        for first in old.keys() - new.keys():
            cursor.execute("DELETE FROM batch_range WHERE source = ? AND epoch = ? AND first_seq = ?", [*key, first])
        for first, last in new.items():
            if first not in old:
                cursor.execute("INSERT INTO batch_range VALUES (?, ?, ?, ?)", [*key, first, last])
            elif old[first] != last:
                cursor.execute(
                    "UPDATE batch_range SET last_seq = ? WHERE source = ? AND epoch = ? AND first_seq = ?",
                    [last, *key, first],
                )


def _write_sender(cursor: duckdb.DuckDBPyConnection, key: Key, state: SenderState, *, is_new: bool) -> None:
    facts = [state.last_received_ns, state.num_batches, state.num_rows, state.clock_offset_s, state.clock_error_s]
    if is_new:
        cursor.execute("INSERT INTO source VALUES (?, ?, ?, ?, ?, ?, ?, ?)", [*key, state.first_received_ns, *facts])
    else:
        cursor.execute(
            "UPDATE source SET last_received_ns = ?, num_batches = ?, num_rows = ?, clock_offset_s = ?, clock_error_s = ? "
            "WHERE source = ? AND epoch = ?",
            [*facts, *key],
        )


def _fetch(cursor: duckdb.DuckDBPyConnection, statement: Any) -> Iterable[tuple[Any, ...]]:
    sql, values = render(statement)
    return cursor.execute(sql, values).fetchall()
