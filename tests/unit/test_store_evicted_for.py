"""For whom the block was evicted at which a request's chain broke."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine_probe.schema import table_from_rows
from store.evidence.evicted_for import EvictedFor, evicted_for
from store.interface import Batch, Window
from store.open import open_store

T0 = 1_780_000_000_000_000_000
SECOND = 10**9


def request(request_id: str, at_s: int, tenant: str | None, cached: int, blocks: list[int]) -> dict[str, Any]:
    plain = {"request_id": request_id, "vantage": "engine", "state": "finished", "worker": "w0", "run_id": "r"}
    at = T0 + at_s * SECOND
    return plain | {"at_ns": at, "arrival_ns": at, "tenant": tenant, "cached_tokens": cached, "prompt_blocks": blocks}


def evicted(block: int, at_s: int, by: str | None, worker: str = "w0") -> dict[str, Any]:
    at = T0 + at_s * SECOND
    told = {"change": "evicted", "block_hash": block, "worker": worker, "request_id": by}
    return told | {"run_id": "r", "at_ns": at, "tier": "device"}


def asked(requests: list[dict[str, Any]], events: list[dict[str, Any]], *, by_worker: bool = True) -> EvictedFor:
    table = table_from_rows("request", requests)
    with open_store(":memory:") as store:
        store.append(Batch({"request": table, "block": table_from_rows("block", events)}))
        at = np.asarray(table["arrival_ns"]).astype(np.int64)
        return evicted_for(store, Window(run_id="r"), table, at, 16, by_worker=by_worker)


def test_the_last_eviction_before_the_miss_is_the_one_that_is_paid_for() -> None:
    """Block 2 went at 3 s for b and at 5 s for a; at 9 s the chain [1, 2] of which 16 tokens are found breaks at it: a, 4 s before."""
    requests = [
        request("a", 4, "chat", 16, [9]),
        request("b", 2, "batch", 16, [8]),
        request("late", 9, "chat", 16, [1, 2]),
    ]
    found = asked(requests, [evicted(2, 3, "b"), evicted(2, 5, "a"), evicted(2, 12, "b"), evicted(1, 8, "b")])
    assert found.request_id.tolist() == [None, None, "a"]
    assert found.tenant.tolist() == [None, None, "chat"]
    assert found.back_after_s[2] == pytest.approx(4.0)


def test_another_workers_eviction_counts_only_where_workers_are_not_told_apart() -> None:
    """w1 gave up block 2; the request was served by w0."""
    requests = [request("b", 1, "batch", 16, [8]), request("late", 9, "chat", 0, [2])]
    events = [evicted(2, 3, "b", worker="w1")]
    assert asked(requests, events).tenant.tolist() == [None, None]
    assert asked(requests, events, by_worker=False).tenant.tolist() == [None, "batch"]


def test_who_is_not_told_is_nobody() -> None:
    """An eviction without a request, and one whose request names no tenant: the time is known, and nobody is blamed."""
    requests = [request("x", 1, None, 16, [8]), request("one", 9, "chat", 0, [2]), request("two", 9, "chat", 0, [3])]
    found = asked(requests, [evicted(2, 3, None), evicted(3, 4, "x")])
    assert found.tenant.tolist() == [None, None, None]
    assert found.request_id.tolist() == [None, None, "x"]
    assert found.back_after_s[1:].tolist() == pytest.approx([6.0, 5.0])
