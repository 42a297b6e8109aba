"""Live latencies: the numbers of store/metrics.py, counted in bulk; exact for Prometheus, within 1.6 % for the page."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.live.durations import durations_of, tally_gaps
from collector.live.latencies import MINUTE_NS, OTHER, Latencies
from collector.live.sketches import BOUNDS_S, EDGES_S, quantile, tally
from engine_probe.schema import table_from_rows
from store.metrics import itl_s, metric

NOW_NS = 1_764_403_200_000_000_000
MS = 1_000_000
_NUMBERS = itertools.count()


def row(**columns: Any) -> dict[str, Any]:
    """A row of a request that no other row tells."""
    base = {
        "request_id": f"r{next(_NUMBERS)}",
        "vantage": "engine",
        "state": "finished",
        "worker": "w0",
        "model": "m",
        "arrival_ns": NOW_NS,
        "at_ns": NOW_NS,
    }
    return base | columns


def table(*rows: dict[str, Any]) -> pa.Table:
    return table_from_rows("request", rows)


def histogram(latencies: Latencies, name: str) -> tuple[list[int], float]:
    """(counts by Prometheus bound, sum in s) of the only series."""
    ((_, series),) = latencies.shown()
    part = series.total[name]
    return part.counts.tolist(), part.total_s


def test_worked_example() -> None:
    """One request: TTFT 100 ms, three gaps of 20, 20 and 40 ms, E2E 180 ms, TPOT 80/3 ms."""
    latencies = Latencies(10)
    tokens = [NOW_NS + ms * MS for ms in (100, 120, 140, 180)]
    latencies.observe(
        table(
            row(
                first_token_ns=tokens[0],
                last_token_ns=tokens[-1],
                token_ns=tokens,
                output_tokens=4,
                queue_s=0.03,
                prompt_tokens=50,
            )
        ),
        NOW_NS,
    )
    bounds = BOUNDS_S.tolist()
    ttft, ttft_sum = histogram(latencies, "ttft")
    assert (ttft[bounds.index(0.1)], sum(ttft), ttft_sum) == (1, 1, pytest.approx(0.1))
    itl, itl_sum = histogram(latencies, "itl")
    assert (itl[bounds.index(0.02)], itl[bounds.index(0.05)], sum(itl)) == (2, 1, 3)
    assert itl_sum == pytest.approx(0.08)
    assert histogram(latencies, "e2e")[1] == pytest.approx(0.18)
    assert histogram(latencies, "tpot")[1] == pytest.approx(0.08 / 3)
    assert histogram(latencies, "queue")[1] == pytest.approx(0.03)
    ((_, series),) = latencies.shown()
    assert "prefill" not in series.total, "what no row tells has no series"
    assert series.sums == {"prompt_tokens": 50, "output_tokens": 4}
    assert series.states == {"finished": 1}


def test_chunk_of_several_tokens_counts_for_each() -> None:
    """A gap of 40 ms before a chunk of 4 tokens is four gaps of 10 ms; the first chunk has none."""
    latencies = Latencies(10)
    latencies.observe(table(row(token_ns=[NOW_NS, NOW_NS + 40 * MS, NOW_NS + 45 * MS], token_counts=[9, 4, 1])), NOW_NS)
    counts, total_s = histogram(latencies, "itl")
    bounds = BOUNDS_S.tolist()
    assert (counts[bounds.index(0.01)], counts[bounds.index(0.005)], sum(counts)) == (4, 1, 5)
    assert total_s == pytest.approx(0.045)


def test_rows_without_tokens_between_others_shift_nothing() -> None:
    """Null, empty and single-token rows have no gaps and do not join their neighbours."""
    latencies = Latencies(10)
    rows = [
        row(token_ns=[NOW_NS, NOW_NS + 10 * MS]),
        row(),
        row(token_ns=[]),
        row(token_ns=[NOW_NS + 999 * MS]),
        row(token_ns=[NOW_NS + 5_000 * MS, NOW_NS + 5_020 * MS], token_counts=[1, 1]),
    ]
    latencies.observe(table(*rows), NOW_NS)
    counts, total_s = histogram(latencies, "itl")
    assert sum(counts) == 2
    assert total_s == pytest.approx(0.03)


_gap = st.integers(0, 5_000) | st.integers(0, 10**11)


@st.composite
def _requests(draw: st.DrawFn) -> dict[str, Any]:
    gaps = draw(st.none() | st.lists(_gap, max_size=6))
    tokens = None if gaps is None else (NOW_NS + np.cumsum([0, *gaps])).tolist()
    counts = (
        None
        if tokens is None
        else draw(st.none() | st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens)))
    )
    first = draw(st.none() | st.integers(0, 10**12))
    last = None if first is None else first + draw(st.integers(0, 10**12))
    return row(
        worker=draw(st.sampled_from(["a", "b", None])),
        at_ns=NOW_NS - draw(st.sampled_from([0, 1, 2, 30])) * MINUTE_NS,
        first_token_ns=None if first is None else NOW_NS + first,
        last_token_ns=None if last is None else NOW_NS + last,
        output_tokens=draw(st.none() | st.integers(0, 50)),
        queue_s=draw(st.none() | st.floats(0, 700)),
        token_ns=tokens,
        token_counts=counts,
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(_requests(), min_size=1, max_size=20))
def test_bulk_counts_are_those_of_the_definitions(rows: list[dict[str, Any]]) -> None:
    """Histograms by worker equal counting `store/metrics.py` row by row."""
    latencies = Latencies(10)
    latencies.observe(table(*rows), NOW_NS)
    shown = {key.worker: series for key, series in latencies.shown()}
    for worker in {item["worker"] for item in rows}:
        mine = [item for item in rows if item["worker"] == worker]
        expected: dict[str, list[float]] = {
            "ttft": [value for item in mine if (value := metric("ttft").of(item)) is not None],
            "tpot": [value for item in mine if (value := metric("tpot").of(item)) is not None],
            "e2e": [value for item in mine if (value := metric("e2e").of(item)) is not None],
            "queue": [item["queue_s"] for item in mine if item["queue_s"] is not None],
            "itl": [gap for item in mine for gap in itl_s(item["token_ns"], item["token_counts"]) or ()],
        }
        series = shown[worker or ""]
        for name, values in expected.items():
            got = series.total[name].counts if name in series.total else np.zeros(len(BOUNDS_S) + 1)
            # A value within a nanosecond's rounding of a bound may be counted on either side of it.
            assert got.sum() == len(values), name
            for bound, below in zip(BOUNDS_S, np.cumsum(got), strict=False):
                assert sum(v <= bound - 1e-9 for v in values) <= below <= sum(v <= bound + 1e-9 for v in values), name
            if name in series.total:
                assert series.total[name].total_s == pytest.approx(sum(values), rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 2e4) | st.sampled_from(BOUNDS_S.tolist()), min_size=1, max_size=50))
def test_prometheus_counts_are_exact_at_every_bound(values: list[float]) -> None:
    """Also for values on a bound, one step beside it, and at the edges of the log buckets."""
    near = [np.nextafter(value, end) for value in values for end in (0.0, 1e9)]
    array = np.array([*values, *near, *EDGES_S[::97]])
    counts = tally(array).coarse[0]
    assert np.cumsum(counts).tolist() == [int((array <= bound).sum()) for bound in BOUNDS_S] + [len(array)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200), st.sampled_from(["0.5", "0.9", "0.99", "1"]))
def test_live_quantile_is_within_one_bucket_of_the_exact_one(values: list[float], q: str) -> None:
    """Off by at most half of 1/32 of the value."""
    from store.metrics import nearest_rank

    got, exact = quantile(tally(np.array(values)).fine[0], q), nearest_rank(values, q)
    assert got is not None
    assert exact is not None
    assert abs(got - exact) <= exact / 32


def test_engine_is_shown_where_a_model_has_it_else_the_client_never_the_router() -> None:
    """One request measured twice is shown once; a model seen by clients only is shown by them."""
    latencies = Latencies(10)
    seen = [("engine", "m"), ("client", "m"), ("router", "m"), ("client", "only-clients"), ("router", "only-router")]
    latencies.observe(table(*(row(vantage=vantage, model=model, queue_s=0.1) for vantage, model in seen)), NOW_NS)
    assert sorted((key.vantage, key.model) for key, _ in latencies.shown()) == [
        ("client", "only-clients"),
        ("engine", "m"),
    ]


def test_rows_of_imported_runs_are_not_live() -> None:
    """An import of last week does not move today's histograms."""
    latencies = Latencies(10)
    latencies.observe(table(row(queue_s=0.1, run_id="last-week"), row(queue_s=0.2)), NOW_NS)
    assert histogram(latencies, "queue")[1] == pytest.approx(0.2)


def test_names_beyond_the_limit_share_one_series() -> None:
    """A client that invents workers fills no memory, and nothing is lost from the sum."""
    latencies = Latencies(3)
    for start in range(0, 50, 10):
        latencies.observe(table(*(row(worker=f"w{start + i}", queue_s=1.0) for i in range(10))), NOW_NS)
    shown = {key.worker: series for key, series in latencies.shown()}
    assert len(shown) == 4
    assert shown[OTHER].total["queue"].total_s == pytest.approx(47.0)
    assert shown[OTHER].states == {"finished": 47}


def test_recent_minutes_forget() -> None:
    """What ended more than the kept minutes ago is in the histograms, not in the recent picture."""
    latencies = Latencies(10)
    latencies.observe(table(row(queue_s=1.0), row(queue_s=9.0, at_ns=NOW_NS - 60 * MINUTE_NS)), NOW_NS)
    ((_, recent),) = latencies.recent(NOW_NS, 5)
    assert recent["queue"].sum() == 1
    assert latencies.recent(NOW_NS + 10 * MINUTE_NS, 5) == []
    assert sum(histogram(latencies, "queue")[0]) == 2


def test_huge_chunk_counts_cost_no_memory() -> None:
    """A sender may claim a million million tokens in a chunk; that is a weight, not as many numbers."""
    rows = table(row(token_ns=[NOW_NS, NOW_NS + MS], token_counts=[1, 10**12]))
    column = rows.column("token_ns").combine_chunks(), rows.column("token_counts").combine_chunks()
    assert tally_gaps(*column, None, 1).fine.sum() == 10**12


def test_durations_below_zero_are_left_out() -> None:
    """A last token before the first is a fault of the sender and no latency."""
    found = durations_of(table(row(first_token_ns=NOW_NS - 1), row(first_token_ns=NOW_NS + MS)))
    assert np.isnan(found["ttft"][0])
    assert found["ttft"][1] == pytest.approx(0.001)
