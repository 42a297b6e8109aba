"""A request that several rows tell counts once in the live numbers, with what any of them knows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.live.latencies import Latencies
from collector.live.told import Told
from engine_probe.schema import table_from_rows
from store.evidence.one_request import one_request_sql
from store.interface import Batch
from store.open import open_store

NOW_NS = 1_764_403_200_000_000_000
MS = 1_000_000


def plugin(later_ns: int = 0, **more: Any) -> dict[str, Any]:
    """TTFT 100 ms, E2E 500 ms, queue 30 ms, 64 cached tokens, as vLLM's plugin tells it."""
    base = {
        "request_id": "a",
        "vantage": "engine",
        "state": "finished",
        "worker": "w0",
        "model": "m",
        "at_ns": NOW_NS,
        "arrival_ns": NOW_NS + later_ns,
        "first_token_ns": NOW_NS + 100 * MS + later_ns,
        "last_token_ns": NOW_NS + 500 * MS + later_ns,
        "output_tokens": 5,
        "queue_s": 0.03,
        "cached_tokens": 64,
        "labels": {"engine_request_id": "cmpl-a-0"},
    }
    return base | more


def span(later_ns: int = 300, **more: Any) -> dict[str, Any]:
    """The same request as its span tells it: prefill as well, but not what was cached; the service has a name of its own."""
    labels = {"span_id": "beef", "engine_request_id": "cmpl-a-0"}
    known = {"generation_id": "cmpl-a-0", "prefill_s": 0.07, "cached_tokens": None}
    return plugin(later_ns, worker="service", labels=labels, **(known | more))


def shown(*batches: list[dict[str, Any]]) -> dict[str, Any]:
    """What is shown after these batches: by worker the number of values of each metric, its sums and states."""
    latencies = Latencies(10)
    for batch in batches:
        latencies.observe(table_from_rows("request", batch), NOW_NS)
    return {
        key.worker: {name: int(part.counts.sum()) for name, part in series.total.items()}
        | {"sums": series.sums, "states": series.states}
        for key, series in latencies.shown()
    }


@pytest.mark.parametrize("batches", [([plugin()], [span()]), ([plugin(), span()],)])
def test_plugin_then_span_is_one_request_that_knows_both(batches: tuple[list[dict[str, Any]], ...]) -> None:
    """In two batches or in one: every metric once, the prefill from the span, all on the worker that was counted first."""
    assert shown(*batches) == {
        "w0": {
            "ttft": 1,
            "tpot": 1,
            "e2e": 1,
            "queue": 1,
            "prefill": 1,
            "sums": {"cached_tokens": 64, "output_tokens": 5},
            "states": {"finished": 1},
        }
    }


def test_span_then_plugin_adds_what_the_span_did_not_know() -> None:
    """The cached tokens come with the second row, into the series of the first."""
    found = shown([span()], [plugin()])
    assert list(found) == ["service"]
    assert found["service"]["ttft"] == found["service"]["prefill"] == 1
    assert found["service"]["sums"] == {"cached_tokens": 64, "output_tokens": 5}
    assert found["service"]["states"] == {"finished": 1}


def test_a_batch_sent_again_moves_nothing() -> None:
    """At least once: the second delivery, token times and all, is counted nowhere."""
    told = plugin(token_ns=[NOW_NS + 100 * MS, NOW_NS + 200 * MS, NOW_NS + 500 * MS])
    once = shown([told])
    assert once["w0"]["itl"] == 2
    assert shown([told], [told], [told, told]) == once


def test_token_times_that_come_later_count_then() -> None:
    """The first row knew no token times; the second brings two gaps."""
    times = [NOW_NS + 100 * MS, NOW_NS + 200 * MS, NOW_NS + 500 * MS]
    assert shown([plugin()], [plugin(token_ns=times)])["w0"]["itl"] == 2


@pytest.mark.parametrize(
    "other",
    [
        {"request_id": "b"},
        {"vantage": "client", "model": "of-clients", "worker": "w9"},
        {"attempt": 1},
        {"worker": "w1"},
        {"labels": {"engine_request_id": "cmpl-a-1"}},
        {"arrival_ns": NOW_NS + 2 * MS},
    ],
)
def test_another_request_counts(other: dict[str, Any]) -> None:
    """Another id, vantage, attempt, worker, generation or arrival is another request."""
    found = shown([plugin(attempt=0)], [plugin(**({"attempt": 0} | other))])
    assert sum(series["states"]["finished"] for series in found.values()) == 2


def test_only_so_many_are_remembered() -> None:
    """With room for 2 the third request pushes the first out, so that its second row counts again; the third's does not."""
    told = Told(most=2)

    def num_new(*names: str) -> int:
        table = table_from_rows("request", [plugin(request_id=name) for name in names])
        return len(told.split(table).first)

    assert num_new("a", "b", "a") == 2
    assert num_new("c") == 1
    assert num_new("a", "c") == 1
    assert num_new("x", "y", "z", "z") == 3


_ROWS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from([0, 500, 5 * MS]), st.sampled_from(["w0", None]), st.booleans()),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(_ROWS, st.integers(1, 8))
def test_as_many_requests_as_the_store_merges(parts: list[tuple[str, int, str | None, bool]], cut: int) -> None:
    """Whatever tells, in however many batches: the live count is that of the one definition."""
    rows = [
        (span if is_span else plugin)(later_ns, request_id=name, **({} if is_span else {"worker": worker}))
        for name, later_ns, worker, is_span in parts
    ]
    batches = [batch for batch in (rows[:cut], rows[cut:]) if batch]
    counted = sum(series["states"]["finished"] for series in shown(*batches).values())
    with open_store(":memory:") as store:
        store.append(Batch({"request": table_from_rows("request", rows)}))
        merged = store.query(f"SELECT count(*) FROM ({one_request_sql('run_id IS NULL')})").column(0)[0].as_py()
    assert counted == merged
