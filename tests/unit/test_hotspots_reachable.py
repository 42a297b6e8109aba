"""Who could be chosen: workers that come, go, are drained, or serve another model are no alternative, and no reason for an alarm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.hotspots.judge import find, hotspots
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.reachable import by_lists, drawn_from
from diagnosis.hotspots.regret import regret_of
from engine_probe.errors import BadWindow
from engine_probe.schema import table_from_rows
from store.interface import Batch, Store, Window
from store.open import open_store
from tests.simulated_routing import LENGTHS, POLICIES, TOKEN_S, Fleet, simulate

T0_NS = 1_780_000_000_000_000_000
RUN = Window(run_id="run")


def _lists(*rows: str) -> np.ndarray:
    """`1` where the worker of that column stands in the list."""
    return np.array([[letter == "1" for letter in row] for row in rows])


def test_worker_that_joins_or_leaves_was_not_there_before_or_after() -> None:
    """The second comes with the third decision, the third goes after it; all lists name all who are there, so one list tells."""
    there, pool = by_lists(_lists("101", "101", "111", "110", "110"))
    assert there.astype(int).tolist() == [[1, 0, 1], [1, 0, 1], [1, 1, 1], [1, 1, 0], [1, 1, 0]]
    assert len(set(pool.tolist())) == 1


def test_lists_that_never_meet_are_pools() -> None:
    """w0 and w1 in one list, w2 and w3 in the other; a decision without a list may go anywhere."""
    there, pool = by_lists(_lists("1100", "0011", "1100", "0011", "0000"))
    assert there.astype(int).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]
    assert pool[0] == pool[1] != pool[2] == pool[3]


def test_list_of_those_that_were_drawn_leaves_nobody_out() -> None:
    """Two of eight are drawn each time: a worker is left out of three lists in four, and of 20 in a row with 0.75^20 = 0.3 %."""
    random = np.random.default_rng(1)
    listed = np.zeros((500, 8), dtype=bool)
    for row in listed:
        row[random.choice(8, 2, replace=False)] = True
    assert by_lists(listed)[0].all()
    # 0.75^n = 1e-6 for n = 48: a worker that leaves after 300 is known to be gone, since 200 lists lack it
    listed[300:, 0] = False
    there, _ = by_lists(listed)
    assert not there[310:, 0].any()
    assert there[:, 1:].all()


def test_lists_that_are_shorter_than_who_was_there_are_kept() -> None:
    """Of three that were there the first decision looked at two, and at whom it chose; without a list it looked at all."""
    there, listed = np.ones((3, 3), dtype=bool), _lists("110", "011", "000")
    seen = simulate(Fleet(3, lambda number, busy, has, random: 0, intervals=1, per_interval=3))
    looked_at = drawn_from(there, listed, seen.decisions)
    assert looked_at is not None
    assert looked_at.astype(int).tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert drawn_from(there, there, seen.decisions) is None


def _half_there(seen: Observed, workers: int) -> Observed:
    """All decisions fall on the first half; the others were not there."""
    there = np.zeros((len(seen.decisions), seen.num_workers), dtype=bool)
    there[:, :workers] = True
    return replace(seen, decisions=replace(seen.decisions, there=there))


def test_drained_workers_make_no_hotspot_of_the_others() -> None:
    """Two of eight serve everything by turns: a hotspot each, unless the other six were not there."""
    seen = simulate(Fleet(8, lambda number, busy, has, random: number % 2, LENGTHS["equal"], use=0.2))
    assert {spot.subject["id"] for spot in find(seen).hotspots} == {"w0", "w1"}
    assert find(_half_there(seen, 2)).status == "none"


def test_nobody_loses_against_a_worker_that_was_not_there() -> None:
    """The only worker there is the best one: no regret, whatever the idle ones would have cost."""
    seen = simulate(Fleet(4, lambda number, busy, has, random: 0, LENGTHS["equal"], use=0.2))
    assert np.nansum(regret_of(seen).seconds) > 0
    assert np.nansum(regret_of(_half_there(seen, 1)).seconds) == 0.0


def test_worker_that_gets_too_much_of_its_pool_is_found_beside_another_pool() -> None:
    """w0 and w1 are a pool of two that gets a fifth of the requests; w0 gets all of these, and less than a quarter of all."""

    def pick(number: int, busy: np.ndarray, has: np.ndarray, random: np.random.Generator) -> int:
        return 0 if number % 10 < 2 else 2 + number % 2

    seen = simulate(Fleet(4, pick, LENGTHS["equal"], per_interval=200, use=0.4))
    mine = seen.decisions.chosen < 2
    there = np.where(mine[:, None], [True, True, False, False], [False, False, True, True])
    pooled = replace(seen, decisions=replace(seen.decisions, there=there), pools=np.array([0, 0, 1, 1], dtype=np.int64))
    assert [spot.subject["id"] for spot in find(pooled).hotspots] == ["w0"]


def test_slower_model_is_no_straggler() -> None:
    """w2 and w3 take four times as long as the others, as their model does: told where they are one pool with these, not where not."""
    slow = Fleet(4, POLICIES["round_robin"], LENGTHS["equal"], per_interval=200, use=0.15, slow=((2, 4.0), (3, 4.0)))
    seen = simulate(slow)
    assert {spot.kind for spot in find(seen).hotspots} == {"straggler"}
    pools = np.array([0, 0, 1, 1], dtype=np.int64)
    there = pools == pools[seen.decisions.chosen][:, None]
    apart = replace(seen, decisions=replace(seen.decisions, there=there), pools=pools)
    assert find(apart).status == "none"
    one = replace(slow, slow=((2, 8.0), (3, 4.0)))
    seen = simulate(one)
    apart = replace(seen, decisions=replace(seen.decisions, there=there), pools=pools)
    assert [(spot.kind, spot.subject["id"]) for spot in find(apart).hotspots] == [("straggler", "w2")]


# from stored rows: 240 requests of 1,000 tokens, four at each full second for a minute, by turns to those of w0, w1 that are there


def _rows(joins_s: float = 0.0) -> dict[str, list[dict[str, Any]]]:
    """First come, first served; w1 is there from `joins_s` on."""
    rows: dict[str, list[dict[str, Any]]] = {"route": [], "request": [], "step": [], "worker": []}
    free = {"w0": 0.0, "w1": 0.0}
    took = 1000 * TOKEN_S
    for number in range(240):
        at = number // 4 + (number % 4) * 0.001
        there = ["w0", "w1"] if at >= joins_s else ["w0"]
        worker = there[number % len(there)]
        begun = max(at, free[worker])
        free[worker] = done = begun + took
        name, common = f"r{number}", {"run_id": "run", "worker": worker}
        route = {"run_id": "run", "request_id": name, "at_ns": _ns(at), "policy": "round_robin", "chosen": worker}
        rows["route"].append({**route, "candidates": [{"worker": each, "load": 0.0} for each in there]})
        instants = {"arrival_ns": _ns(at), "first_scheduled_ns": _ns(begun), "first_token_ns": _ns(done)}
        ended = {"at_ns": _ns(done), "end_ns": _ns(done), "last_token_ns": _ns(done), "state": "finished"}
        tokens = {"prompt_tokens": 1000, "cached_tokens": 0, "computed_tokens": 1000, "output_tokens": 1}
        rows["request"].append({**common, **instants, **ended, **tokens, "request_id": name, "vantage": "engine"})
        step = {"step": number, "duration_s": took, "prefill_tokens": 1000, "decode_tokens": 0, "num_running": 1}
        rows["step"].append({**common, **step, "at_ns": _ns(done), "num_waiting_prefill": 0})
    rows["worker"] = [{"run_id": "run", "worker": name, "at_ns": _ns(-1.0), "engine": "test"} for name in free]
    return rows


def _ns(at_s: float) -> int:
    return T0_NS + round(at_s * 1e9)


def _stored(path: Path, *parts: dict[str, list[dict[str, Any]]]) -> Store:
    store = open_store(str(path / "kvscope.duckdb"))
    for rows in parts:
        store.append(Batch({kind: table_from_rows(kind, each) for kind, each in rows.items() if each}))
    return store


def test_worker_that_joins_in_the_middle_is_no_hotspot_of_the_other(tmp_path: Path) -> None:
    """The lists of candidates tell that w1 was not there in the first half minute."""
    with _stored(tmp_path, _rows(joins_s=30.0)) as store:
        found = hotspots(store, RUN)
    assert (found.status, found.num_decisions) == ("none", 240)


@pytest.mark.parametrize("mark", [[], [{"at_ns": T0_NS + 30 * 10**9, "mark": "worker_up", "subject": "w1"}]])
def test_mark_tells_who_was_there_where_no_list_does(tmp_path: Path, mark: Sequence[dict[str, Any]]) -> None:
    """Without route rows w0 gets everything for half a minute, which is too much for one of two (three of four wait); with the mark it is one of one."""
    rows = _rows(joins_s=30.0)
    marks = [{**each, "run_id": "run"} for each in mark]
    with _stored(tmp_path, {**rows, "route": [], "mark": marks}) as store:
        found = hotspots(store, RUN)
    assert found.status == ("none" if mark else "hotspots")


def test_what_was_delivered_twice_counts_once(tmp_path: Path) -> None:
    """A third of the rows again in a second batch: as many decisions, and as many seconds lost."""
    rows = _rows()
    again = {kind: each[::3] for kind, each in rows.items()}
    (tmp_path / "once").mkdir()
    with _stored(tmp_path / "once", rows) as store:
        once = hotspots(store, RUN).to_dict()
    with _stored(tmp_path, rows, again) as store:
        assert hotspots(store, RUN).to_dict() == once


def test_window_without_decisions_says_where_requests_lie(tmp_path: Path) -> None:
    """Instants are told as people read them."""
    with _stored(tmp_path, _rows()) as store, pytest.raises(BadWindow, match="2026-05-28 20:26:40 UTC to 2026-05-28"):
        hotspots(store, Window(T0_NS + 10**12, T0_NS + 10**12 + 10**9, "run"))
