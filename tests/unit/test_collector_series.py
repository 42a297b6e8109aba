"""Series over time, on a few rows worked by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import pytest

from collector.reading.series_queries import SeriesRequest, series
from engine_probe.errors import UsageError
from engine_probe.schema import table_from_rows
from store.interface import KEY_EPOCH, Batch, BatchId, Store, Window
from store.open import open_store
from tests.store_rows import START_NS, S, request, step

LIVE = Window(START_NS, START_NS + 3600 * S)
MS = 1_000_000
NUMBERS = count()
"""Of batches, so that each is another one."""


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(":memory:") as opened:
        yield opened


def put(store: Store, source: str = "plugin", identity: BatchId | None = None, **kinds: list[dict[str, Any]]) -> None:
    """Rows by kind, of a sender with an identity unless it is told otherwise."""
    named = identity or BatchId(source, "e", next(NUMBERS))
    store.append(Batch({kind: table_from_rows(kind, rows) for kind, rows in kinds.items()}, named))


def put_anonymous(store: Store, **kinds: list[dict[str, Any]]) -> None:
    """Rows of a sender that gives no identity, so that it may deliver them again."""
    store.append(Batch({kind: table_from_rows(kind, rows) for kind, rows in kinds.items()}, None, source="curl"))


def plugin(name: str, at_s: float, ttft_s: float | None, **facts: Any) -> dict[str, Any]:
    """The row of an engine's plugin."""
    arrival = START_NS + round(at_s * S)
    first = None if ttft_s is None else arrival + round(ttft_s * S)
    facts = {"vantage": "engine", "worker": "w0", "queue_s": 0.1, "prefill_s": 0.2, "first_token_ns": first} | facts
    return request(name, at_s, **facts)


def span(name: str, at_s: float, ttft_s: float | None, **facts: Any) -> dict[str, Any]:
    """What OTLP tells of the same request, 256 ns later by rounding, and of a service in place of a worker."""
    row = plugin(
        name,
        at_s,
        ttft_s,
        worker="service",
        prefill_s=None,
        trace_id=f"t-{name}",
        labels={"span_id": f"s-{name}"},
        **facts,
    )
    return row | {"arrival_ns": row["arrival_ns"] + 256}


def points(store: Store, metric: str, **how: Any) -> list[tuple[dict[str, Any], list[tuple[Any, ...]]]]:
    """(labels, [(bucket in s after START, value, n)]) of each line."""
    window = how.pop("window", LIVE)
    found = series(store, SeriesRequest(metric, window, step_s=how.pop("step_s", 60), **how))
    return [
        (line["labels"], [((at - START_NS) / S, value, n) for at, value, n in line["points"]])
        for line in found["series"]
    ]


def test_percentiles_by_worker_and_minute(store: Store) -> None:
    """P99 of 1..100 s is the 99th value; what has no first token is not counted, other vantages and runs are out."""
    rows = [plugin(f"a{n}", 0.5 * (n % 100), n, worker="a") for n in range(1, 101)]
    rows += [plugin("b", 61, 7, worker="b"), plugin("none", 1, None, worker="a", state="failed")]
    rows += [plugin("client", 1, 500, worker="a", vantage="client"), plugin("run", 1, 900, worker="a", run_id="exp")]
    put(store, request=rows)
    assert points(store, "ttft", stat="0.99", by=("worker",), vantage="engine") == [
        ({"worker": "a"}, [(0, 99.0, 100)]),
        ({"worker": "b"}, [(60, 7.0, 1)]),
    ]
    assert points(store, "ttft", stat="1", step_s=3600, vantage="engine") == [({}, [(0, 100.0, 101)])]


def test_a_request_that_plugin_and_spans_tell_counts_once(store: Store) -> None:
    """Two requests, told twice: two, of the plugin's worker; TTFT 1 and 3 s, and a mean prefill that only the plugin knows."""
    put(store, request=[plugin("a", 0, 1.0), plugin("b", 61, 3.0)])
    put(store, source="otlp", request=[span("a", 0, 1.0), span("b", 61, 3.0)])
    assert points(store, "requests", by=("worker",)) == [({"worker": "w0"}, [(0, 1, 1), (60, 1, 1)])]
    assert points(store, "ttft", stat="1", by=("worker",)) == [({"worker": "w0"}, [(0, 1.0, 1), (60, 3.0, 1)])]
    assert points(store, "prefill", stat="mean") == [({}, [(0, 0.2, 1), (60, 0.2, 1)])]


def test_spans_alone_are_requests_of_their_own(store: Store) -> None:
    """Without a plugin nothing is merged; a client's row of the same request is of another vantage."""
    put(store, source="otlp", request=[span("a", 0, 1.0), plugin("a", 0, 1.0, vantage="client", worker=None)])
    assert points(store, "requests", vantage="engine", by=("worker",)) == [({"worker": "service"}, [(0, 1, 1)])]
    by_vantage = points(store, "requests", by=("vantage",))
    assert by_vantage == [({"vantage": "client"}, [(0, 1, 1)]), ({"vantage": "engine"}, [(0, 1, 1)])]


def test_gaps_of_a_request_told_twice_are_counted_once(store: Store) -> None:
    """One gap of 40 ms, not two."""
    tokens = {"token_ns": [START_NS + 100 * MS, START_NS + 140 * MS]}
    put(store, request=[plugin("a", 0, 0.1, **tokens), span("a", 0, 0.1, **tokens)])
    assert points(store, "itl", stat="1") == [({}, [(0, pytest.approx(0.04), 1)])]


def test_a_batch_without_identity_that_came_again_counts_once(store: Store) -> None:
    """Delivered twice: 2 requests, not 4; a retry (another attempt) is one more, a pause apart."""
    rows = [plugin("a", 0, 1.0, attempt=0), plugin("b", 61, 3.0)]
    put_anonymous(store, request=rows)
    put_anonymous(store, request=[*rows, plugin("a", 5, 1.0, attempt=1)])
    assert points(store, "requests") == [({}, [(0, 2, 2), (60, 1, 1)])]


def test_a_sender_that_used_a_key_once_is_still_looked_at(store: Store) -> None:
    """Its newest batch had an Idempotency-Key, an older one had nothing and came twice."""
    put_anonymous(store, request=[plugin("a", 0, 1.0)])
    put_anonymous(store, request=[plugin("a", 0, 1.0)])
    put(store, identity=BatchId("curl", f"{KEY_EPOCH}k", 0), request=[plugin("b", 0, 1.0)])
    assert points(store, "requests") == [({}, [(0, 2, 2)])]


def test_of_a_sample_told_twice_the_weights_are_of_the_merged_rows(store: Store) -> None:
    """Plugin rows at 0.5 beside a span of every request: two requests, not two and two halves."""
    put(store, request=[plugin("a", 0, 1.0, sample_rate=0.5), span("a", 0, 1.0), span("b", 1, 2.0)])
    assert points(store, "requests") == [({}, [(0, 2, 2)])]


def test_a_window_without_rows_has_no_lines(store: Store) -> None:
    """No points, no rate, no vantage."""
    found = series(store, SeriesRequest("ttft", LIVE))
    assert (found["series"], found["sample_rate"], found["vantage"]) == ([], None, None)


def test_steps_by_bucket(store: Store) -> None:
    """Two steps of 0.1 and 0.3 s in a minute: mean 0.2, longest 0.3."""
    put(store, step=[step(1, duration_s=0.1), step(2, duration_s=0.3)])
    assert points(store, "step.duration_s", by=("worker",)) == [({"worker": "w"}, [(0, pytest.approx(0.2), 2)])]
    assert points(store, "step.duration_s", stat="max") == [({}, [(0, 0.3, 2)])]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"metric": "tftt"}, "no metric 'tftt'"),
        ({"metric": "ttft", "stat": "99"}, "no quantile"),
        ({"metric": "ttft", "by": ("labels",)}, "cannot be grouped by 'labels'"),
        ({"metric": "ttft", "by": ("worker; DROP TABLE request",)}, "cannot be grouped"),
        ({"metric": "requests", "stat": "mean"}, "requests are counted"),
        ({"metric": "ttft", "stat": "increase"}, "increase is for counters"),
        ({"metric": "ttft", "by": ("worker",), "max_points": 1}, "more than 1 points"),
    ],
)
def test_questions_that_make_no_sense_are_refused(store: Store, asked: dict[str, Any], says: str) -> None:
    """Metrics, stats, groups and the size of the answer are checked, and named."""
    put(store, request=[plugin("a", 0, 1.0), plugin("b", 61, 1.0)])
    with pytest.raises(UsageError, match=says):
        series(store, SeriesRequest(window=LIVE, **{"step_s": 60, **asked}))


def test_tokens_are_summed_and_what_nobody_told_adds_nothing(store: Store) -> None:
    """100 + 28 prompt tokens in the first second; a request that tells none is no zero in the mean."""
    rows = [plugin("a", 0.1, 0.2, prompt_tokens=100), plugin("b", 0.2, 0.2, prompt_tokens=28), plugin("c", 0.3, 0.2)]
    put(store, request=rows)
    (summed,) = series(store, SeriesRequest("prompt_tokens", LIVE, step_s=1))["series"]
    assert msgspec.json.decode(msgspec.json.encode(summed["points"])) == [[START_NS, 128.0, 2]]
    answer = series(store, SeriesRequest("prompt_tokens", LIVE, stat="mean", step_s=1))
    assert (answer["unit"], answer["series"][0]["points"]) == ("tokens", [[START_NS, 64.0, 2]])
