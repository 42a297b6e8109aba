"""What travels in one request: segments (one Arrow stream a kind) under one identity, and how they are cut.

Invariant: cutting and stripping never change a row, and every segment knows how many rows it has and from when, so
that a loss can be told in rows and in time without decoding anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine_probe.wire.codec import decode_arrow, encode_arrow

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A segment without its bytes. first_ns, last_ns: earliest and latest `at_ns` of its rows."""

    kind: str
    num_rows: int
    num_bytes: int
    first_ns: int
    last_ns: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one kind as one complete Arrow IPC stream."""

    info: SegmentInfo
    body: bytes


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Identity of a batch at the collector, beside its source. Epochs of one spool sort by age."""

    epoch: str
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq:012d}"


@dataclass(frozen=True, slots=True)
class Parcel:
    """One batch taken for sending."""

    key: Key
    segments: tuple[Segment, ...]

    @property
    def body(self) -> bytes:
        """The request's body: the streams one after another."""
        return b"".join(segment.body for segment in self.segments)

    @property
    def num_rows(self) -> int:
        """Rows of all kinds."""
        return sum(segment.info.num_rows for segment in self.segments)


@dataclass(slots=True)
class Gap:
    """Rows that were lost for one reason, until a `mark` tells them.

    rows       kind -> rows lost
    first_seq, last_seq   batches they were in (of `epoch`, the last one touched)
    first_ns, last_ns     time that they covered
    """

    reason: str
    rows: dict[str, int] = field(default_factory=dict)
    epoch: str = ""
    first_seq: int = -1
    last_seq: int = -1
    first_ns: int = 0
    last_ns: int = 0

    def add(self, key: Key, lost: Iterable[SegmentInfo]) -> None:
        """Count segments of one batch as lost."""
        for info in lost:
            self.first_ns = min(self.first_ns, info.first_ns) if self.rows else info.first_ns
            self.last_ns = max(self.last_ns, info.last_ns)
            self.rows[info.kind] = self.rows.get(info.kind, 0) + info.num_rows
        if key.epoch != self.epoch:
            self.epoch, self.first_seq, self.last_seq = key.epoch, key.seq, key.seq
        self.first_seq, self.last_seq = min(self.first_seq, key.seq), max(self.last_seq, key.seq)

    def to_mark(self, source: str, now_ns: int) -> dict[str, Any]:
        """The `mark` row that tells the loss."""
        what = ", ".join(f"{count} {kind}" for kind, count in sorted(self.rows.items())) or "an unknown number of"
        attrs = {
            "reason": self.reason,
            "dropped_rows": str(sum(self.rows.values())),
            "epoch": self.epoch,
            "first_seq": str(self.first_seq),
            "last_seq": str(self.last_seq),
            "from_ns": str(self.first_ns),
            "to_ns": str(self.last_ns),
            **{f"dropped_{kind}": str(count) for kind, count in sorted(self.rows.items())},
        }
        text = f"{source} lost {what} rows ({self.reason.replace('_', ' ')})."
        return {"at_ns": now_ns, "mark": "gap", "subject": source, "text": text, "attrs": attrs}


def pack(tables: Mapping[str, pa.Table], max_bytes: int, compression: str | None) -> list[list[Segment]]:
    """Batches of at most about `max_bytes` each: kinds together where they fit, rows of a large kind apart."""
    batches: list[list[Segment]] = [[]]
    room = max_bytes
    for kind, table in tables.items():
        for segment in _segments(kind, table, max_bytes, compression):
            if batches[-1] and segment.info.num_bytes > room:
                batches.append([])
                room = max_bytes
            batches[-1].append(segment)
            room -= segment.info.num_bytes
    return [batch for batch in batches if batch]


def halve(segments: Sequence[Segment]) -> tuple[list[Segment], list[Segment]] | None:
    """Two batches with the same rows in the same order; None where there is but one row."""
    if len(segments) > 1:
        middle = len(segments) // 2
        return list(segments[:middle]), list(segments[middle:])
    info = segments[0].info
    if info.num_rows < 2:
        return None
    table = decode_arrow(segments[0].body).tables[info.kind]
    middle = info.num_rows // 2
    parts = table.slice(0, middle), table.slice(middle)
    return [segment_of(info.kind, parts[0])], [segment_of(info.kind, parts[1])]


def segment_of(kind: str, table: pa.Table, compression: str | None = "lz4") -> Segment:
    """A table (with rows) as a segment."""
    import pyarrow.compute as pc

    body = encode_arrow({kind: table}, compression)
    bounds = pc.min_max(table.column("at_ns"))
    first, last = bounds["min"].as_py() or 0, bounds["max"].as_py() or 0
    return Segment(SegmentInfo(kind, table.num_rows, len(body), first, last), body)


def mark_segment(rows: Sequence[Mapping[str, Any]]) -> Segment:
    """`mark` rows as a segment."""
    from engine_probe.schema import table_from_rows

    return segment_of("mark", table_from_rows("mark", rows))


def _segments(kind: str, table: pa.Table, max_bytes: int, compression: str | None) -> list[Segment]:
    if table.num_rows == 0:
        return []
    segment = segment_of(kind, table, compression)
    if segment.info.num_bytes <= max_bytes or table.num_rows == 1:
        return [segment]
    num_parts = min(table.num_rows, -(-segment.info.num_bytes // max_bytes))
    size = -(-table.num_rows // num_parts)
    parts = [table.slice(start, size) for start in range(0, table.num_rows, size)]
    return [segment_of(kind, part, compression) for part in parts]
