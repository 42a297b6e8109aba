"""What had become of the block at which a request's chain broke, from events in a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from engine_probe.schema import table_from_rows
from store.evidence.chain_breaks import EVICTED, EXPIRED, NEVER, PRESENT, chain_breaks, may_be_split
from store.interface import Batch, Store, Window
from store.open import open_store

RUN = Window(run_id="r")


def happened(at_ns: int, change: str, block: int, worker: str = "w0", reason: str | None = None) -> dict[str, object]:
    row = {"worker": worker, "at_ns": at_ns, "change": change, "block_hash": block, "run_id": "r", "reason": reason}
    return row | {"tier": "device", "num_tokens": 16}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Block 1 is stored at 10; 2 stored at 10 and evicted at 20; 3 stored at 10, expired at 20, stored again at 30; all on w0."""
    with open_store(str(tmp_path / "store.duckdb")) as opened:
        rows = [
            happened(10, "stored", 1),
            happened(10, "stored", 2),
            happened(20, "evicted", 2, reason="capacity"),
            happened(10, "stored", 3),
            happened(20, "evicted", 3, reason="ttl"),
            happened(30, "stored", 3),
        ]
        opened.append(Batch({"block": table_from_rows("block", rows)}))
        yield opened


def asked(*rows: tuple[str | None, int | None, list[int] | None]) -> pa.Table:
    worker, cached, blocks = (list(column) for column in zip(*rows, strict=True))
    return pa.table(
        {
            "worker": pa.array(worker, pa.string()),
            "cached_tokens": pa.array(cached, pa.int64()),
            "prompt_blocks": pa.array(blocks, pa.list_(pa.uint64())),
        }
    )


def broke(
    store: Store, at_ns: int, *rows: tuple[str | None, int | None, list[int] | None], by_worker: bool = True
) -> list[int]:
    table = asked(*rows)
    return chain_breaks(store, RUN, table, np.full(table.num_rows, at_ns), 16, by_worker=by_worker).tolist()


def test_the_last_event_before_the_look_decides(store: Store) -> None:
    """At 25 block 1 is there, 2 was evicted, 3 has expired, 4 was never stored; at 35 block 3 is there again; at 5 nothing is."""
    each = tuple(("w0", 0, [block, 99]) for block in (1, 2, 3, 4))
    assert broke(store, 25, *each) == [PRESENT, EVICTED, EXPIRED, NEVER]
    assert broke(store, 35, *each) == [PRESENT, EVICTED, PRESENT, NEVER]
    assert broke(store, 5, *each) == [NEVER] * 4


def test_only_the_first_missing_block_counts(store: Store) -> None:
    """16 cached tokens of 16 a block: the chain 1, 2, 3 broke at 2; with 32 it broke at 3."""
    assert broke(store, 25, ("w0", 16, [1, 2, 3]), ("w0", 32, [1, 2, 3])) == [EVICTED, EXPIRED]


def test_an_event_of_the_same_instant_counts(store: Store) -> None:
    """Who looks at 20 finds block 2 evicted and block 3 expired."""
    assert broke(store, 20, ("w0", 0, [2]), ("w0", 0, [3])) == [EVICTED, EXPIRED]


def test_a_block_lives_on_its_worker(store: Store) -> None:
    """Block 1 is on w0 alone; where workers are not told apart it is there for all."""
    assert broke(store, 25, ("w1", 0, [1])) == [NEVER]
    assert broke(store, 25, ("w1", 0, [1]), by_worker=False) == [PRESENT]


def test_who_asks_nothing_or_finds_all_misses_nothing(store: Store) -> None:
    """No blocks, no known hit, everything found, no rows at all."""
    assert broke(store, 25, ("w0", 0, None), ("w0", None, [1]), ("w0", 16, [1]), ("w0", 0, [])) == [NEVER] * 4
    empty = asked(("w0", 0, [1])).slice(0, 0)
    assert chain_breaks(store, RUN, empty, np.empty(0, dtype=np.int64), 16, by_worker=True).tolist() == []


def test_it_is_looked_at_only_where_it_can_matter(store: Store, tmp_path: Path) -> None:
    """A block expired; else more lost than were evicted."""
    assert may_be_split(store, RUN, 0.0)
    with open_store(str(tmp_path / "other.duckdb")) as other:
        rows = [happened(at, "evicted", at, reason="capacity") for at in range(1, 101)]
        other.append(Batch({"block": table_from_rows("block", rows)}))
        assert not may_be_split(other, RUN, 100.0)
        assert may_be_split(other, RUN, 101.0)
