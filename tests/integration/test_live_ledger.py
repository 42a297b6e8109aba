"""The ledger as a counter: rows of a virtual fleet in a real store, split once each, and they sum to what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from collector.counts.book import Book
from collector.counts.bounded import Names
from collector.dashboard_check.feed import shifted, squeezed_rows
from collector.live.live_judge import SETTLE_S, LiveJudge
from diagnosis.ledger.rows import ROWS
from store import metric_catalogue as names
from store.interface import Batch, Store
from store.open import open_store

S = 1_000_000_000
T0 = 1_764_403_200 * S
SECONDS = 8.0


@pytest.fixture(scope="module")
def rows() -> Mapping[str, pa.Table]:
    return squeezed_rows(T0, SECONDS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "kvscope.duckdb")) as opened:
        yield opened


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_ns = T0

    def __call__(self) -> int:
        return self.now_ns


def judge(store: Store, clock: Clock, lookback_s: float = 300.0) -> tuple[LiveJudge, Book]:
    book = Book()
    return LiveJudge(store, book, Names(10), interval_s=1.0, lookback_s=lookback_s, clock=clock), book


def put(store: Store, rows: Mapping[str, pa.Table]) -> None:
    store.append(Batch(rows, None, "fleet", None, T0))


def told(book: Book, family: names.Family) -> dict[tuple[str, ...], float]:
    """Labels -> value of a counter."""
    found = [metric for metric in book.metrics() if metric.name == family.name.removesuffix("_total")]
    return {tuple(sample.labels.values()): sample.value for metric in found for sample in metric.samples}


def test_cause_seconds_sum_to_what_requests_took(store: Store, rows: Mapping[str, pa.Table]) -> None:
    """Three passes over growing time count each ended request once; the rows of the ledger sum to TTFT and E2E."""
    clock = Clock()
    made, book = judge(store, clock)
    put(store, rows)
    for passed_s in (4.0, 9.0, 300.0):
        clock.now_ns = T0 + round(passed_s * S)
        made.run_once()
    requests = rows["request"]
    seconds = told(book, names.CAUSE_SECONDS)
    assert {cause for _, cause, _ in seconds} <= set(ROWS)
    assert seconds["ttft", "premature_eviction", "w0"] > 0, "its blocks are too few"
    for metric, end in (("ttft", "first_token_ns"), ("e2e", "last_token_ns")):
        took = pc.sum(pc.subtract(requests[end], requests["arrival_ns"])).as_py() / S
        assert sum(value for labels, value in seconds.items() if labels[0] == metric) == pytest.approx(took, rel=1e-6)
        counted = told(book, names.CAUSE_REQUESTS)
        assert sum(value for labels, value in counted.items() if labels[0] == metric) == requests.num_rows
    assert told(book, names.LEDGER_SKIPPED) == {}


def test_a_request_is_split_only_when_its_steps_are_there(store: Store, rows: Mapping[str, pa.Table]) -> None:
    """What ended less than SETTLE_S ago waits for the next pass."""
    clock = Clock()
    made, book = judge(store, clock)
    put(store, rows)
    clock.now_ns = T0 + round((SECONDS + 1) * S)
    made.run_once()
    requests = rows["request"]
    until_ns = clock.now_ns - round(SETTLE_S * S)
    before = pc.sum(pc.less_equal(requests["end_ns"], until_ns)).as_py()
    counted = sum(v for (metric, _), v in told(book, names.CAUSE_REQUESTS).items() if metric == "ttft")
    assert 0 < counted == before < requests.num_rows
    gauges = {metric.name: metric.samples for metric in made.metrics()}
    assert gauges[names.LEDGER_NEWEST.name][0].value == pytest.approx(until_ns / S)
    assert gauges[names.CONTRADICTIONS.name], "its checks were made"


def test_requests_of_before_the_start_are_another_process_count(store: Store, rows: Mapping[str, pa.Table]) -> None:
    """A restarted collector does not count again what its predecessor counted."""
    clock = Clock()
    clock.now_ns = T0 + 250 * S
    made, book = judge(store, clock)
    put(store, rows)
    made.run_once()
    assert told(book, names.CAUSE_REQUESTS) == {}


def test_requests_that_are_not_read_are_told(store: Store, rows: Mapping[str, pa.Table]) -> None:
    """Longer than the minutes that are read: counted as skipped."""
    clock = Clock()
    made, book = judge(store, clock, lookback_s=1.0)
    put(store, rows)
    clock.now_ns = T0 + 200 * S
    made.run_once()
    assert told(book, names.LEDGER_SKIPPED) == {}, "no request is left in the window: nothing to judge"
    clock.now_ns = T0 + round((SECONDS - 1) * S)
    made.run_once()
    assert told(book, names.LEDGER_SKIPPED)[("too_long",)] > 0


def test_regret_of_decisions_is_counted_once(store: Store, rows: Mapping[str, pa.Table]) -> None:
    """A minute after they were made, by the worker that was chosen."""
    clock = Clock()
    made, book = judge(store, clock)
    put(store, rows)
    for passed_s in (70.0, 120.0, 200.0):
        clock.now_ns = T0 + round(passed_s * S)
        made.run_once()
    judged = told(book, names.ROUTES_JUDGED)
    assert sum(judged.values()) == rows["route"].num_rows
    assert set(judged) == {("w0",), ("w1",), ("w2",), ("w3",)}
    assert sum(told(book, names.ROUTING_REGRET).values()) > 0


def test_an_empty_store_is_no_fault(store: Store) -> None:
    """Nothing came: nothing is told, and nothing failed."""
    made, book = judge(store, Clock())
    made.run_once()
    assert list(book.metrics()) == []


def test_what_can_be_judged_no_more_is_not_shown(store: Store, rows: Mapping[str, pa.Table]) -> None:
    """Traffic stopped: a hotspot and a contradiction of then are none of now, or their alerts would fire for ever."""
    clock = Clock()
    made, _ = judge(store, clock)
    put(store, rows)
    clock.now_ns = T0 + round((SECONDS + 10) * S)
    made.run_once()
    before = {metric.name: metric.samples for metric in made.metrics()}
    assert before[names.CONTRADICTIONS.name]
    assert before[names.HOTSPOTS.name]
    clock.now_ns = T0 + 3_600 * S
    made.run_once()
    after = {metric.name: metric.samples for metric in made.metrics()}
    assert (after[names.CONTRADICTIONS.name], after[names.HOTSPOTS.name]) == ([], [])
    assert after[names.LEDGER_NEWEST.name][0].value == pytest.approx(T0 / S + 3_600 - SETTLE_S)


def test_rows_that_are_moved_keep_every_duration() -> None:
    """All instants by the same time, those in lists and spans too; nothing else."""
    rows = squeezed_rows(T0, 2.0)
    assert shifted(rows, 0) == rows
    moved = shifted(rows, 5 * S)
    for before, after in zip(rows["request"].to_pylist(), moved["request"].to_pylist(), strict=True):
        assert after["arrival_ns"] == before["arrival_ns"] + 5 * S
        assert after["token_ns"] == [at_ns + 5 * S for at_ns in before["token_ns"]]
        assert [span["end_ns"] for span in after["spans"]] == [span["end_ns"] + 5 * S for span in before["spans"]]
        assert (after["queue_s"], after["request_id"]) == (before["queue_s"], before["request_id"])
    assert moved["block"]["at_ns"].to_pylist() == [at_ns + 5 * S for at_ns in rows["block"]["at_ns"].to_pylist()]
