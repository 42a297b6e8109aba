"""Exactly-once commits to a DuckLake: the identities of the batches are committed by the catalog itself.

DuckLake has no UNIQUE, one transaction writes to one attached database, and `postgres_execute` is another transaction.
So the identities travel in the commit's extra info (`CALL lake.set_commit_message`), and a trigger on the catalog's
`ducklake_snapshot_changes` puts them under a primary key **in the transaction of the catalog that makes the snapshot**.
An identity that is there already undoes the whole commit; it is then read again, stripped of what was applied, retried.

Invariant: rows are visible if and only if their batch's identity is in `kvscope_batch`, and an identity is there once.

DuckLake 1.0 (DuckDB 1.5.5) retries a commit whose error text holds "primary key", "unique", "conflict" or "concurrent".
The refusal's own text avoids these words, and identities travel in hexadecimal, since the error quotes the statement.
It quotes the smallest and largest values of columns too, so data may bring such a word in: DuckLake then retries in
vain a few times before it is our turn; nothing is applied twice. Source: `ducklake_transaction.cpp`, RetryOnError.
"""

from __future__ import annotations

import json
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from engine_probe.errors import BatchRejected, StoreBusy, StoreError
from store.interface import Batch, BatchId

if TYPE_CHECKING:
    import duckdb
    import psycopg

PREFIX: Final = "kvscope1:"
"""Begins the extra info of our commits; then hexadecimal JSON {"attempt", "batches": [[source, epoch, seq], ...]}."""

REFUSAL: Final = "kvscope: batches of this commit were applied before"

INSTALL: Final = f"""
CREATE TABLE IF NOT EXISTS kvscope_batch (
    source text NOT NULL,
    epoch text NOT NULL,
    seq bigint NOT NULL,
    snapshot_id bigint NOT NULL,
    attempt text NOT NULL,
    PRIMARY KEY (source, epoch, seq)
);

CREATE OR REPLACE FUNCTION kvscope_apply_batches() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    said jsonb;
    placed bigint;
BEGIN
    said := convert_from(decode(substr(NEW.commit_extra_info, {len(PREFIX) + 1}), 'hex'), 'UTF8')::jsonb;
    INSERT INTO kvscope_batch (source, epoch, seq, snapshot_id, attempt)
        SELECT b ->> 0, b ->> 1, (b ->> 2)::bigint, NEW.snapshot_id, said ->> 'attempt'
        FROM jsonb_array_elements(said -> 'batches') AS b
        ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS placed = ROW_COUNT;
    IF placed < jsonb_array_length(said -> 'batches') THEN
        RAISE EXCEPTION '{REFUSAL}' USING ERRCODE = 'KV001';
    END IF;
    RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER kvscope_apply_batches BEFORE INSERT ON ducklake_snapshot_changes
    FOR EACH ROW WHEN (NEW.commit_extra_info LIKE '{PREFIX}%') EXECUTE FUNCTION kvscope_apply_batches();
"""

_LOCK: Final = 0x6B7673636F7065  # "kvscope"
_WORTH_ANOTHER_TRY = re.compile(
    "conflict|concurrent|unique|primary key|serializ|deadlock|connection|server closed|terminat|timeout|ssl",
    re.IGNORECASE,
)


def install(catalog: psycopg.Connection[Any]) -> None:
    """Make the table of identities and the trigger in a DuckLake catalog (PostgreSQL 14 or newer); again: no harm."""
    with catalog.transaction():
        catalog.execute(INSTALL)


@contextmanager
def alone(catalog: psycopg.Connection[Any]) -> Iterator[None]:
    """Hold the catalog's lock for making things: collectors that start together take turns."""
    catalog.execute("SELECT pg_advisory_lock(%s)", [_LOCK])
    try:
        yield
    finally:
        catalog.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of the batches of one call.

    applied      positions of the batches whose rows this call made visible
    duplicates   positions of those that were applied before (by anyone, or twice in the call)
    snapshot_id  snapshot of the commit; None where nothing was left to write
    tries        commits attempted
    refused      of these, undone by the trigger because another writer had been faster
    retried      of these, undone for another reason that time heals (a busy catalog, a lost connection)
    """

    applied: tuple[int, ...]
    duplicates: tuple[int, ...]
    snapshot_id: int | None
    tries: int
    refused: int
    retried: int


@dataclass(slots=True)
class LakeCommitter:
    """Commits batches through one DuckDB connection that has the lake attached; not for several threads at once.

    connection   DuckDB connection; `alias` is the attached lake
    catalog      psycopg connection (autocommit) to the same catalog, on which identities are read
    write        called inside the transaction with the batches that are left, to insert their rows
    """

    connection: duckdb.DuckDBPyConnection
    catalog: psycopg.Connection[Any]
    write: Callable[[Sequence[Batch]], None]
    alias: str = "lake"
    author: str = "kvscope"
    jitter: random.Random = field(default_factory=random.Random)

    def commit(self, batches: Sequence[Batch], timeout_s: float = 30.0) -> Committed:
        """Apply each batch exactly once (those without identity at least once), all that are left in one snapshot.

        Raises StoreBusy where the catalog did not take the commit within `timeout_s`; nothing of it was applied then.
        """
        deadline = time.monotonic() + timeout_s
        left, duplicates = _without_repeats(batches)
        tries = refused = retried = 0
        wait_s = 0.005
        while True:
            known = self._applied([batches[i].identity for i in left])
            duplicates += [i for i in left if batches[i].identity in known]
            left = [i for i in left if batches[i].identity not in known]
            if not left:
                return Committed((), tuple(sorted(duplicates)), None, tries, refused, retried)
            tries += 1
            attempt = uuid.uuid4().hex
            error = self._try([batches[i] for i in left], attempt)
            if error is None:
                snapshot = self._snapshot()
                return Committed(tuple(left), tuple(sorted(duplicates)), snapshot, tries, refused, retried)
            if lost_answer := self._snapshot_of(attempt):
                return Committed(tuple(left), tuple(sorted(duplicates)), lost_answer, tries, refused, retried)
            if REFUSAL in str(error):
                refused += 1
                continue
            if not _WORTH_ANOTHER_TRY.search(_reason(error)):
                raise StoreError(f"The lake refused a commit: {_reason(error)}. Nothing of it was kept.") from error
            if time.monotonic() + wait_s > deadline:
                raise StoreBusy(
                    f"The lake's catalog did not take a commit in {timeout_s:g} s ({tries} tries, last: "
                    f"{_reason(error)}). Nothing was kept; send the batches again under the same identities.",
                    retry_after_s=5,
                ) from error
            retried += 1
            time.sleep(wait_s * (0.5 + self.jitter.random()))
            wait_s = min(1.0, wait_s * 2)

    def _try(self, batches: Sequence[Batch], attempt: str) -> Exception | None:
        """One transaction; the error that undid it, or None."""
        import duckdb

        identities = sorted((b.identity.source, b.identity.epoch, b.identity.seq) for b in batches if b.identity)
        try:
            self.connection.execute("BEGIN")
            try:
                if identities:
                    said = json.dumps({"attempt": attempt, "batches": identities}).encode().hex()
                    self.connection.execute(
                        f"CALL {self.alias}.set_commit_message(?, ?, extra_info => ?)",
                        [self.author, f"{len(batches)} batches", PREFIX + said],
                    )
                self.write(batches)
                self.connection.execute("COMMIT")
            except BaseException:
                self._undo()
                raise
        except duckdb.Error as error:
            return error
        return None

    def _undo(self) -> None:
        """Leave the transaction; a failed COMMIT has left it already."""
        import duckdb

        with suppress(duckdb.TransactionException):
            self.connection.execute("ROLLBACK")

    def _applied(self, identities: Sequence[BatchId | None]) -> Mapping[BatchId, int]:
        """Those of the identities that are applied, with their snapshot."""
        wanted = [i for i in identities if i is not None]
        if not wanted:
            return {}
        rows = self.catalog.execute(
            "SELECT source, epoch, seq, snapshot_id FROM kvscope_batch JOIN "
            "unnest(%s::text[], %s::text[], %s::bigint[]) AS w (source, epoch, seq) USING (source, epoch, seq)",
            [[i.source for i in wanted], [i.epoch for i in wanted], [i.seq for i in wanted]],
        ).fetchall()
        return {BatchId(source, epoch, seq): snapshot for source, epoch, seq, snapshot in rows}

    def _snapshot_of(self, attempt: str) -> int | None:
        """Snapshot that this very attempt made: the commit went through although its answer was lost."""
        row = self.catalog.execute(
            "SELECT snapshot_id FROM kvscope_batch WHERE attempt = %s LIMIT 1", [attempt]
        ).fetchone()
        return int(row[0]) if row else None

    def _snapshot(self) -> int | None:
        row = self.connection.execute(f"FROM ducklake_last_committed_snapshot('{self.alias}')").fetchone()
        return int(row[0]) if row and row[0] is not None else None


def _without_repeats(batches: Sequence[Batch]) -> tuple[list[int], list[int]]:
    """Positions of the batches to apply, and of those whose identity came earlier in the same call."""
    left, repeats, seen = [], [], set()
    for position, batch in enumerate(batches):
        identity = batch.identity
        if identity is not None and "\0" in identity.source + identity.epoch:
            raise BatchRejected(f"The source or epoch {identity.source!r} has a NUL character. Send another one.")
        if identity is not None and identity in seen:
            repeats.append(position)
            continue
        seen.add(identity)
        left.append(position)
    return left, repeats


def _reason(error: Exception) -> str:
    """What PostgreSQL said, without the statement that DuckLake quotes; else the first line."""
    text = str(error).strip()
    said = [match[1] for match in re.finditer(r"(?:^|: )ERROR:\s*(.+)", text, re.MULTILINE)]
    if said:
        return said[-1][:300]
    return (text.splitlines() or [type(error).__name__])[0][:300]
