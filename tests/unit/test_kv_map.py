"""The KV map, lineage of one request, runs beside each other and what is seen, on a few rows worked by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collector.reading.kv_map import COLUMNS, kv_map, slots_of
from collector.reading.request_lineage import NEVER, lineage_of
from collector.reading.request_queries import get_request
from collector.reading.runs import runs
from collector.reading.what_is_seen import what_is_seen
from store.interface import Store, Window
from store.open import open_store
from tests.store_rows import START_NS, S, batch, request

WINDOW = Window(START_NS, START_NS + 240 * S)
"""A column of the map is a second."""


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(":memory:") as opened:
        yield opened


def block(change: str, at_s: float, block_hash: int, request_id: str | None = "a", **facts: Any) -> dict[str, Any]:
    row = {"worker": "w0", "at_ns": START_NS + round(at_s * S), "change": change, "block_hash": block_hash}
    return row | {"request_id": request_id, "tier": "device"} | facts


def served(name: str, at_s: float, until_s: float, **facts: Any) -> dict[str, Any]:
    return request(name, at_s, vantage="engine", worker="w0", end_ns=START_NS + round(until_s * S)) | facts


def row_of(cells: list[list[int]], slot: int) -> list[tuple[int, int, int]]:
    """Stretches of a slot: (value, first column, columns)."""
    values = np.array(cells[slot])
    edges = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
    ends = np.append(edges[1:], values.size)
    return [(int(values[a]), int(a), int(b - a)) for a, b in zip(edges, ends, strict=True)]


def test_lives_of_blocks_are_bars_in_the_colour_of_their_tenant(store: Store) -> None:
    """Block 1 of tenant x lies from 10 to 100 s, block 2 of y from 20 s on, block 3 of x from 150 s in the slot that 1 left."""
    rows = [served("a", 9, 30, tenant="x"), served("b", 19, 60, tenant="y"), served("c", 149, 160, tenant="x")]
    events = [
        block("stored", 10, 1),
        block("stored", 20, 2, "b"),
        block("evicted", 100, 1, "z"),
        block("stored", 150, 3, "c"),
    ]
    store.append(batch({"request": rows, "block": events}))
    found = kv_map(store, "w0", WINDOW, "tenant")
    assert found["legend"] == ["x", "y"]
    assert row_of(found["cells"], 0) == [(-1, 0, 10), (0, 10, 90), (-1, 100, 50), (0, 150, 90)]
    assert row_of(found["cells"], 1) == [(-1, 0, 20), (1, 20, 220)]
    assert (found["blocks_drawn"], found["drawn_share"], len(found["at_ns"])) == (2, 1.0, COLUMNS)


def test_state_says_when_a_request_used_a_block(store: Store) -> None:
    """Stored for a, who ends at 30 s; hit by b from 50 to 60 s; cached in between; cleared at 200 s with all others."""
    events = [
        block("stored", 10, 1),
        block("hit", 50, 1, "b", idle_s=20.0),
        {"worker": "w0", "at_ns": START_NS + 200 * S, "change": "cleared", "tier": "device"},
    ]
    store.append(batch({"request": [served("a", 9, 30), served("b", 49, 60)], "block": events}))
    found = kv_map(store, "w0", WINDOW, "state")
    assert found["legend"] == ["cached, unused", "in use"]
    assert row_of(found["cells"], 0) == [
        (-1, 0, 10),
        (1, 10, 20),
        (0, 30, 20),
        (1, 50, 10),
        (0, 60, 140),
        (-1, 200, 40),
    ]
    assert found["gaps"] == {"hit": [20.0] * 21, "evicted": None}


def test_block_that_was_there_before_the_window_is_drawn_from_its_start(store: Store) -> None:
    """Stored ten seconds before; whose it was is not told."""
    store.append(batch({"block": [block("stored", -10, 1, None), block("hit", 5, 1, None)]}))
    found = kv_map(store, "w0", WINDOW, "prefix")
    assert (found["legend"], row_of(found["cells"], 0)) == (["not told"], [(0, 0, 240)])


def test_worker_that_told_no_blocks_has_no_cells(store: Store) -> None:
    """Which a page can say; and no legend is made up."""
    found = kv_map(store, "w9", WINDOW, "tenant")
    assert (found["cells"], found["legend"], found["blocks_drawn"]) == ([], [], 0)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=1, max_size=60))
def test_no_two_lives_share_a_slot_at_a_time(lives: list[tuple[int, int]]) -> None:
    """And there are as many slots as blocks lay there at once."""
    start = np.array(sorted(begin for begin, _ in lives))
    end = start + np.array([length for _, length in lives])
    slots = slots_of(start, end)
    for moment in range(160):
        there = slots[(start <= moment) & (moment < end)]
        assert np.unique(there).size == there.size
    most = max(int(((start <= moment) & (moment < end)).sum()) for moment in range(160))
    assert slots.max() + 1 == most


def test_missed_blocks_say_when_and_for_whom_they_went(store: Store) -> None:
    """Four blocks of 16: the first was found, the second and third evicted for z 30 s before, the last never stored."""
    asked = served("a", 100, 130, cached_tokens=16, prompt_tokens=70, prompt_blocks=[1, 2, 3, 4])
    events = [block("stored", 10, n, "y") for n in (1, 2, 3)]
    events += [block("evicted", 70, n, "z", idle_s=60.0, reason="capacity") for n in (2, 3)]
    events += [block("stored", 120, n, "a") for n in (2, 3, 4)]  # after it came: no answer to what it missed
    facts = {"worker": "w0", "at_ns": START_NS, "block_size": 16}
    store.append(batch({"request": [asked], "block": events, "worker": [facts]}))
    gone, new = lineage_of(store, get_request(store, "a", None)["rows"])
    assert (gone["first_block"], gone["num_blocks"], gone["fate"]) == (1, 2, "evicted")
    assert (gone["caused_by"], gone["before_s"], gone["idle_s"], gone["reason"]) == ("z", 30.0, 60.0, "capacity")
    assert (new["first_block"], new["num_blocks"], new["fate"], new["at_ns"]) == (3, 1, NEVER, None)


def test_lineage_of_an_engine_that_tells_no_block_size_is_empty(store: Store) -> None:
    """How many blocks it found cannot be known then."""
    store.append(batch({"request": [served("a", 0, 1, cached_tokens=16, prompt_blocks=[1, 2])]}))
    assert lineage_of(store, get_request(store, "a", None)["rows"]) == []


def test_runs_stand_beside_each_other_by_the_clients_clock_where_it_has_one(store: Store) -> None:
    """Nearest rank of 1, 2, 3, 4 s: P50 is 2 s, P95 and P99 4 s; engine rows of the same calls do not count twice."""
    rows = [
        request(f"r{n}", n, run_id="A", first_token_ns=START_NS + 2 * n * S, prompt_tokens=10) for n in (1, 2, 3, 4)
    ]
    rows += [served(f"r{n}", n, n + 1, run_id="A", first_token_ns=START_NS + n * S) for n in (1, 2, 3, 4)]
    rows += [served("q", 1, 2, run_id="B", prompt_tokens=100, cached_tokens=25), request("live", 0)]
    store.append(batch({"request": rows}))
    found = {run["run_id"]: run for run in runs(store)["runs"]}
    assert set(found) == {"A", "B"}
    assert [found["A"][f"ttft_p{q}_s"] for q in ("50", "95", "99")] == [2.0, 4.0, 4.0]
    assert (found["A"]["vantage"], found["A"]["requests"], found["A"]["token_hit_rate"]) == ("client", 4, None)
    assert (found["B"]["vantage"], found["B"]["token_hit_rate"], found["B"]["ttft_p99_s"]) == ("engine", 0.25, None)


def test_sight_names_what_a_cause_lacks(store: Store) -> None:
    """Steps that tell waiting_on.budget allow chunk_budget; nobody told transfers."""
    rows = {
        "request": [served("a", 0, 1, first_token_ns=START_NS + S, queue_s=0.5)],
        "step": [{"worker": "w0", "step": 1, "at_ns": START_NS, "waiting_on": {"budget": 2}}],
        "route": [
            {"request_id": "a", "chosen": "w0", "at_ns": START_NS, "candidates": [{"worker": "w0", "score": 1.0}]}
        ],
    }
    store.append(batch(rows))
    found = what_is_seen(store, Window())
    causes = {one["cause"]: one["lacks"] for one in found["causes"]}
    assert found["metrics"] == ["ttft"]
    assert causes["chunk_budget"] == []
    assert causes["transfer_wire"] == ["transfer.wire_s"]
    told = {kind["kind"]: {c["name"]: c["told"] for c in kind["columns"]} for kind in found["kinds"]}
    assert (told["request"]["queue_s"], told["request"]["tenant"], told["transfer"]["wire_s"]) == (1.0, 0.0, None)
