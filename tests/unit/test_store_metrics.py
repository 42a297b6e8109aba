"""The definitions of design section 4, with numbers worked by hand; Python and SQL agree."""

from __future__ import annotations

import duckdb
import pytest

from engine_probe.errors import UsageError
from engine_probe.events import column_names
from engine_probe.schema import table_from_rows
from store.metrics import (
    CACHE_SQL,
    METRICS,
    PRESET_SLOS,
    THROUGHPUT,
    Slo,
    at_least_one_slow,
    goodput_rps,
    goodput_sql,
    hit_class,
    hit_class_sql,
    itl_s,
    meets_slo,
    meets_slo_sql,
    metric,
    reusable_tokens,
)

S = 1_000_000_000
BASE = {"request_id": "r", "vantage": "client", "state": "finished", "at_ns": 9 * S, "arrival_ns": 1 * S}
FULL = BASE | {
    "first_token_ns": 1 * S + 250_000_000,
    "last_token_ns": 2 * S + 250_000_000,
    "end_ns": 2 * S + 300_000_000,
    "output_tokens": 11,
}


def in_sql(expression, *rows):
    """Values of an SQL expression over request rows."""
    connection = duckdb.connect()
    connection.register("request", table_from_rows("request", rows))
    return [value for (value,) in connection.execute(f"SELECT {expression} FROM request").fetchall()]


def test_definitions_on_one_request():
    """TTFT 0.25 s; TPOT 1 s over 10 gaps; E2E to the last token 1.25 s, to the end of the stream 1.3 s; tail 0.05 s."""
    expected = {"ttft_s": 0.25, "tpot_s": 0.1, "e2e_token_s": 1.25, "e2e_stream_s": 1.3, "protocol_tail_s": 0.05}
    for name, value in expected.items():
        assert METRICS[name].of(FULL) == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("name", ["ttft_s", "tpot_s", "e2e_token_s", "e2e_stream_s", "protocol_tail_s"])
def test_time_below_zero_is_unknown(name):
    """Instants in the wrong order (a clock that jumped) make no duration; at the same instant it is 0."""
    start, end = (METRICS[name].needs[:2]) if name != "protocol_tail_s" else ("last_token_ns", "end_ns")
    backwards = FULL | {start: 5 * S, end: 5 * S - 1}
    assert METRICS[name].of(backwards) is None
    same = FULL | {start: 5 * S, end: 5 * S}
    assert METRICS[name].of(same) == 0.0
    assert in_sql(METRICS[name].expression("request"), backwards, same) == [None, 0.0]


@pytest.mark.parametrize("tokens", [None, 0, 1])
def test_tpot_needs_two_tokens(tokens):
    """With one token, none, or an unknown number there is no time per output token."""
    row = FULL | {"output_tokens": tokens}
    assert METRICS["tpot_s"].of(row) is None
    assert in_sql(METRICS["tpot_s"].expression(), row) == [None]


def test_unknown_instants_give_unknown_metrics():
    """A request without a first token has no TTFT: null, not zero."""
    assert METRICS["ttft_s"].of(BASE) is None
    assert in_sql(METRICS["ttft_s"].expression("request"), BASE) == [None]


@pytest.mark.parametrize("name", list(METRICS))
def test_sql_and_python_agree_to_the_bit(name):
    """The two forms of a metric give the same float on known and on unknown values."""
    rows = [FULL | {f"{phase}_s": 0.1 for phase in ("queue", "prefill", "decode")}, BASE, FULL | {"output_tokens": 7}]
    assert in_sql(METRICS[name].expression("request"), *rows) == [METRICS[name].of(row) for row in rows]


@pytest.mark.parametrize("name", list(METRICS))
def test_metrics_read_columns_of_the_contract(name):
    """What a metric needs exists in the request kind."""
    assert set(METRICS[name].needs) <= set(column_names("request"))


def test_metric_names_have_short_forms_and_unknown_ones_are_refused():
    """`ttft` is `ttft_s`, `e2e` the time to the last token; a typo names what there is."""
    assert metric("ttft").name == "ttft_s"
    assert metric("e2e").name == "e2e_token_s"
    with pytest.raises(UsageError, match=r"tftt.*ttft_s"):
        metric("tftt")


def test_itl_splits_a_chunk_of_several_tokens():
    """Chunks at 0, 30 and 40 ms with 1, 3 and 1 tokens: three gaps of 10 ms, then one of 10 ms."""
    assert itl_s([0, 30_000_000, 40_000_000], [1, 3, 1]) == pytest.approx([0.01] * 4)
    assert itl_s([0, 30_000_000, 40_000_000]) == pytest.approx([0.03, 0.01])
    assert itl_s([5], [1]) == []
    assert itl_s(None) is None


SLO = Slo(ttft_s=0.25, tpot_s=0.1)


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({}, True),
        ({"state": "aborted"}, False),
        ({"first_token_ns": 1 * S + 250_000_001}, False),
        ({"output_tokens": 10}, False),  # 1 s over 9 gaps is 0.111 s
        ({"output_tokens": 1}, True),  # TPOT does not apply
        ({"output_tokens": None}, False),  # unknown is not met
        ({"first_token_ns": None}, False),
    ],
)
def test_slo_is_met_by_known_values_within_limits(change, met):
    """Limits include their value; what is unknown does not count as good."""
    row = FULL | change
    assert meets_slo(row, SLO) is met
    assert in_sql(meets_slo_sql(SLO), row) == [met]


def test_goodput_counts_good_requests_per_second():
    """Two of three requests are good in 4 s: 0.5 requests/s."""
    rows = [FULL, FULL, FULL | {"state": "failed"}]
    assert goodput_rps(rows, SLO, 4.0) == 0.5
    assert in_sql(goodput_sql(SLO, 4.0), *rows) == [0.5]
    assert goodput_rps(rows, SLO, 0.0) is None


def test_presets_judge_a_finished_request():
    """Every preset has a limit and can be asked in SQL."""
    for slo in PRESET_SLOS.values():
        assert in_sql(meets_slo_sql(slo), FULL)[0] in (True, False)
        assert slo != Slo()


def test_throughput_names_its_unit():
    """Output tokens, all tokens and requests are three different numbers: 22, 222 and 2."""
    rows = [FULL | {"prompt_tokens": 100}] * 2
    assert [in_sql(sql.format(r=""), *rows)[0] for sql in THROUGHPUT.values()] == [22, 222, 2]
    assert list(THROUGHPUT) == ["output_tokens/s", "total_tokens/s", "requests/s"]


@pytest.mark.parametrize(
    ("cached", "prompt", "block", "expected"),
    [
        (64, 65, 16, "hit"),  # 64 of 64 reusable
        (48, 64, 16, "hit"),  # the last token is always computed, so 48 of 64 can be reused
        (32, 65, 16, "partial"),
        (0, 65, 16, "miss"),
        (None, 65, 16, None),
        (32, None, 16, None),
        (32, 65, None, None),
    ],
)
def test_hit_class(cached, prompt, block, expected):
    """hit: all reusable blocks; miss: none; partial: between; unknown where a number is missing."""
    assert hit_class(cached, prompt, block) == expected
    row = BASE | {"cached_tokens": cached, "prompt_tokens": prompt}
    assert in_sql(hit_class_sql("NULL" if block is None else str(block)), row) == [expected]


def test_a_prompt_below_one_block_reuses_nothing():
    """16 tokens in blocks of 16: the last one must be computed, so no full block can be reused."""
    assert reusable_tokens(16, 16) == 0
    assert reusable_tokens(17, 16) == 16
    assert reusable_tokens(0, 16) == 0


def test_cache_numbers_are_three():
    """Of 3 requests 1 is unknown; 1 of 2 hit; 30 of 300 tokens; 30 tokens."""
    rows = [
        BASE | {"cached_tokens": 30, "prompt_tokens": 100},
        BASE | {"cached_tokens": 0, "prompt_tokens": 200},
        BASE | {"prompt_tokens": 500},
    ]
    assert [in_sql(sql.format(r=""), *rows)[0] for sql in CACHE_SQL.values()] == [0.5, 0.1, 30]


def test_slow_calls_add_up():
    """With 1 % slow calls, 69 calls meet a slow one every second time: 1 - 0.99**69 = 0.5001."""
    assert at_least_one_slow(0.01, 69) == pytest.approx(0.50016, abs=1e-5)
    assert at_least_one_slow(0.0, 10) == 0.0
    assert at_least_one_slow(1.0, 3) == 1.0
    assert at_least_one_slow(1.0, 0) == 0.0
    with pytest.raises(ValueError, match=r"0\.\.1"):
        at_least_one_slow(1.2, 3)
