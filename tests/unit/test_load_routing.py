"""What each request lost to a hotspot, by hand; and what workers really held, by the life of their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.claims.straggler_reason import is_worse
from diagnosis.facts import HostMeasure
from diagnosis.hotspots.finding import Advice, Hotspot
from diagnosis.hotspots.holders import informed, truly_matched
from diagnosis.hotspots.judge import hotspots
from diagnosis.hotspots.reading import read
from diagnosis.hotspots.wrong_beliefs import wrong_beliefs
from diagnosis.loading.hosts import hosts, unattached
from store.interface import Store, Window
from store.open import open_store
from tests.store_rows import START_NS, S, batch

RUN = Window(run_id="r")
SIZE = 16


def at(seconds: float) -> int:
    return START_NS + round(seconds * S)


def block(worker: str, seconds: float, change: str, block_hash: int | None = None, parent: int | None = None) -> Any:
    told = {"worker": worker, "run_id": "r", "at_ns": at(seconds), "change": change, "block_hash": block_hash}
    return told | {"parent_hash": parent, "num_tokens": SIZE, "tier": "device"}


def decision(name: str, seconds: float, blocks: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A route row to w0 and the row of its request."""
    candidates = [{"worker": worker, "matched_tokens": 0, "load": 0.0} for worker in ("w0", "w1")]
    told = {"request_id": name, "run_id": "r", "at_ns": at(seconds)}
    served = told | {"worker": "w0", "vantage": "engine", "state": "finished", "arrival_ns": at(seconds)}
    served |= {"prompt_tokens": len(blocks) * SIZE, "cached_tokens": 0, "prompt_blocks": blocks}
    return told | {"policy": "any", "chosen": "w0", "candidates": candidates}, served


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """w0 holds blocks 1 to 3 from 1 s, and 3 no more from 5 s; w1 holds 1 from 2 s (loaded), and nothing from 8 s (cleared)."""
    opened = open_store(str(tmp_path_factory.mktemp("routing") / "k.duckdb"))
    made = [decision(f"r{n}", seconds, [1, 2, 3]) for n, seconds in enumerate((0.5, 3.0, 6.0, 9.0))]
    unknown = decision("r9", 9.5, [])
    opened.append(
        batch(
            {
                "route": [route for route, _ in (*made, unknown)],
                "request": [row for _, row in made] + [unknown[1] | {"prompt_blocks": None}],
                "block": [
                    *(block("w0", 1.0, "stored", n, n - 1 or None) for n in (1, 2, 3)),
                    block("w1", 2.0, "loaded", 1),
                    block("w0", 5.0, "evicted", 3),
                    block("w1", 8.0, "cleared"),
                    block("w1", 8.5, "stored", 30, 20),
                    block("w1", 8.6, "stored", 31, 30),
                    block("w1", 8.7, "stored", 40),
                    block("w1", 8.8, "stored", 41, 40),
                ],
                "sample": [
                    {"worker": worker, "run_id": "r", "at_ns": at(second), "name": name, "value": value, "labels": {}}
                    for second in (1, 2, 3)
                    for worker, clock, cpu in (("w0", 1.2e9, 0.13), ("w1", 1.8e9, 0.12), ("w2", 1.7e9, 0.11))
                    for name, value in (("gpu_clock_hertz", clock), ("cpu_util", cpu))
                ],
            }
        )
    )
    yield opened
    opened.close()


def test_a_worker_holds_what_it_stored_and_did_not_lose(store: Store) -> None:
    """Nothing at 0.5 s; three blocks and one at 3 s; two and one at 6 s; two and none at 9 s. Unknown where no prompt is told."""
    seen = read(store, RUN)
    held = truly_matched(store, RUN, seen, np.arange(5), SIZE)
    assert held[:4].tolist() == [[0, 0], [48, 16], [32, 16], [32, 0]]
    assert np.isnan(held[4]).all()


def test_only_what_is_asked_for_is_looked_up(store: Store) -> None:
    """The other decisions stay unknown."""
    held = truly_matched(store, RUN, read(store, RUN), np.array([1]), SIZE)
    assert np.isfinite(held).any(axis=1).tolist() == [False, True, False, False, False]


def spot(cause: str, worker: str | None, start: float, end: float) -> Hotspot:
    subject = {"kind": "fleet" if worker is None else "worker", "id": worker}
    interval = {"start_ns": at(start), "end_ns": at(end)}
    return Hotspot("kind", cause, subject, interval, at(end), 1.0, 1.0, 3, "said", None, (), Advice("do"))


def test_an_index_that_begins_late_drops_chains_whose_begin_it_missed(store: Store) -> None:
    """From 8.2 s on: 30 follows 20, which came before, and 31 follows 30, which was dropped; 40 and 41 are attached."""
    found = unattached(store, RUN, [spot("hotspot_stale_index", None, 8.2, 10.0)])
    assert found is not None
    assert (found.num_orphans, found.num_stored) == (2, 4)


def test_a_straggler_is_measured_beside_the_median_of_the_others(store: Store) -> None:
    """Its clock is 1.2 GHz where the others' median is 1.75: a reason. Its CPU is at 13 % where theirs is at 11.5 %: none."""
    found = {each.name: each for each in hosts(store, RUN, [spot("hotspot_straggler", "w0", 0.0, 5.0)])}
    assert {name: (each.value, each.others) for name, each in found.items()} == {
        "gpu_clock_hertz": pytest.approx((1.2e9, 1.75e9)),
        "cpu_util": pytest.approx((0.13, 0.115)),
    }
    assert is_worse(found["gpu_clock_hertz"])
    assert not is_worse(found["cpu_util"])
    for each in found.values():
        assert store.query(each.sql).column(0)[0].as_py() == pytest.approx(each.value)


@pytest.mark.parametrize(
    ("name", "value", "others", "worse"),
    [
        ("gpu_throttled", 0.30, 0.05, True),
        ("gpu_throttled", 0.10, 0.05, False),
        ("gpu_clock_hertz", 1.9e9, 1.7e9, False),
        ("gpu_temperature_celsius", 88.0, 70.0, True),
        ("cpu_throttled_seconds_total", 4.0, 0.0, True),
    ],
)
def test_a_reason_lies_in_the_direction_that_makes_slow(name: str, value: float, others: float, worse: bool) -> None:
    """More throttling, less clock, more heat; a tenth apart at least, of shares by difference."""
    assert is_worse(HostMeasure("w0", name, None, value, others, "SELECT 1")) is worse


@pytest.mark.parametrize(("gone_at", "is_stale"), [(5.0, False), (2.0, True)], ids=["while it waited", "before"])
def test_what_is_evicted_while_a_request_waits_is_no_error_of_the_index(
    tmp_path: Path, gone_at: float, is_stale: bool
) -> None:
    """30 requests are sent to w0 at 3 s for 10 blocks (160 tokens) that it stored at 1 s, and find nothing in their turn."""
    blocks = list(range(1, 11))
    made = [decision(f"r{n}", 3.0 + n / 1000, blocks) for n in range(30)]
    for route, _ in made:
        route["candidates"] = [{"worker": "w0", "matched_tokens": 160}, {"worker": "w1", "matched_tokens": 0}]
    lives = [block("w0", 1.0, "stored", n, n - 1 or None) for n in blocks]
    lives += [block("w0", gone_at, "evicted", n) for n in blocks]
    workers = [{"worker": name, "run_id": "r", "at_ns": START_NS, "block_size": SIZE} for name in ("w0", "w1")]
    store = open_store(str(tmp_path / "k.duckdb"))
    try:
        told = {"route": [route for route, _ in made], "request": [row for _, row in made]}
        store.append(batch({**told, "block": lives, "worker": workers}))
        seen = read(store, RUN)
        assert wrong_beliefs(seen)[0].all()
        known = informed(store, RUN, seen)
        assert wrong_beliefs(known)[0].tolist() == [is_stale] * 30
        kinds = [spot.kind for spot in hotspots(store, RUN).hotspots]
        assert ("stale_index" in kinds) is is_stale
    finally:
        store.close()
