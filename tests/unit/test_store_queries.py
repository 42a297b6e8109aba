"""The typed questions, on a few rows worked by hand."""

from __future__ import annotations

import pytest

from engine_probe.errors import UsageError
from engine_probe.schema import table_from_rows
from store.interface import Batch, Window
from store.metrics import Slo
from store.open import open_store
from store.queries.requests import SORTS, RequestFilter, get_request, list_requests
from store.queries.samples import counter_increases, sample_series
from store.queries.series import percentile_intervals, percentile_name, percentile_series, rate_series, step_series
from store.queries.workers import latest_facts, marks
from tests.store_rows import START_NS, S, request, step

LIVE = Window(START_NS, START_NS + 3600 * S)


def store_of(**kinds):
    """A store in memory with these rows by kind."""
    store = open_store(":memory:")
    store.append(Batch({kind: table_from_rows(kind, rows) for kind, rows in kinds.items()}))
    return store


def answered(request_id, at_s, ttft_s, worker="w", **facts):
    """A request whose first token came `ttft_s` after its arrival."""
    arrival = START_NS + round(at_s * S)
    return request(request_id, at_s, worker=worker, first_token_ns=arrival + round(ttft_s * S), **facts)


@pytest.fixture(scope="module")
def load():
    """Worker a: TTFT 1..100 s in the first minute; worker b: one of 7 s; one request without a first token."""
    rows = [answered(f"a{n}", 0.5 * (n % 100), n, "a") for n in range(1, 101)]
    rows += [answered("b", 61, 7, "b"), request("none", 1, worker="a", state="failed")]
    rows += [answered("engine", 1, 500, "a", vantage="engine"), answered("run", 1, 900, "a", run_id="exp")]
    with store_of(request=rows) as store:
        yield store


def test_percentiles_by_worker_and_minute(load):
    """P50 of 1..100 is the 50th, P99 the 99th value; the unknown one is not counted, other vantages and runs are out."""
    found = percentile_series(load, LIVE, quantiles=("0.5", "0.99", "1"), vantage="client").to_pylist()
    assert found == [
        {"bucket_ns": START_NS, "worker": "a", "n": 100, "p50": 50.0, "p99": 99.0, "p100": 100.0},
        {"bucket_ns": START_NS + 60 * S, "worker": "b", "n": 1, "p50": 7.0, "p99": 7.0, "p100": 7.0},
    ]


def test_vantages_are_never_mixed(load):
    """Without a vantage it becomes a group of its own."""
    found = percentile_series(load, LIVE, by=()).to_pylist()
    assert [(row["vantage"], row["n"], row["p99"]) for row in found] == [
        ("client", 100, 99.0),
        ("engine", 1, 500.0),
        ("client", 1, 7.0),
    ]


def test_a_bucket_holds_what_arrived_in_it(load):
    """With buckets of an hour all of the client's requests are in one."""
    found = percentile_series(load, LIVE, by=(), bucket_s=3600, vantage="client").to_pylist()
    assert [(row["bucket_ns"], row["n"]) for row in found] == [(START_NS, 101)]


@pytest.mark.parametrize(
    ("q", "name"), [("0.5", "p50"), ("0.05", "p5"), ("0.999", "p99_9"), ("1", "p100"), (".25", "p25")]
)
def test_percentile_columns_are_named_by_their_share(q, name):
    """0.999 is p99_9."""
    assert percentile_name(q) == name


def test_one_percentile_comes_with_n_and_interval(load):
    """Of 1..100 the median lies between the 40th and the 61st value (95 %); P99 has no upper bound with so few."""
    (median,) = percentile_intervals(load, LIVE, quantile="0.5", by=("worker",), vantage="client").to_pylist()[:1]
    assert median == {"worker": "a", "n": 100, "value": 50.0, "low": 40.0, "high": 61.0}
    (tail,) = percentile_intervals(load, LIVE, vantage="client").to_pylist()
    assert (tail["n"], tail["high"]) == (101, None)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s: percentile_series(s, LIVE, metric_name="tftt"), "no metric 'tftt'"),
        (lambda s: percentile_series(s, LIVE, quantiles=["99"]), "no quantile"),
        (lambda s: percentile_series(s, LIVE, by=["labels"]), "cannot be grouped by 'labels'"),
        (lambda s: percentile_series(s, LIVE, by=["worker; DROP TABLE request"]), "cannot be grouped"),
        (lambda s: percentile_series(s, LIVE, bucket_s=0), "too narrow"),
        (lambda s: list_requests(s, LIVE, sort="labels"), "cannot be sorted by 'labels'"),
        (lambda s: list_requests(s, LIVE, limit=0), "Ask for at least 1"),
        (lambda s: list_requests(s, LIVE, cursor="nonsense"), "not one of ours"),
        (lambda s: list_requests(s, LIVE, cursor="W10="), "another list"),
    ],
)
def test_questions_that_make_no_sense_are_refused(load, call, says):
    """Metrics, quantiles, groups, buckets, sorts, limits and cursors from outside are checked and named."""
    with pytest.raises(UsageError, match=says):
        call(load)


def test_rates_over_a_minute():
    """30 requests finished with 60 tokens each in 60 s: 0.5 requests/s, 30 tokens/s; a failed one yields nothing."""
    rows = [answered(f"{n}", n, 0.1, output_tokens=60, prompt_tokens=40, cached_tokens=20) for n in range(30)]
    rows += [answered("slow", 1, 9, output_tokens=60, prompt_tokens=40), request("f", 2, worker="w", state="failed")]
    with store_of(request=rows) as store:
        (row,) = rate_series(store, LIVE, vantage="client", slo=Slo(ttft_s=1.0)).to_pylist()
    assert (row["num_arrived"], row["num_finished"], row["num_failed"]) == (32, 31, 1)
    assert row["requests_per_s"] == pytest.approx(31 / 60)
    assert row["output_tokens_per_s"] == pytest.approx(31.0)
    assert row["total_tokens_per_s"] == pytest.approx(31 * 100 / 60)
    assert row["goodput_rps"] == pytest.approx(0.5)
    assert (row["request_hit_ratio"], row["token_hit_ratio"], row["reused_tokens"]) == (1.0, 0.5, 600)


def test_steps_by_bucket():
    """Two steps in ten seconds: mean and longest duration, the fullest cache, the sums."""
    rows = [
        step(1, duration_s=0.1, num_running=2, num_waiting_prefill=3, blocks_used=10, blocks_total=40, num_preempted=1),
        step(2, duration_s=0.3, num_running=4, num_waiting_prefill=1, blocks_used=30, blocks_total=40, num_preempted=2),
    ]
    with store_of(step=rows) as store:
        (row,) = step_series(store, LIVE).to_pylist()
    assert row["step_mean_s"] == pytest.approx(0.2)
    assert (row["num_steps"], row["step_max_s"], row["num_running"], row["num_waiting"]) == (2, 0.3, 4, 3)
    assert (row["blocks_used_ratio"], row["num_preempted"], row["blocks_evicted"]) == (0.75, 3, None)


def pages(store, **how):
    """Request ids of all pages, and the number of pages."""
    found, cursor, count = [], None, 0
    while True:
        page = list_requests(store, LIVE, cursor=cursor, **how)
        found += page.rows.column("request_id").to_pylist()
        count += 1
        cursor = page.next_cursor
        if cursor is None:
            return found, count


@pytest.fixture(scope="module")
def listed():
    """Eleven requests with many equal and some unknown values, and three of one id."""
    rows = [
        answered(
            f"r{n}", n % 4, 0.1 * (n % 3), end_ns=START_NS + n // 2, output_tokens=n % 2 or None, queue_s=float(n % 5)
        )
        for n in range(11)
    ]
    rows += [request("unknown", 2, attempt=attempt) for attempt in (None, 0, 1)]
    with store_of(request=rows) as store:
        yield store


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("descending", [True, False])
def test_pages_hold_each_request_once_and_in_order(listed, sort, descending):
    """Equal and unknown sort values included, the pages are the list cut in pieces; unknown ones come last."""
    whole, count = pages(listed, sort=sort, descending=descending, limit=100)
    pieces, num_pieces = pages(listed, sort=sort, descending=descending, limit=3)
    values = list_requests(listed, LIVE, sort=sort, descending=descending).rows.column(sort).to_pylist()
    assert count == 1
    assert pieces == whole
    assert num_pieces == 5
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=descending)
    assert values[len(known) :] == [None] * (len(values) - len(known))


def test_new_requests_do_not_shift_pages():
    """Rows that arrive between two pages neither repeat nor hide one that was there."""
    with store_of(request=[answered(f"r{n}", n, 1) for n in range(6)]) as store:
        first = list_requests(store, LIVE, limit=3)
        store.append(Batch({"request": table_from_rows("request", [answered("new", 100, 1)])}))
        second = list_requests(store, LIVE, limit=3, cursor=first.next_cursor)
    assert first.rows.column("request_id").to_pylist() == ["r5", "r4", "r3"]
    assert second.rows.column("request_id").to_pylist() == ["r2", "r1", "r0"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (RequestFilter(worker="x"), ["c"]),
        (RequestFilter(tenant="it's"), ["b"]),
        (RequestFilter(min_ttft_s=2.0), ["c", "b"]),
        (RequestFilter(preempted=True), ["b"]),
        (RequestFilter(preempted=False), ["c", "a"]),
        (RequestFilter(state="failed"), []),
        (RequestFilter(request_id="a", worker="w"), ["a"]),
    ],
)
def test_filters_keep_what_matches(where, expected):
    """Each filter alone and two together; an unknown number of preemptions is none."""
    rows = [
        answered("a", 0, 1),
        answered("b", 1, 2, tenant="it's", num_preemptions=1),
        answered("c", 2, 3, worker="x", num_preemptions=0),
    ]
    with store_of(request=rows) as store:
        assert list_requests(store, LIVE, where).rows.column("request_id").to_pylist() == expected


def test_a_list_carries_the_metrics():
    """The computed columns stand beside the contract's scalars; lists and maps are left out."""
    with store_of(request=[answered("a", 0, 1.5)]) as store:
        rows = list_requests(store, LIVE).rows
    assert rows.column("ttft_s").to_pylist() == [1.5]
    assert "token_ns" not in rows.column_names
    assert "labels" not in rows.column_names


def test_one_request_with_all_that_is_known():
    """Both vantages, its workers' steps while it ran, its blocks by id and by hash, route, transfer and marks."""

    def block(at_s, **facts):
        return {"worker": "w", "at_ns": START_NS + at_s * S, "change": "stored"} | facts

    kinds = {
        "request": [
            request("r", 10, worker="w", vantage="engine", end_ns=START_NS + 20 * S, prompt_blocks=[7, 8]),
            request("r", 9, vantage="client", end_ns=START_NS + 21 * S),
            request("other", 10, worker="w"),
            request("r", 10, run_id="exp", worker="x"),
        ],
        "step": [step(5), step(15), step(30), step(15) | {"worker": "x"}],
        "block": [
            block(12, request_id="r"),
            block(5, block_hash=8, change="evicted"),
            block(5, block_hash=99),
            block(50, block_hash=7),
        ],
        "route": [{"request_id": "r", "at_ns": START_NS, "chosen": "w"}, {"request_id": "s", "at_ns": START_NS}],
        "transfer": [{"request_id": "r", "at_ns": START_NS, "num_bytes": 5}],
        "mark": [
            {"at_ns": START_NS + 12 * S, "mark": "deployed"},
            {"at_ns": START_NS + 90 * S, "mark": "fault"},
        ],
    }
    with store_of(**kinds) as store:
        detail = get_request(store, "r")
        run = get_request(store, "r", run_id="exp")
        assert get_request(store, "nobody") is None
    assert detail.requests.column("vantage").to_pylist() == ["client", "engine"]
    assert detail.steps.column("step").to_pylist() == [15]
    assert [(b["block_hash"], b["request_id"]) for b in detail.blocks.to_pylist()] == [(None, "r"), (8, None)]
    assert (detail.routes.num_rows, detail.transfers.num_rows) == (1, 1)
    assert detail.marks.column("mark").to_pylist() == ["deployed"]
    assert run.requests.num_rows == 1


def test_a_request_of_which_little_is_known():
    """No worker, no blocks: the rows alone, and empty tables beside them."""
    with store_of(request=[request("r")], step=[step(0)], block=[{"at_ns": START_NS, "change": "stored"}]) as store:
        detail = get_request(store, "r")
    assert detail.requests.num_rows == 1
    assert (detail.steps.num_rows, detail.blocks.num_rows, detail.marks.num_rows) == (0, 0, 0)
    with store_of(request=[]) as store:
        assert sample_series(store, LIVE, []).num_rows == 0
        assert marks(store, LIVE, []).num_rows == 0


def test_latest_facts_are_merged_column_by_column():
    """A later row that tells only what changed leaves the rest as known; facts after the window are not known yet."""
    rows = [
        {"worker": "a", "at_ns": 1, "num_blocks": 100, "block_size": 16, "flags": {"x": "1"}},
        {"worker": "a", "at_ns": 2, "num_blocks": 80},
        {"worker": "a", "at_ns": 9, "num_blocks": 60},
        {"worker": "late", "at_ns": 7, "num_blocks": 5},
        {"worker": "a", "at_ns": 2, "num_blocks": 1, "run_id": "exp"},
    ]
    with store_of(worker=rows) as store:
        found = latest_facts(store, Window(0, 5)).to_pylist()
        assert latest_facts(store, Window()).column("num_blocks").to_pylist() == [60, 5]
    assert [(f["worker"], f["at_ns"], f["num_blocks"], f["block_size"], f["flags"]) for f in found] == [
        ("a", 2, 80, 16, [("x", "1")]),
        ("late", 7, 5, None, None),
    ]


def test_marks_in_time_order_and_by_kind():
    """All marks of the window, or only some kinds."""
    rows = [{"at_ns": 3, "mark": "fault"}, {"at_ns": 1, "mark": "deployed"}, {"at_ns": 9, "mark": "gap"}]
    with store_of(mark=rows) as store:
        assert marks(store, Window(0, 5)).column("mark").to_pylist() == ["deployed", "fault"]
        assert marks(store, Window(), ["gap"]).column("at_ns").to_pylist() == [9]


def sample(at_s, value, name="preemptions_total", worker="w", **labels):
    """One scraped number."""
    return {"worker": worker, "at_ns": START_NS + at_s * S, "name": name, "value": value, "labels": labels or None}


def test_counters_become_increases_and_resets_are_seen():
    """5, 8, then 2 after a restart, then 6: increases 3, 2 (a reset) and 4, in all 9."""
    rows = [sample(0, 5.0), sample(1, 8.0), sample(2, 2.0), sample(3, 6.0)]
    with store_of(sample=rows) as store:
        series = sample_series(store, LIVE, ["preemptions_total"]).to_pylist()
        (total,) = counter_increases(store, LIVE, ["preemptions_total"]).to_pylist()
    assert [(row["increase"], row["is_reset"]) for row in series] == [
        (None, None),
        (3.0, False),
        (2.0, True),
        (4.0, False),
    ]
    assert total == {
        "name": "preemptions_total",
        "worker": "w",
        "increase": 9.0,
        "num_resets": 1,
        "num_samples": 4,
    }


def test_the_first_increase_counts_from_the_sample_before_the_window():
    """The window begins between two samples: the increase that ended in it is in it."""
    window = Window(START_NS + 5 * S, START_NS + 15 * S)
    with store_of(sample=[sample(0, 1.0), sample(10, 4.0), sample(20, 9.0)]) as store:
        assert sample_series(store, window, ["preemptions_total"]).column("increase").to_pylist() == [3.0]
        assert sample_series(store, window, ["preemptions_total"], lookback_s=1).column("increase").to_pylist() == [
            None
        ]


def test_series_are_kept_apart_by_worker_and_labels():
    """Two workers and two label sets, the labels in any order, are their own counters; a gauge has no increase."""
    rows = [
        sample(0, 1.0, a="1", b="2"),
        sample(0, 50.0, a="9"),
        sample(0, 10.0, worker="x"),
        sample(1, 2.0, b="2", a="1"),
        sample(1, 70.0, a="9"),
        sample(1, 15.0, worker="x"),
        sample(0, 3.0, name="requests_running"),
        sample(1, 1.0, name="requests_running"),
    ]
    with store_of(sample=rows) as store:
        totals = counter_increases(store, LIVE, ["preemptions_total"]).to_pylist()
        gauge = sample_series(store, LIVE, ["requests_running"]).to_pylist()
    assert [(row["worker"], row["increase"]) for row in totals] == [("w", 21.0), ("x", 5.0)]
    assert [(row["value"], row["increase"], row["is_reset"]) for row in gauge] == [(3.0, None, None), (1.0, None, None)]
