"""Retention: the oldest live rows and Parquet files go when they are too old or take too much room. Runs stay.

Invariant: rows of a named run are never touched (only `drop_run` removes them), rows that are not sealed yet are not
deleted where sealing is wanted, and the books count what went, so `verify` can still add up. Age counts from when we
received a row. Deleting is done in slices between commits, so senders wait for milliseconds and not for the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from engine_probe.errors import DiskFull, StoreMisuse
from engine_probe.events import KINDS
from store.interface import KEY_EPOCH
from store.upkeep.deletion import Progress, delete_files, delete_rows, delete_through, forget_run
from store.upkeep.seal import SealReport, parquet_bytes, seal

if TYPE_CHECKING:
    from store.duckdb_store import DuckDBStore

log = logging.getLogger(__name__)

_ROUNDS: Final = 12
_MOST_IN_VAIN: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """How long and how much is kept. None: no limit of that sort.

    seal_after_s        rows older than this are sealed into Parquet; None: no sealing, and rows are deleted unsealed
    seal_min_rows       fewer such rows of a kind wait for more, an hour at most, so that files are few
    max_age_s           age of live rows in the database
    max_bytes           bytes of data in the database (the file does not shrink, its free room is used again)
    parquet_max_age_s   age of sealed files of live rows
    disk_budget_bytes   database and Parquet together; when runs alone exceed it, batches are refused with DiskFull
    key_age_s           idempotency keys are forgotten so long after their batch; a sender's numbers never are
    """

    seal_after_s: float | None = 300.0
    seal_min_rows: int = 0
    max_age_s: float | None = 48 * 3600.0
    max_bytes: int | None = 50_000_000_000
    parquet_max_age_s: float | None = 14 * 86400.0
    disk_budget_bytes: int | None = None
    key_age_s: float | None = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What retention removed, and what is left (bytes of data in the database, bytes of Parquet)."""

    rows: Mapping[str, int] = field(default_factory=dict)
    num_files: int = 0
    database_bytes: int = 0
    parquet_bytes: int = 0
    sealed: SealReport = field(default_factory=SealReport)
    over_budget: bool = False


def prune(store: DuckDBStore, policy: RetentionPolicy, progress: Progress | None = None) -> PruneReport:
    """Apply the policy once: seal, delete what is too old, then what is too much, then checkpoint."""
    tell = progress or (lambda _: None)
    now_ns = store.now_ns()
    sealed = SealReport()
    can_seal = policy.seal_after_s is not None and store.parquet_dir is not None
    if can_seal and policy.seal_after_s is not None:
        sealed = seal(store, older_than_s=policy.seal_after_s, min_rows=policy.seal_min_rows, progress=progress)
    with store.upkeep:
        removed: dict[str, int] = {}
        num_files = 0
        if policy.key_age_s is not None:
            old_ns = now_ns - round(policy.key_age_s * 1e9)
            store.call(lambda cursor: store.books.forget(cursor, KEY_EPOCH, old_ns))
        if policy.max_age_s is not None:
            delete_through(store, now_ns - round(policy.max_age_s * 1e9), removed, tell, only_sealed=can_seal)
        if policy.parquet_max_age_s is not None:
            num_files += _delete_old_files(store, now_ns - round(policy.parquet_max_age_s * 1e9), tell)
        if removed:
            store.checkpoint()
        if policy.max_bytes is not None:
            _shrink(store, policy.max_bytes, removed, tell, only_sealed=can_seal)
        over = False
        if policy.disk_budget_bytes is not None:
            num_files += _shrink_files(store, policy.disk_budget_bytes, tell)
            room = policy.disk_budget_bytes - _parquet_bytes(store)
            _shrink(store, max(0, room), removed, tell, only_sealed=False)
            over = _enforce_budget(store, policy.disk_budget_bytes)
        return PruneReport(removed, num_files, store.data_bytes(), _parquet_bytes(store), sealed, over)


def drop_run(store: DuckDBStore, run_id: str, progress: Progress | None = None) -> PruneReport:
    """Delete one imported run: its rows and its sealed files. StoreMisuse where there is no such run."""
    if run_id not in store.runs():
        known = ", ".join(store.runs()) or "none"
        raise StoreMisuse(f"There is no run {run_id!r} in {store.url}. The runs are: {known}.", run_id=run_id)
    tell = progress or (lambda _: None)
    with store.upkeep:
        removed: dict[str, int] = {}
        for kind in KINDS:
            count = store.call(partial(delete_rows, store, kind, "run_id = ?", [run_id]))
            if count:
                removed[kind] = count
                tell(f"deleted {count} {kind} rows of {run_id}")
        store.call(partial(forget_run, store, run_id))
        num_files = delete_files(store, "run_id = ?", [run_id])
        store.checkpoint()
        return PruneReport(removed, num_files, store.data_bytes(), _parquet_bytes(store))


def _shrink(store: DuckDBStore, max_bytes: int, removed: dict[str, int], tell: Progress, *, only_sealed: bool) -> None:
    """Delete the oldest live rows until the database holds at most `max_bytes`, or deleting frees nothing now."""
    if store.data_bytes() > max_bytes:
        store.checkpoint()
    num_vain = 0
    for _ in range(_ROUNDS):
        used = store.data_bytes()
        if used <= max_bytes:
            return
        share = min(1.0, 1.0 - 0.95 * max_bytes / used)
        edge = _edge_of_oldest(store, share)
        if edge is None:
            return
        before = sum(removed.values())
        delete_through(store, edge, removed, tell, only_sealed=only_sealed)
        if sum(removed.values()) == before:
            return
        store.checkpoint()
        # DuckDB frees whole row groups (122,880 rows), so a round may gain nothing; deleting on in vain would only cost
        # rows, and the next pass goes on anyway.
        num_vain = num_vain + 1 if store.data_bytes() >= used else 0
        if num_vain == _MOST_IN_VAIN:
            return


def _edge_of_oldest(store: DuckDBStore, share: float) -> int | None:
    """Instant up to which the oldest `share` of the live rows came; None where there is none."""
    union = " UNION ALL ".join(f'SELECT received_ns FROM "{kind}" WHERE run_id IS NULL' for kind in KINDS)
    row = store.query(
        f"SELECT approx_quantile(received_ns, {share!r}) AS edge, max(received_ns) AS newest FROM ({union})"
    ).to_pylist()[0]
    if row["newest"] is None:
        return None
    return int(row["newest"]) if share >= 1.0 else int(row["edge"])


def _delete_old_files(store: DuckDBStore, before_ns: int, tell: Progress) -> int:
    count = delete_files(store, "run_id IS NULL AND through_ns < ?", [before_ns])
    if count:
        tell(f"deleted {count} Parquet files")
    return count


def _shrink_files(store: DuckDBStore, budget_bytes: int, tell: Progress) -> int:
    """Delete the oldest sealed files of live rows that the database does not hold any more, while over the budget."""
    excess = store.data_bytes() + _parquet_bytes(store) - budget_bytes
    if excess <= 0:
        return 0
    files = store.query(
        "SELECT path, num_bytes FROM seal_log WHERE run_id IS NULL AND sealed_ns IS NOT NULL ORDER BY seal_id, path"
    ).to_pylist()
    count = 0
    for file in files:
        if excess <= 0:
            break
        count += delete_files(store, "path = ?", [file["path"]])
        excess -= file["num_bytes"]
    if count:
        tell(f"deleted {count} Parquet files over the disk budget")
    return count


def _enforce_budget(store: DuckDBStore, budget_bytes: int) -> bool:
    """Refuse batches while what may not be deleted exceeds the budget; take them again once it does not."""
    used = store.data_bytes() + _parquet_bytes(store)
    over = used > budget_bytes
    store.refuse_batches(
        DiskFull(
            f"The disk budget of {budget_bytes / 1e9:.1f} GB is used up by what retention may not delete "
            f"({used / 1e9:.1f} GB in {store.url}). Raise the budget, or drop a run: `kvscope store prune --run NAME`.",
            url=store.url,
            used_bytes=used,
            budget_bytes=budget_bytes,
        )
        if over
        else None
    )
    return over


def _parquet_bytes(store: DuckDBStore) -> int:
    with store.reading() as cursor:
        return parquet_bytes(cursor)
