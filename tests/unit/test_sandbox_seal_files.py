"""SQL opens every sealed file of a kind, so upkeep once a minute must not make a file a minute."""

from __future__ import annotations

from pathlib import Path

from engine_probe.schema import table_from_rows
from store.duckdb_store import DuckDBStore
from store.interface import Batch
from store.open import open_store
from store.upkeep.retention import RetentionPolicy, prune
from store.upkeep.seal import seal

S = 10**9
MINUTE = 60 * S


class Clock:
    """The store's time, moved by hand."""

    def __init__(self) -> None:
        self.now_ns = 1_764_000_000 * S  # a full hour

    def __call__(self) -> int:
        return self.now_ns


def add(store: DuckDBStore, clock: Clock, num_rows: int) -> None:
    """Marks that came now."""
    rows = [{"mark": "fault", "at_ns": clock.now_ns} for _ in range(num_rows)]
    store.append(Batch({"mark": table_from_rows("mark", rows)}))


def files(path: Path) -> int:
    """Sealed files of the store at `path`."""
    return len(list(path.with_suffix(".parquet").rglob("*.parquet")))


def test_few_rows_wait_an_hour_for_more(tmp_path: Path) -> None:
    """A row a minute and a pass a minute: 65 minutes make files for the hours of the rows, not for the passes."""
    path, clock = tmp_path / "k.duckdb", Clock()
    policy = RetentionPolicy(seal_after_s=300.0, seal_min_rows=1000)
    with open_store(str(path), clock=clock) as store:
        for _ in range(65):
            add(store, clock, 1)
            prune(store, policy)
            clock.now_ns += MINUTE
        assert files(path) == 0
        clock.now_ns += MINUTE
        prune(store, policy)  # the first row came 66 minutes ago: an hour before the five minutes
        # those of minutes 0 to 61 are five minutes old: 0 to 59 lie in one hour, 60 and 61 in the next, 62 to 64 wait
        assert files(path) == 2
        assert sum(len(some) for some in store.sql_data().files.values()) == 2  # type: ignore[union-attr]
        assert store.sql_data().hot["mark"].num_rows == 3


def test_many_rows_are_sealed_at_the_next_pass(tmp_path: Path) -> None:
    """What waits in the database, to be handed to each statement, has a bound."""
    path, clock = tmp_path / "k.duckdb", Clock()
    with open_store(str(path), clock=clock) as store:
        add(store, clock, 999)
        clock.now_ns += 6 * MINUTE
        assert seal(store, older_than_s=300, min_rows=1000).num_files == 0
        add(store, clock, 1)
        clock.now_ns += 6 * MINUTE
        assert seal(store, older_than_s=300, min_rows=1000).rows == {"mark": 1000}
        assert store.sql_data().hot["mark"].num_rows == 0


def test_sealing_by_hand_waits_for_nothing(tmp_path: Path) -> None:
    """`kvscope store export` and friends seal what there is."""
    path, clock = tmp_path / "k.duckdb", Clock()
    with open_store(str(path), clock=clock) as store:
        add(store, clock, 1)
        clock.now_ns += 6 * MINUTE
        assert seal(store).rows == {"mark": 1}
