"""What a store promises, whatever lies below it: one DuckDB file today, a lake (DuckLake on PostgreSQL) as the second.

Invariant: a batch is applied once. Its identity (source, epoch, seq) is committed together with its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class BatchId:
    """Who sent it (`source`), under which random id of the sender's spool (`epoch`), as which number (`seq` >= 0)."""

    source: str
    epoch: str
    seq: int


KEY_EPOCH: Final = "idempotency-key:"
"""Begin of an epoch that stands for one key of a sender without a spool. Such identities are forgotten after a while."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one or more kinds that become visible together.

    tables    kind -> Arrow table that conforms to `engine_probe.schema.arrow_schema(kind)`
    identity  None: at least once (the sender gave no identity)
    sent_ns   the sender's clock when it sent, for the clock offset of the source
    """

    tables: Mapping[str, pa.Table]
    identity: BatchId | None = None
    source: str = "anonymous"
    sent_ns: int | None = None
    received_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """Answer to an append: rows accepted by kind, or `duplicate` when the batch had been applied before."""

    accepted: Mapping[str, int]
    duplicate: bool
    received_ns: int


@dataclass(frozen=True, slots=True)
class Window:
    """Which rows a question is about.

    `run_id` None means live rows (those of no run); a name means the rows of that run. `start_ns`/`end_ns` bound the
    half-open interval [start_ns, end_ns); None is open. A request belongs to the window of its **arrival**, every
    other kind to the window of its `at_ns`.
    """

    start_ns: int | None = None
    end_ns: int | None = None
    run_id: str | None = None

    def __str__(self) -> str:
        span = "" if self.start_ns is None and self.end_ns is None else f"{self.start_ns}/{self.end_ns}"
        if self.run_id is None:
            return span or "all live rows"
        return f"{self.run_id}@{span}" if span else self.run_id


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """A sender as the store knows it. Clock offset = its clock minus ours (s), known to within `clock_error_s`."""

    source: str
    epoch: str
    last_seq: int
    missing: Sequence[tuple[int, int]]
    last_received_ns: int
    clock_offset_s: float | None
    clock_error_s: float | None


@dataclass(frozen=True, slots=True)
class Problem:
    """Something `verify` found: where, and what to do about it."""

    where: str
    statement: str


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Size and content of a store."""

    url: str
    bytes: int
    rows: Mapping[str, int]
    oldest_ns: int | None
    newest_ns: int | None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Store(Protocol):
    """The verbs. All are safe to call from several threads; `append` blocks until the batch is on disk."""

    def append(self, batch: Batch, timeout_s: float = 30.0) -> Receipt:
        """Commit a batch. Raises StoreBusy (queue full), DiskFull, BatchRejected."""
        ...

    def rows(
        self,
        kind: str,
        window: Window,
        columns: Sequence[str] | None = None,
        *,
        where: str | None = None,
        params: Sequence[Any] = (),
        order_by: str | None = None,
        limit: int | None = None,
    ) -> pa.Table:
        """Rows of one kind in a window. `where`, `order_by`: our own SQL text, never a user's; `?` takes `params`."""
        ...

    def query(self, sql: str, params: Sequence[Any] = ()) -> pa.Table:
        """Our own SQL over the tables and views, by name of kind. Never a user's text."""
        ...

    def sharing(self) -> AbstractContextManager[None]:
        """Meanwhile the caller reads several things at once, from threads of its own: each read leaves cores to the others."""
        ...

    def runs(self) -> Sequence[str]:
        """Names of the imported runs."""
        ...

    def sources(self) -> Sequence[SourceInfo]:
        """Every sender seen, with its clock."""
        ...

    def stats(self) -> StoreStats:
        """Size and content."""
        ...

    def verify(self) -> Sequence[Problem]:
        """Check the store; an empty list means sound."""
        ...

    def close(self) -> None:
        """Commit what is queued and let go of the file."""
        ...
