"""Rows that tell of one request become one row; rows of two requests never do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_probe.schema import table_from_rows
from store.evidence.one_request import SAME_NS, SAME_STAMP_NS, one_request_sql, one_requests
from store.interface import Batch
from store.open import open_store

T0 = 1_780_000_000_000_000_000
COLUMNS = ("request_id", "attempt", "worker", "arrival_ns", "queue_s", "cached_tokens", "trace_id", "prompt_blocks")


def told(later_ns: int = 0, request_id: str = "a", **more: Any) -> dict[str, Any]:
    """A row that tells of a request which arrived `later_ns` after T0."""
    base = {"request_id": request_id, "vantage": "engine", "state": "finished", "at_ns": T0 + 10**9}
    return base | {"arrival_ns": T0 + later_ns, "worker": "w0"} | more


def span(later_ns: int = 0, request_id: str = "a", **more: Any) -> dict[str, Any]:
    """A row from an engine's span: it names its service and its trace."""
    return told(later_ns, request_id, worker="service", trace_id="feed", labels={"span_id": "beef"}, **more)


def merged(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    with open_store(":memory:") as store:
        store.append(Batch({"request": table_from_rows("request", list(rows))}))
        return one_requests(store, "run_id IS NULL", [], COLUMNS, order_by="arrival_ns, worker").to_pylist()


def test_plugin_and_span_of_a_request_are_one_that_knows_both() -> None:
    """Arrivals 500 ns apart, two names of one engine: cached tokens come from the plugin, the trace from the span."""
    found = merged(span(500, queue_s=0.25), told(0, queue_s=0.25, cached_tokens=64, prompt_blocks=[1, 2]))
    assert found == [
        {
            "request_id": "a",
            "attempt": None,
            "worker": "w0",
            "arrival_ns": T0,
            "queue_s": 0.25,
            "cached_tokens": 64,
            "trace_id": "feed",
            "prompt_blocks": [1, 2],
        }
    ]


def test_prompts_of_other_lengths_are_other_requests_whatever_their_id() -> None:
    """Two callers number alike and ask within a millisecond; a row that came twice, or does not tell its prompt, is still one request."""
    ours, theirs = (told(later, worker=None, prompt_tokens=tokens) for later, tokens in ((0, 100), (500, 300)))
    assert len(merged(ours, theirs)) == 2
    assert len(merged(ours, dict(ours))) == 1
    assert len(merged(ours, told(500, worker=None))) == 1
    assert len(merged(ours, span(500, prompt_tokens=102))) == 1


def test_a_span_that_names_the_worker_may_be_further_off() -> None:
    """The same name, arrivals 0.9 ms apart: one request; a service of another name is then another engine."""
    near = 900_000
    assert len(merged(told(), told(near, labels={"span_id": "b"}))) == 1
    assert len(merged(told(), span(near))) == 2


@pytest.mark.parametrize(
    ("other", "count"),
    [
        ({}, 1),
        ({"later_ns": SAME_NS}, 1),
        ({"later_ns": SAME_NS + 1}, 2),
        ({"request_id": "b"}, 2),
        ({"vantage": "client"}, 2),
        ({"attempt": 1}, 2),
        ({"worker": "w1"}, 2),
        ({"worker": None}, 1),
        ({"generation_id": "g1"}, 2),
        ({"labels": {"engine_request_id": "g0"}}, 1),
        ({"labels": {"engine_request_id": "g1"}}, 2),
    ],
)
def test_what_makes_a_second_request(other: dict[str, Any], count: int) -> None:
    """Another id, vantage, attempt, generation, worker, or an arrival beyond the rounding; what is unknown separates nothing."""
    assert len(merged(told(attempt=0, generation_id="g0"), told(**({"attempt": 0} | other)))) == count


def test_an_unknown_attempt_is_no_second_try() -> None:
    """A try later arrives later; at the same instant the row that counts attempts tells of the same one."""
    assert [row["attempt"] for row in merged(told(), told(attempt=1))] == [1]


def test_workers_that_share_a_request_keep_a_row_each() -> None:
    """Prefill and decode worker stamp the same arrival, and neither row is a span."""
    assert [row["worker"] for row in merged(told(), told(worker="w1"))] == ["w0", "w1"]


def test_a_stamp_read_twice_is_within_its_rounding() -> None:
    """2 us apart a span of another name is the same request, above that it is not."""
    assert len(merged(told(), span(SAME_STAMP_NS))) == 1
    assert len(merged(told(), span(SAME_STAMP_NS + 1))) == 2


def test_runs_do_not_mix() -> None:
    """The same request in a run and live is two."""
    with open_store(":memory:") as store:
        rows = [told(), told(run_id="r")]
        store.append(Batch({"request": table_from_rows("request", rows)}))
        assert store.query(f"SELECT count(*) FROM ({one_request_sql('true')})").column(0).to_pylist() == [2]


def test_all_columns_keep_their_names() -> None:
    """Without a list of columns the statement gives every column of the contract."""
    with open_store(":memory:") as store:
        store.append(Batch({"request": table_from_rows("request", [told(), span()])}))
        found = store.query(one_request_sql("run_id IS NULL"))
        assert {field.name for field in table_from_rows("request", []).schema} <= set(found.column_names)
        assert found.num_rows == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=12), st.randoms())
def test_the_order_of_rows_does_not_matter(parts: list[tuple[int, bool]], random: Any) -> None:
    """One row a request, however often each was told and in which order the rows came."""
    rows = [
        (span if is_span else told)(number * 10 * SAME_NS, request_id="same", queue_s=float(number))
        for number, is_span in parts
    ]
    once = merged(*rows)
    assert [row["queue_s"] for row in once] == sorted({float(number) for number, _ in parts})
    random.shuffle(rows)
    assert merged(*rows) == once
