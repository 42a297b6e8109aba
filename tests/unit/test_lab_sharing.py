"""Runs of the lab that have something in common work it out once, and say what they would say alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from operator import is_
from typing import Any

import pytest

from diagnosis import parallel
from diagnosis.calibration import listening
from diagnosis.diagnose import diagnose
from diagnosis.lab import cell, play
from diagnosis.lab import run as runs
from diagnosis.lab.cell import NOW_NS, judged, run_cell
from diagnosis.lab.lately import Lately
from diagnosis.lab.matrix import together
from diagnosis.lab.run import BASELINE, SUSPECT, Order, run_lab
from store.interface import Batch, Window
from store.open import open_store

FEW = 150
SECONDS = ("play_s", "judge_s")


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    runs.forget()
    cell.forget()
    yield
    runs.forget()
    cell.forget()


def document(order: Order) -> dict[str, Any]:
    """Of a run, without what it took."""
    return {name: value for name, value in run_cell(order).items() if name not in SECONDS}


def test_what_was_asked_for_last_is_kept() -> None:
    """Two places: asking for `a` again makes `b` the one that is dropped; equal keys are one unless identity is asked for."""
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name.upper()

    kept: Lately[str, str] = Lately(2)
    for name in ("a", "b", "a", "c", "a", "b"):
        assert kept.of(name, lambda name=name: make(name)) == name.upper()  # type: ignore[misc]  # bound at once
    assert made == ["a", "b", "c", "b"]
    kept.clear()
    kept.of("a", lambda: make("again"))
    assert made[-1] == "again"
    one, equal = [1], [1]
    same: Lately[list[int], int] = Lately(2, is_)
    assert [same.of(key, lambda key=key: id(key)) for key in (one, equal, one)] == [id(one), id(equal), id(one)]  # type: ignore[misc]


def test_a_run_says_the_same_alone_and_among_others() -> None:
    """With a mark, with less to see, of another fault: after their forerunners, and each with nothing remembered."""
    orders = [
        Order("hotspot_straggler", "typical", 3, FEW),
        Order("hotspot_straggler", "typical", 3, FEW, marked=True),
        Order("hotspot_straggler", "typical", 3, FEW, observe="lossy"),
        Order("lookup_overhead", "strong", 3, FEW),
    ]
    among = [document(order) for order in orders]
    for order, found in zip(orders, among, strict=True):
        runs.forget()
        cell.forget()
        assert document(order) == found, order.key()


@pytest.mark.parametrize("fault", ["hotspot_straggler", "transfer_wire"])
def test_a_run_is_judged_as_two_windows_of_one_store_are(fault: str) -> None:
    """The verdict is `diagnose`'s on both windows' rows together, and thresholds were asked the same."""
    run = run_lab(Order(fault, "strong", 2, FEW))
    told, asked = judged(run)
    with open_store(":memory:") as store, listening() as heard:
        for tables in (run.baseline, run.suspect):
            store.append(Batch(tables))
        verdict = diagnose(
            store, Window(run_id=BASELINE), Window(run_id=SUSPECT), metric=run.fault.metric, now_ns=NOW_NS
        )
    assert told.to_dict() == verdict.to_dict()
    assert asked == heard


def test_ways_of_observing_and_a_mark_play_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plays for five runs of one fault and seed; the other severity plays its suspect alone."""
    played: list[str] = []
    plays = play.play

    def counted(scene: Any, run_id: str) -> Any:
        played.append(run_id)
        return plays(scene, run_id)

    monkeypatch.setattr(play, "play", counted)
    for order in (Order("clock_skew", requests=FEW, observe=how) for how in ("full", "otlp", "client", "lossy")):
        run_lab(order)
    run_lab(Order("clock_skew", requests=FEW, marked=True))
    assert played == [BASELINE, SUSPECT]
    run_lab(Order("clock_skew", "strong", requests=FEW))
    assert played == [BASELINE, SUSPECT, SUSPECT]


def test_runs_of_one_fault_and_seed_are_played_by_one_process() -> None:
    """Whatever lies between them; each is there once, in the order in which they are wanted."""
    straggler, marked = Order("hotspot_straggler"), Order("hotspot_straggler", marked=True)
    other, mild = Order("hotspot_straggler", seed=2), Order("hotspot_straggler", "mild")
    assert together([straggler, other, marked, Order("aa"), mild]) == [
        [straggler, marked, mild],
        [other],
        [Order("aa")],
    ]


def test_work_of_a_process_that_is_alone_is_done_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the caller's thread, which hears what it is told; results and exceptions are those of threads."""
    monkeypatch.setattr(parallel, "_is_alone", True)
    assert parallel.both(threading.get_ident, threading.get_ident) == (threading.get_ident(),) * 2
    assert parallel.each(lambda a, b: a + b, [1, 2], [10, 20]) == [11, 22]

    def fails() -> None:
        raise ValueError("second")

    with pytest.raises(ValueError, match="second"):
        parallel.both(threading.get_ident, fails)
    with parallel.beside() as pool:
        later = pool.submit(fails)
    assert isinstance(later.exception(), ValueError)


def test_a_store_keeps_to_its_threads() -> None:
    """DuckDB says how many it would use for a read."""
    with open_store(":memory:", max_threads=1) as store:
        assert store.query("SELECT current_setting('threads') AS n").to_pylist() == [{"n": 1}]
