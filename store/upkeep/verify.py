"""`verify`: does the store keep its promises? Tables, identities, row counts, sealed files, nulls.

Invariant: it only reads; a sound store gives an empty list. Each problem says where it is and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from engine_probe.events import KINDS
from store.books import Books
from store.interface import Problem
from store.migrate import load
from store.tables import STORE_COLUMNS, TABLES
from store.upkeep.deletion import FILES_REMOVED

if TYPE_CHECKING:
    from store.duckdb_store import DuckDBStore


def verify(store: DuckDBStore) -> Sequence[Problem]:
    """Every problem found; an empty list means sound."""
    found = list(_schema(store))
    if found:
        return found
    found += _identities(store)
    found += _counts(store)
    found += _nulls(store)
    found += _runs(store)
    if store.parquet_dir is not None:
        found += _sealed(store, store.parquet_dir)
    return found


def _schema(store: DuckDBStore) -> Iterator[Problem]:
    """Tables have the contract's columns, and the migrations are those of this release."""
    described = store.query(
        "SELECT table_name, list(column_name ORDER BY column_index) AS columns FROM duckdb_columns() "
        "WHERE database_name = current_database() GROUP BY table_name"
    ).to_pylist()
    columns = {row["table_name"]: row["columns"] for row in described}
    for kind in KINDS:
        expected = [column.name for column in KINDS[kind]] + list(STORE_COLUMNS)
        if kind not in columns:
            yield Problem(kind, "the table is missing. Restore a backup, or start afresh and import again.")
        elif columns[kind] != expected:
            differing = sorted(set(expected) ^ set(columns[kind])) or ["their order"]
            yield Problem(
                kind, f"its columns are not the contract's ({', '.join(differing)}). Run `kvscope store migrate`."
            )
    applied = store.query("SELECT number, sha256 FROM schema_migration ORDER BY number").to_pylist()
    if [(row["number"], row["sha256"]) for row in applied] != [(m.number, m.sha256) for m in load()]:
        yield Problem("schema_migration", "the migrations are not those of this release. Reinstall kvscope.")


def _identities(store: DuckDBStore) -> Iterator[Problem]:
    """Ranges of applied batches are disjoint, and what is in memory is what is on disk."""
    overlaps = store.query(
        """
        WITH spans AS (
            SELECT source, epoch, first_seq, last_seq FROM batch_range
            UNION ALL
            SELECT source, epoch, first_seq, last_seq FROM batch_journal WHERE first_seq IS NOT NULL
        ), ordered AS (
            SELECT *, max(last_seq) OVER (
                PARTITION BY source, epoch ORDER BY first_seq, last_seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS before
            FROM spans
        )
        SELECT source, epoch, first_seq, last_seq FROM ordered WHERE first_seq <= before OR first_seq > last_seq
        """
    ).to_pylist()
    for row in overlaps:
        yield Problem(
            "batch_range",
            f"batches {row['first_seq']}..{row['last_seq']} of {row['source']} ({row['epoch']}) are recorded twice, so "
            "rows may be doubled. Compare the rows of that source, and restore a backup if they are.",
        )
    if overlaps:
        return
    if not store.is_read_only and not store.call(lambda cursor: Books.load(cursor).ranges == store.books.ranges):
        yield Problem("batch_range", "what is in memory differs from what is on disk. Restart the process that writes.")


def _counts(store: DuckDBStore) -> Iterator[Problem]:
    """Rows in a table = rows acknowledged - rows removed by retention, in one snapshot."""
    parts = [f"SELECT '{kind}' AS kind, count(*) AS n FROM \"{kind}\"" for kind in KINDS]
    rows = store.query(
        f"""
        WITH entries AS (
            SELECT unnest(map_entries(num_rows)) AS entry FROM batch_journal
            UNION ALL
            SELECT unnest(map_entries(num_rows)) AS entry FROM sender
        ), accepted AS (
            SELECT entry.key AS kind, sum(entry.value) AS n FROM entries GROUP BY ALL
        ), stored AS ({" UNION ALL ".join(parts)})
        SELECT kind, s.n AS stored, coalesce(a.n, 0)::BIGINT AS accepted, k.num_removed AS removed
        FROM stored s LEFT JOIN accepted a USING (kind) LEFT JOIN kind_state k USING (kind)
        """
    ).to_pylist()
    for row in rows:
        if row["removed"] is None:
            yield Problem("kind_state", f"the books of {row['kind']} are missing. Restore a backup.")
        elif row["stored"] != row["accepted"] - row["removed"]:
            yield Problem(
                row["kind"],
                f"{row['stored']} rows are stored, but {row['accepted']} were acknowledged and {row['removed']} "
                "removed by retention. Rows came or went behind the store's back; restore a backup if they matter.",
            )


def _nulls(store: DuckDBStore) -> Iterator[Problem]:
    """Required columns hold no null."""
    for kind, columns in KINDS.items():
        required = [column.name for column in columns if column.required] + list(STORE_COLUMNS)
        counts = ", ".join(f'count(*) - count("{name}") AS "{name}"' for name in required)
        for name, count in store.query(f'SELECT {counts} FROM "{kind}"').to_pylist()[0].items():
            if count:
                yield Problem(f"{kind}.{name}", f"{count} rows have no value in a required column. Restore a backup.")


def _runs(store: DuckDBStore) -> Iterator[Problem]:
    """The list of runs names those that have rows."""
    union = " UNION ".join(f'SELECT DISTINCT run_id FROM "{kind}" WHERE run_id IS NOT NULL' for kind in KINDS)
    rows = store.query(
        f"SELECT r.run_id AS listed, u.run_id AS stored FROM run r FULL JOIN ({union}) u ON r.run_id = u.run_id "
        "WHERE r.run_id IS NULL OR u.run_id IS NULL ORDER BY ALL"
    ).to_pylist()
    for row in rows:
        name = row["listed"] or row["stored"]
        what = "is listed and has no rows" if row["stored"] is None else "has rows and is not listed"
        yield Problem("run", f"the run {name} {what}. Restore a backup, or drop the run and import it again.")


def _sealed(store: DuckDBStore, folder: Path) -> Iterator[Problem]:
    """The seal log and the files agree, and every row received up to the mark is in them."""
    listed = store.query("SELECT * FROM seal_log ORDER BY path").to_pylist()
    for row in listed:
        if row["sealed_ns"] is None:
            continue
        path = folder / row["path"]
        try:
            written = pq.read_metadata(path).num_rows
        except FileNotFoundError:
            yield Problem(
                str(path), "the sealed file is missing; its rows are lost to SQL once retention removed them."
            )
            continue
        except (pa.ArrowException, OSError) as error:
            yield Problem(str(path), f"the sealed file cannot be read ({error}). Restore it from a backup.")
            continue
        if written != row["num_rows"]:
            yield Problem(str(path), f"the sealed file has {written} rows, the log says {row['num_rows']}. Restore it.")
    names = {row["path"] for row in listed}
    for path in sorted(folder.glob("kind=*/**/*.parquet")):
        if str(path.relative_to(folder)) not in names:
            yield Problem(str(path), "the file is not in the seal log, so SQL does not read it. Move it away.")
    yield from _sealed_counts(store)


def _sealed_counts(store: DuckDBStore) -> Iterator[Problem]:
    """No pass of which all files are still there sealed fewer rows than the database holds for its time."""
    removed = store.query("SELECT value FROM setting WHERE name = ?", [FILES_REMOVED]).column(0).to_pylist()
    files_from_ns = int(removed[0]) if removed else -(2**63) + 1
    for kind in TABLES:
        row = store.query(
            f"""
            WITH passes AS (
                SELECT seal_id, any_value(after_ns) AS after_ns, any_value(through_ns) AS through_ns, sum(num_rows) AS n
                FROM seal_log WHERE kind = ? AND sealed_ns IS NOT NULL GROUP BY seal_id
            ), held AS (
                SELECT p.seal_id, p.n::BIGINT AS sealed, (
                    SELECT count(*) FROM "{kind}" r WHERE r.received_ns > p.after_ns AND r.received_ns <= p.through_ns
                ) AS stored
                FROM passes p WHERE p.after_ns >= ?
            )
            SELECT count(*) AS wrong, any_value(sealed) AS sealed, any_value(stored) AS stored
            FROM held WHERE stored > sealed
            """,
            [kind, files_from_ns],
        ).to_pylist()[0]
        if row["wrong"]:
            yield Problem(
                f"seal_log ({kind})",
                f"{row['wrong']} passes sealed fewer rows than the database has for their time ({row['sealed']} "
                f"against {row['stored']}). Rows are missing from Parquet; restore a backup.",
            )
