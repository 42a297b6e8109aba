"""A row of a sample stands for several: counts, rates, percentiles, histograms and estimates of lost blocks, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from collector.live.latencies import Latencies
from collector.live.sketches import quantile
from collector.reading.series_queries import SeriesRequest, series
from diagnosis.sampled import around, half_interval, within
from engine_probe.schema import table_from_rows
from store.evidence.lineage import block_rate, block_totals, restored_blocks
from store.evidence.one_request import one_requests
from store.interface import Batch, Store, Window
from store.metrics import Slo, count_sql, goodput_rps, total_sql, weight, weight_sql, weighted_rank
from store.open import open_store

S = 1_000_000_000
T0 = 1_780_000_000 * S


def request(number: int, ttft_s: float, rate: float | None, **more: Any) -> dict[str, Any]:
    """A finished request that arrived `number` ms after T0: 100 prompt tokens, 10 of output."""
    arrival = T0 + number * 1_000_000
    row: dict[str, Any] = {
        "request_id": f"r{number}",
        "vantage": "engine",
        "state": "finished",
        "worker": "w0",
        "model": "m",
    }
    row |= {"arrival_ns": arrival, "at_ns": arrival + 9 * S, "first_token_ns": arrival + round(ttft_s * 1e9)}
    row |= {"last_token_ns": arrival + 9 * S, "end_ns": arrival + 9 * S, "sample_rate": rate}
    return row | {"prompt_tokens": 100, "cached_tokens": 50, "output_tokens": 10} | more


MIXED = [request(0, 1.0, None), request(1, 2.0, 0.5), request(2, 3.0, 0.1), request(3, 4.0, None)]
"""Weights 1, 2, 10, 1: four rows that stand for 14 requests."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(str(tmp_path / "s.duckdb"))
    yield opened
    opened.close()


def put(store: Store, **rows: list[dict[str, Any]]) -> None:
    store.append(Batch({kind: table_from_rows(kind, part) for kind, part in rows.items()}))


def test_a_row_weighs_one_over_its_rate_and_one_where_all_were_kept() -> None:
    """null means that everything was kept."""
    assert [weight({"sample_rate": rate}) for rate in (None, 1.0, 0.5, 0.1)] == [1.0, 1.0, 2.0, 10.0]


def test_sql_weighs_as_python_does(store: Store) -> None:
    """One definition, in both languages."""
    put(store, request=MIXED)
    found = store.query(
        f"SELECT list({weight_sql('r')} ORDER BY arrival_ns), {count_sql('r')}, {total_sql('r.output_tokens', 'r')}, "
        f"{count_sql('r', 'false')} FROM request r"
    )
    assert [column[0].as_py() for column in found.columns] == [[1.0, 2.0, 10.0, 1.0], 14.0, 140.0, 0.0]


def test_goodput_counts_what_a_row_stands_for() -> None:
    """TTFT 1, 2 and 3 s meet 3 s: 1 + 2 + 10 requests in 10 s; the fourth does not."""
    assert goodput_rps(MIXED, Slo(ttft_s=3.0), 10.0) == 1.3


@pytest.mark.parametrize(
    ("q", "value"),
    [("0.05", 1.0), ("0.2", 2.0), ("0.5", 3.0), ("0.92", 3.0), ("0.93", 4.0), ("1", 4.0)],
)
def test_the_nearest_rank_by_weight(q: str, value: float) -> None:
    """Cumulative weights 1, 3, 13, 14: q = 0.05 wants 0.7, 0.2 wants 2.8, 0.92 wants 12.88, 0.93 wants 13.02."""
    assert weighted_rank(np.array([4.0, 1.0, 3.0, 2.0]), np.array([1.0, 1.0, 10.0, 2.0]), q) == value


def test_equal_weights_change_no_rank() -> None:
    """One rate everywhere: the third of ten, whatever the weight; of nothing there is none."""
    values = np.arange(10.0)
    assert weighted_rank(values, np.full(10, 10.0 / 3), "0.3") == weighted_rank(values, np.ones(10), "0.3") == 2.0
    assert weighted_rank(np.empty(0), np.empty(0), "0.5") is None


@pytest.mark.parametrize(
    ("metric", "stat", "value"),
    [
        ("requests", None, 14.0),
        ("ttft", "mean", (1 + 2 * 2 + 3 * 10 + 4) / 14),
        ("ttft", "sum", 39.0),
        ("ttft", "max", 4.0),
        ("ttft", "0.5", 3.0),
    ],
)
def test_a_series_of_a_sample_is_an_estimate_and_says_so(
    store: Store, metric: str, stat: str | None, value: float
) -> None:
    """Counts, sums and means by weight, the quantile by weight since rates differ; n is the number of rows."""
    put(store, request=MIXED)
    found = series(store, SeriesRequest(metric, Window(), stat=stat, step_s=60))
    (_, told, n) = found["series"][0]["points"][0]
    assert (told, n, found["sample_rate"]) == (pytest.approx(value), 4, 0.1)


def test_a_series_of_everything_says_that_it_is_exact(store: Store) -> None:
    """No rate anywhere: whole numbers as before."""
    put(store, request=[request(0, 1.0, None), request(1, 2.0, None)])
    found = series(store, SeriesRequest("requests", Window(), step_s=60))
    assert (found["sample_rate"], found["series"][0]["points"][0][1]) == (None, 2)


def test_a_quantile_that_is_none_is_refused_for_a_sample_too(store: Store) -> None:
    """Bad input is misuse whatever the rates."""
    from engine_probe.errors import UsageError

    put(store, request=MIXED)
    with pytest.raises(UsageError, match="no quantile"):
        series(store, SeriesRequest("ttft", Window(), stat="many", step_s=60))


def test_histograms_and_counters_count_what_rows_stand_for() -> None:
    """TTFT 1, 2, 3, 4 s with weights 1, 2, 10, 1: 14 requests, 39 s in all, 3 of them up to 2 s; tokens 140."""
    live = Latencies(10)
    live.observe(table_from_rows("request", MIXED), T0 + 10 * S)
    ((_, found),) = live.shown()
    histogram = found.total["ttft"]
    assert [histogram.counts.sum(), histogram.total_s] == pytest.approx([14.0, 39.0])
    assert (found.states, found.sums["output_tokens"]) == ({"finished": 14.0}, 140.0)
    ((_, recent),) = live.recent(T0 + 10 * S, 1)
    assert quantile(recent["ttft"], "0.5") == pytest.approx(3.0, rel=0.016)


def test_gaps_between_tokens_count_with_their_request() -> None:
    """Two gaps of 1 s in a row of weight 10, one of them of two tokens: 10 + 20 gaps, 20 s; first chunks have none."""
    row = request(0, 1.0, 0.1, token_ns=[T0 + S, T0 + 2 * S, T0 + 3 * S], token_counts=[1, 1, 2])
    live = Latencies(10)
    live.observe(table_from_rows("request", [row]), T0 + 10 * S)
    ((_, found),) = live.shown()
    assert [found.total["itl"].counts.sum(), found.total["itl"].total_s] == pytest.approx([30.0, 20.0])


def block(change: str, hash_: int, at_s: float, rate: float | None) -> dict[str, Any]:
    return {
        "worker": "w0",
        "at_ns": T0 + round(at_s * 1e9),
        "change": change,
        "block_hash": hash_,
        "tier": "device",
    } | {"sample_rate": rate}


def test_blocks_of_a_sample_are_estimated(store: Store) -> None:
    """One block of ten: 2 stored are 20, 1 evicted is 10, which was stored again; a reset is told whole."""
    rows = [block("stored", 1, 0, 0.1), block("evicted", 1, 1, 0.1), block("stored", 1, 2, 0.1)]
    put(store, block=[*rows, {**block("cleared", 0, 3, None), "block_hash": None}])
    no_tier = {"tier_taken": 0, "tier_given_up": 0, "tier_loaded": 0}
    assert block_totals(store, Window()) == {"stored": 20, "evicted": 10, "cleared": 1} | no_tier
    assert (restored_blocks(store, Window()), block_rate(store, Window())) == (10, 0.1)


def test_blocks_of_several_rates_have_the_rate_they_come_to(store: Store) -> None:
    """Weights 10 and 2 over two rows: one of six."""
    put(store, block=[block("stored", 1, 0, 0.1), block("stored", 2, 0, 0.5)])
    assert block_rate(store, Window()) == pytest.approx(2 / 12)


def test_a_request_that_two_probes_tell_has_the_rate_of_the_one_that_kept_more(store: Store) -> None:
    """A span of every request beside a plugin's row of one in ten: the request would be here without the plugin."""
    plugin = request(0, 1.0, 0.1)
    span = plugin | {"sample_rate": None, "labels": {"span_id": "s"}}
    put(store, request=[plugin, span, request(5, 1.0, 0.1), request(5, 1.0, 0.2)])
    table = one_requests(store, "true", [], ["request_id", "sample_rate"], order_by="request_id")
    assert dict(zip(table["request_id"].to_pylist(), table["sample_rate"].to_pylist(), strict=True)) == {
        "r0": None,
        "r5": 0.2,
    }


def test_half_an_interval_of_an_estimated_sum() -> None:
    """Values 3 and 4 kept at 0.1: sqrt(0.9 * 25) / 0.1 = 47.43; nothing is uncertain where all was kept."""
    assert half_interval(np.array([3.0, 4.0]), 0.1) == pytest.approx(1.96 * 47.434, rel=1e-4)
    assert half_interval(np.array([3.0, 4.0]), 1.0) == 0.0


def test_an_estimate_beyond_its_bound_goes_to_others_that_have_any() -> None:
    """40 of at most 30 leaves 10, which goes to the one with room, not to the one of which nothing is known."""
    assert within(np.array([40.0, 10.0, 0.0]), np.array([30.0, 30.0, 30.0])).tolist() == pytest.approx(
        [30.0, 20.0, 0.0]
    )
    assert within(np.array([40.0, 40.0]), np.array([30.0, 30.0])).tolist() == [30.0, 30.0]


def test_levels_of_a_sample_are_those_of_its_neighbours_in_time() -> None:
    """100 requests in 10 s: twenty of them come in 2 s. One of the sample ran from 4 to 5, which is half of the 2 s around 4.5
    and none of those around 2 and 7.5; at a rate of 0.1 it stands for ten: 0, 5, 0."""
    edges = np.array([0.0, 4.0, 5.0, 10.0])
    found = around(edges, {"x": np.array([0.0, 1.0, 0.0])}, num_seen=100, rate=0.1)["x"]
    assert found.tolist() == pytest.approx([0.0, 5.0, 0.0])


def test_a_table_without_rates_is_untouched() -> None:
    """The whole is the whole: counts stay whole numbers."""
    live = Latencies(10)
    live.observe(table_from_rows("request", [request(0, 1.0, None)]), T0 + 10 * S)
    assert live.shown()[0][1].total["ttft"].counts.dtype == np.int64
    assert pa.types.is_floating(table_from_rows("request", [request(0, 1.0, None)]).schema.field("sample_rate").type)
