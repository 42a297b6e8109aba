"""Prompt blocks that were missed although they had been stored before: store/evidence/lost_blocks.py, store/evidence/key_index.py,
diagnosis/loading/lineage.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.facts import Facts
from diagnosis.loading.load import load
from engine_probe.schema import table_from_rows
from store.evidence.key_index import KeyIndex
from store.evidence.lost_blocks import evictions_of, stored_twice
from store.interface import Batch, Store, Window
from store.open import open_store

T0 = 1_780_000_000_000_000_000
NS = 1_000_000_000
WINDOW = Window(T0, T0 + 100 * NS)
Rows = list[dict[str, Any]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "store.duckdb")) as opened:
        yield opened


def asked(request_id: str, at_s: float, blocks: list[int] | None, **more: Any) -> dict[str, Any]:
    """A request that names its prompt blocks of 16 tokens, and found none of them unless told."""
    arrival = T0 + round(at_s * NS)
    known = {"prompt_tokens": 16 * len(blocks or []), "cached_tokens": 0, "worker": "w0"}
    instants = {"at_ns": arrival + NS, "arrival_ns": arrival, "first_token_ns": arrival + NS // 2}
    named = {"request_id": request_id, "vantage": "engine", "state": "finished", "prompt_blocks": blocks}
    return {**named, **instants, **known, **more}


def happened(*events: tuple[float, str, int], **more: Any) -> Rows:
    """Block events: (s, change, block)."""
    return [
        {
            "at_ns": T0 + round(at_s * NS),
            "change": change,
            "block_hash": block,
            "worker": "w0",
            "num_tokens": 16,
            **more,
        }
        for at_s, change, block in events
    ]


def put(store: Store, requests: Rows, blocks: Rows) -> None:
    workers = [{"worker": name, "at_ns": T0 - 1, "block_size": 16, "num_blocks": 100} for name in ("w0", "w1")]
    kinds = {"request": requests, "block": blocks, "worker": workers}
    store.append(Batch({kind: table_from_rows(kind, rows) for kind, rows in kinds.items()}))


def told(store: Store, requests: Rows, blocks: Rows) -> Facts:
    put(store, requests, blocks)
    return load(store, WINDOW, "suspect", "engine")


def tokens(facts: Facts) -> tuple[list[float], list[float], list[float]]:
    """(evicted, new, cleared) tokens of each request in arrival order."""
    assert facts.lineage is not None
    found = facts.lineage
    return found.evicted_tokens.tolist(), found.new_tokens.tolist(), found.cleared_tokens.tolist()


def test_each_attempt_of_a_request_counts_for_itself(store: Store) -> None:
    """Both attempts ask for block 7. It was first stored at 1 s, after the first attempt (0 s) and before the second (5 s): new
    to the one, evicted (at 3 s) and computed again (at 6 s) by the other. Block 8 is the second's alone, and new.
    """
    facts = told(
        store,
        [asked("a", 0.0, [7], attempt=0), asked("a", 5.0, [7, 8], attempt=1)],
        happened((1.0, "stored", 7), (3.0, "evicted", 7), (6.0, "stored", 7), (6.1, "stored", 8)),
    )
    assert tokens(facts) == ([0.0, 16.0], [16.0, 16.0], [0.0, 0.0])
    assert facts.lineage is not None
    assert facts.lineage.evicted_blocks == 1
    assert facts.lineage.worst == [
        {"block_hash": 7, "worker": "w0", "times": 1, "request_ids": ["a"], "back_after_s": 2.0}
    ]


def test_blocks_of_the_prefix_that_was_found_are_not_missed(store: Store) -> None:
    """Of four blocks two were found (32 tokens cached); of the two missed ones block 3 had been stored, block 4 had not."""
    events = happened(
        *((1.0, "stored", b) for b in (1, 2, 3)), (2.0, "evicted", 3), (6.0, "stored", 3), (6.0, "stored", 4)
    )
    facts = told(store, [asked("a", 5.0, [1, 2, 3, 4], cached_tokens=32)], events)
    assert tokens(facts) == ([16.0], [16.0], [0.0])


def test_a_block_counts_only_on_the_worker_that_had_it(store: Store) -> None:
    """Block 7 was stored twice on w0. The request on w1 misses it for the first time; the one on w0 lost it."""
    facts = told(
        store,
        [asked("a", 5.0, [7], worker="w0"), asked("b", 5.5, [7], worker="w1")],
        [
            *happened((1.0, "stored", 7), (3.0, "evicted", 7), (6.0, "stored", 7), worker="w0"),
            *happened((6.0, "stored", 7), worker="w1"),
        ],
    )
    assert tokens(facts)[0] == [16.0, 0.0]


def test_where_no_row_names_its_worker_a_block_counts_everywhere(store: Store) -> None:
    """The same, told without workers: both lost it."""
    facts = told(
        store,
        [asked("a", 5.0, [7], worker=None), asked("b", 5.5, [7], worker="w1")],
        happened((1.0, "stored", 7), (3.0, "evicted", 7), (6.0, "stored", 7), (6.0, "stored", 7)),
    )
    assert tokens(facts)[0] == [16.0, 16.0]
    assert facts.lineage is not None
    assert [row["worker"] for row in facts.lineage.worst] == [""]


def test_what_a_reset_took_is_not_put_down_to_eviction(store: Store) -> None:
    """The cache was cleared at 4 s; who misses at 5 s lost it to the reset, who misses at 70 s to an eviction."""
    events = [
        *happened((1.0, "stored", 7), (5.5, "stored", 7), (69.0, "evicted", 7), (71.0, "stored", 7)),
        *happened((4.0, "cleared", 0)),
    ]
    facts = told(store, [asked("a", 5.0, [7]), asked("b", 70.0, [7])], events)
    assert tokens(facts) == ([0.0, 16.0], [0.0, 0.0], [16.0, 0.0])


def test_blocks_of_another_tier_were_never_in_this_cache(store: Store) -> None:
    """Stored twice on the host, never on the device: nothing was lost, and its evictions there are none of ours."""
    events = [
        *happened((1.0, "stored", 7), (3.0, "evicted", 7), (6.0, "stored", 7), tier="host"),
        *happened((6.0, "stored", 7)),
    ]
    facts = told(store, [asked("a", 5.0, [7])], events)
    assert tokens(facts)[0] == [0.0]
    assert evictions_of(store, WINDOW, [7]).num_rows == 0


def test_requests_that_do_not_say_what_they_asked_for_lose_nothing(store: Store) -> None:
    """One has no blocks, one does not know what it found, one asked for nothing; the last tells all."""
    facts = told(
        store,
        [
            asked("a", 5.0, None),
            asked("b", 5.1, [7], cached_tokens=None),
            asked("c", 5.2, []),
            asked("d", 5.3, [7, 7]),
        ],
        happened((1.0, "stored", 7), (3.0, "evicted", 7), (6.0, "stored", 7)),
    )
    assert tokens(facts)[0] == [0.0, 0.0, 0.0, 32.0]


def test_nothing_stored_twice_is_nothing_lost(store: Store) -> None:
    """Each block was stored once."""
    facts = told(store, [asked("a", 5.0, [7, 8])], happened((1.0, "stored", 7), (6.0, "stored", 8)))
    assert tokens(facts) == ([0.0], [32.0], [0.0])
    assert facts.lineage is not None
    assert facts.lineage.worst == []


def test_the_hour_before_the_window_counts_and_its_future_does_not(store: Store) -> None:
    """7 was stored an hour before the window and again in it, 8 a second too early; what is stored after the end is not looked at."""
    long_ago = happened((-3600.0, "stored", 7), (-3601.0, "stored", 8), (-3601.0, "evicted", 7))
    put(
        store,
        [asked("a", 5.0, [7, 8])],
        [*long_ago, *happened((6.0, "stored", 7), (6.0, "stored", 8), (200.0, "stored", 9))],
    )
    found = stored_twice(store, WINDOW, by_worker=False)
    assert found.index.keys.tolist() == [7]
    assert found.first_ns.tolist() == [T0 - 3600 * NS]
    assert evictions_of(store, WINDOW, [7]).num_rows == 0
    assert tokens(load(store, WINDOW, "suspect", "engine")) == ([16.0], [16.0], [0.0])


def test_of_a_run_all_there_is_counts(store: Store) -> None:
    """A run without an end or a beginning is read whole, whatever lies hours apart in it."""
    blocks = happened((-9000.0, "stored", 7), (-8000.0, "evicted", 7), (6.0, "stored", 7), run_id="exp")
    put(store, [asked("a", 5.0, [7], run_id="exp")], blocks)
    assert stored_twice(store, Window(run_id="exp"), by_worker=False).first_ns.tolist() == [T0 - 9000 * NS]


@pytest.mark.parametrize("num_keys", [0, 1, 50, 20_000, 500_000])
def test_keys_are_found_whether_they_share_a_slot_or_not(num_keys: int) -> None:
    """Every key that is there and none that is not; many keys in 2^22 slots share some. 0 is a key like any other."""
    rng = np.random.default_rng(num_keys)
    there = np.unique(rng.integers(0, 1 << 40, num_keys, dtype=np.uint64) << np.uint64(20))
    there = np.union1d(there, np.zeros(int(num_keys > 1), dtype=np.uint64))
    others = np.concatenate([there + np.uint64(1), rng.integers(0, 1 << 63, 1000, dtype=np.uint64)])
    keys = rng.permutation(np.concatenate([there, others]))
    rows, place = KeyIndex(there).find(keys)
    assert rows.tolist() == np.flatnonzero(np.isin(keys, there)).tolist()
    assert (there[place] == keys[rows]).all()
