"""A spool under everything that happens to it: nothing acknowledged is new again, nothing is lost that is not told."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_probe.schema import table_from_rows
from engine_probe.sending.parcels import Parcel, Segment, segment_of
from engine_probe.sending.spool import Spool
from engine_probe.sending.spool_disk import DiskFiles
from engine_probe.wire.codec import decode_arrow

NOW = 1_764_000_000 * 10**9
KINDS = {
    "sample": {"name": "x", "value": 1.0},
    "block": {"change": "hit"},
    "request": {"request_id": "r", "vantage": "client", "state": "finished", "arrival_ns": NOW},
}


class SpoolMachine(RuleBasedStateMachine):
    """Every row has its own `at_ns`. The collector applies an identity once, as ours does."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(tempfile.mkdtemp())
        self.spool = self.open()
        self.in_flight: list[Parcel] = []
        self.written: dict[int, str] = {}
        self.applied: dict[tuple[str, int], set[int]] = {}
        self.acked: set[tuple[str, int]] = set()
        self.refused: set[int] = set()
        self.told: dict[str, int] = {}

    def open(self) -> Spool:
        return Spool(DiskFiles(self._folder), max_bytes=12_000, source="s", now_ns=lambda: NOW)

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """One batch of one to three kinds."""
        segments: list[Segment] = []
        for kind in data.draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3, unique=True)):
            ids = range(len(self.written), len(self.written) + data.draw(st.integers(1, 5)))
            self.written.update(dict.fromkeys(ids, kind))
            rows = [{"at_ns": NOW + i, **KINDS[kind]} for i in ids]
            segments.append(segment_of(kind, table_from_rows(kind, rows)))
        self.spool.append([segments])

    @precondition(lambda self: len(self.in_flight) < 8)
    @rule()
    def take(self) -> None:
        """A worker takes a batch."""
        parcel = self.spool.take()
        if parcel is not None:
            key = (parcel.key.epoch, parcel.key.seq)
            assert key not in self.acked, "an acknowledged number came back"
            assert parcel.key not in [p.key for p in self.in_flight]
            self.in_flight.append(parcel)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Any batch in flight arrives and is acknowledged: out of order."""
        parcel = self.pick(data)
        self.apply(parcel)
        self.spool.ack(parcel)
        self.acked.add((parcel.key.epoch, parcel.key.seq))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), arrived=st.booleans())
    def fail(self, data: st.DataObject, arrived: bool) -> None:
        """The connection broke, before or after the collector applied it."""
        parcel = self.pick(data)
        if arrived:
            self.apply(parcel)
        self.spool.release(parcel)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        """The collector says that it is too large; then it has not applied it."""
        parcel = self.pick(data)
        key = (parcel.key.epoch, parcel.key.seq)
        if key in self.applied or not self.spool.split(parcel):
            self.spool.release(parcel)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """The collector will never take it."""
        parcel = self.pick(data)
        key = (parcel.key.epoch, parcel.key.seq)
        if key in self.applied or "mark" in decode_arrow(parcel.body).tables:
            self.spool.release(parcel)
            return
        self.refused |= ids_of(parcel)
        self.spool.refuse(parcel, "refused", "no")

    @rule()
    def kill(self) -> None:
        """The process is killed and another one starts on the folder; answers under way are lost."""
        self.spool._files.close()
        self.in_flight.clear()
        self.spool = self.open()

    @invariant()
    def bound_is_kept(self) -> None:
        """What is pending stays below the bound; batches in flight and tales of losses are spared."""
        in_flight = sum(256 + sum(s.info.num_bytes for s in p.segments) for p in self.in_flight)
        assert self.spool.num_bytes <= 12_000 + in_flight + 3_000

    def teardown(self) -> None:
        """Drain: every row was applied once, or is in a told loss."""
        try:
            self.drain_and_judge()
        finally:
            self.spool._files.close()
            shutil.rmtree(self._folder)

    def drain_and_judge(self) -> None:
        for parcel in self.in_flight:
            self.spool.release(parcel)
        while (parcel := self.spool.take()) is not None:
            self.apply(parcel)
            self.spool.ack(parcel)
        arrived = [row for rows in self.applied.values() for row in rows]
        assert len(arrived) == len(set(arrived)), "a row arrived twice"
        missing = set(self.written) - set(arrived)
        assert self.refused <= missing
        for kind in KINDS:
            lost = sum(self.written[row] == kind for row in missing)
            # Told may be more: rows that arrived, whose answer was lost, and that were then dropped.
            assert lost <= self.told.get(kind, 0)
        if not self.told:
            assert not missing

    def pick(self, data: st.DataObject) -> Parcel:
        return self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))

    def apply(self, parcel: Parcel) -> None:
        """What a collector does: once an identity."""
        key = (parcel.key.epoch, parcel.key.seq)
        if key in self.applied:
            return
        self.applied[key] = ids_of(parcel)
        marks = decode_arrow(parcel.body).tables.get("mark")
        for row in marks.to_pylist() if marks is not None else ():
            for name, count in row["attrs"]:
                if name.startswith("dropped_") and name != "dropped_rows":
                    kind = name.removeprefix("dropped_")
                    self.told[kind] = self.told.get(kind, 0) + int(count)


def ids_of(parcel: Parcel) -> set[int]:
    """The rows of a batch, its marks left out."""
    tables = decode_arrow(parcel.body).tables
    return {at - NOW for kind, t in tables.items() if kind != "mark" for at in t.column("at_ns").to_pylist()}


TestSpool = SpoolMachine.TestCase
TestSpool.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
