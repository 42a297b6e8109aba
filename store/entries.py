"""The words of the books: what one commit adds for one sender, and what a sender and a kind add up to."""

from __future__ import annotations

from dataclasses import dataclass, field

from store.statements import literal

Key = tuple[str, str]
"""(source, epoch); the epoch of a sender without identity is empty."""


@dataclass(slots=True)
class SenderState:
    """Totals of one sender and epoch."""

    first_received_ns: int
    last_received_ns: int
    num_batches: int = 0
    num_rows: dict[str, int] = field(default_factory=dict)
    clock_offset_s: float | None = None
    clock_error_s: float | None = None

    def add(self, entry: Entry) -> None:
        """Take in one row of the journal."""
        self.last_received_ns = max(self.last_received_ns, entry.received_ns)
        self.num_batches += entry.num_batches
        for kind, count in entry.num_rows.items():
            self.num_rows[kind] = self.num_rows.get(kind, 0) + count
        if entry.clock_offset_s is not None:
            self.clock_offset_s, self.clock_error_s = entry.clock_offset_s, entry.clock_error_s

    def absorb(self, other: SenderState) -> None:
        """Take over what another one sent."""
        self.first_received_ns = min(self.first_received_ns, other.first_received_ns)
        self.last_received_ns = max(self.last_received_ns, other.last_received_ns)
        self.num_batches += other.num_batches
        for kind, count in other.num_rows.items():
            self.num_rows[kind] = self.num_rows.get(kind, 0) + count


@dataclass(slots=True)
class KindState:
    """What retention and sealing did to one kind."""

    num_removed: int = 0
    sealed_through_ns: int | None = None


@dataclass(slots=True)
class Entry:
    """One row of the journal: batches `first_seq..last_seq` of one sender (none without identity) in one commit."""

    source: str
    epoch: str
    first_seq: int | None
    last_seq: int | None
    received_ns: int
    num_batches: int
    num_rows: dict[str, int]
    clock_offset_s: float | None = None
    clock_error_s: float | None = None

    @property
    def key(self) -> Key:
        """Whose batches they are."""
        return self.source, self.epoch

    def literals(self) -> str:
        """The row as SQL text."""
        counts = ", ".join(f"{literal(kind)}: {count}" for kind, count in self.num_rows.items())
        first, last = ("NULL", "NULL") if self.first_seq is None else (self.first_seq, self.last_seq)
        return (
            f"({literal(self.source)}, {literal(self.epoch)}, {first}, {last}, {self.received_ns}, {self.num_batches}, "
            f"MAP {{{counts}}}, {_double(self.clock_offset_s)}, {_double(self.clock_error_s)})"
        )


def merged(entries: list[Entry]) -> list[Entry]:
    """The entries of one commit with neighbouring batches of a sender made one row."""
    merged: list[Entry] = []
    for entry in sorted(entries, key=lambda e: (e.key, e.first_seq is not None, e.first_seq or 0)):
        before = merged[-1] if merged else None
        if before is None or before.key != entry.key or not _touch(before.last_seq, entry.first_seq):
            merged.append(entry)
            continue
        before.last_seq = entry.last_seq
        before.received_ns = max(before.received_ns, entry.received_ns)
        before.num_batches += entry.num_batches
        for kind, count in entry.num_rows.items():
            before.num_rows[kind] = before.num_rows.get(kind, 0) + count
        if entry.clock_offset_s is not None:
            before.clock_offset_s, before.clock_error_s = entry.clock_offset_s, entry.clock_error_s
    return merged


def _touch(last: int | None, first: int | None) -> bool:
    """Two entries of one sender can be one: both without identity, or the second follows the first."""
    if last is None or first is None:
        return last is None and first is None
    return first == last + 1


def _double(value: float | None) -> str:
    return "NULL" if value is None else f"'{value!r}'::DOUBLE"
