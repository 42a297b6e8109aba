"""Checks of the telemetry: what is fine, what is a warning, and what contradicts itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diagnosis.checks.check import Check
from diagnosis.facts import BlockTotals, Facts, Gaps, MarkFact, StepFacts, WorkerFacts
from diagnosis.quality import caching_is_off, check, penalty
from tests.cause_scenarios import N
from tests.factories import facts, request_facts
from tests.moves_scenarios import handover


def found(known: Facts, name: str) -> Check | None:
    """The check of that name; None where it could not be made."""
    return next((c for c in check(known) if c.check == name), None)


def status(known: Facts, name: str) -> str | None:
    made = found(known, name)
    return None if made is None else made.status


def plain(n: int = 10, **known: Any) -> Facts:
    """Requests 1 s apart: 0.1 s of queue, 0.1 s of prefill."""
    columns = [key for key in known if key.endswith(("_s", "_tokens", "_preemptions")) and key != "clock_error_s"]
    numbers = {key: known.pop(key) for key in columns}
    vantage = known.pop("vantage", "engine")
    requests = request_facts(
        np.arange(n) * 1.0, queue=[0.1] * n, prefill=[0.1] * n, decode=[0.5] * n, vantage=vantage, **numbers
    )
    return facts(requests, name="suspect", **known)


def steps(probe: list[float], duration: list[float]) -> StepFacts:
    m = len(probe)
    return StepFacts(
        np.zeros(m, dtype=np.int64), ("w0",), np.arange(m) * 1.0, np.array(duration), {"probe_s": np.array(probe)}
    )


def test_a_sound_window_has_no_warning() -> None:
    """Nothing to complain about: every check that can be made is ok."""
    assert {c.status for c in check(plain())} == {"ok"}


def test_gaps_are_counted_with_what_they_lost() -> None:
    """Two gaps, 1,200 rows and an unknown number: a warning that says so."""
    marks = [
        MarkFact("gap", 1.0, "spool", None, {"dropped_rows": "1200"}),
        MarkFact("gap", 2.0, "spool", None, {"dropped_rows": "many"}),
    ]
    made = found(plain(marks=marks), "gaps")
    assert made is not None
    assert made.status == "warning"
    assert made.statement == "suspect: 2 gaps in the telemetry, 1,200 rows known to be lost"


@pytest.mark.parametrize(("error_s", "expected"), [(None, "ok"), (0.001, "ok"), (0.05, "warning")])
def test_clocks(error_s: float | None, expected: str) -> None:
    """More than 10 ms apart is a warning; not compared is no fault, since instants are not joined."""
    assert status(plain(clock_error_s=error_s), "clocks") == expected


def test_values_that_cannot_be_are_said() -> None:
    """Three negative durations were taken as unknown."""
    known = plain()
    known = replace(known, requests=replace(known.requests, num_invalid=3))
    made = found(known, "values")
    assert made is not None
    assert made.status == "warning"
    assert "3 durations or counts" in made.statement


def test_double_delivery_is_no_fault() -> None:
    """Rows that came twice count once; it is said."""
    known = plain()
    known = replace(known, requests=replace(known.requests, num_duplicates=2))
    assert status(known, "duplicates") == "ok"


@pytest.mark.parametrize(("wrong", "expected"), [(0, None), (1, "warning"), (2, "contradiction")])
def test_instants_that_run_backwards(wrong: int, expected: str | None) -> None:
    """One of 100 first tokens before its arrival is a warning, two are a contradiction."""
    known = plain(100)
    known.requests.first_token_s[:wrong] = known.requests.arrival_s[:wrong] - 1.0
    assert status(known, "instants") == expected


@pytest.mark.parametrize(("wrong", "expected"), [(1, "ok"), (2, "contradiction")])
def test_phases_that_do_not_fit(wrong: int, expected: str) -> None:
    """0.1 s of queue and 0.1 s of prefill fit into a TTFT of 0.2 s; 5 s of queue do not (2 of 100 requests)."""
    known = plain(100)
    known.requests.get("queue_s")[:wrong] = 5.0
    assert status(known, "phases") == expected


@pytest.mark.parametrize(("alone", "expected"), [(0, "ok"), (1, "ok"), (2, "warning"), (100, None)])
def test_client_requests_without_engine_row(alone: int, expected: str | None) -> None:
    """Two of 100 are a warning; where no engine was seen at all there is nothing to join."""
    known = plain(100, vantage="client")
    known.requests.engine_arrival_s[:alone] = np.nan
    assert status(known, "engine_rows") == expected
    assert status(plain(), "engine_rows") is None


@pytest.mark.parametrize(("early", "expected"), [(1, "ok"), (2, "contradiction")])
def test_a_client_cannot_see_a_token_before_it_was_made(early: int, expected: str) -> None:
    """The client's TTFT is 0.2 s; the engine says 0.3 s for two of 100."""
    engine = np.full(100, 0.19)
    engine[:early] = 0.3
    made = found(plain(100, vantage="client", engine_ttft_s=engine), "client_ttft")
    assert made is not None
    assert made.status == expected


@pytest.mark.parametrize(
    ("told", "counted", "expected"),
    [
        (50.0, 5000.0, "ok"),
        (50.0, 4600.0, "ok"),
        (50.0, 4000.0, "warning"),
        (50.0, 0.0, "contradiction"),
        (0.0, 5000.0, "contradiction"),
    ],
)
def test_cached_tokens_and_the_hit_counter(told: float, counted: float, expected: str) -> None:
    """100 requests of 50 cached tokens against the engine's counter; one of the two at 0 is a contradiction."""
    known = plain(100, cached_tokens=[told] * 100, samples={"prefix_hits_tokens_total": counted})
    assert status(known, "cached_tokens") == expected


@pytest.mark.parametrize(
    ("own", "counted", "says"),
    [
        (20.0, 2000.0, "are self hits"),
        (20.0, 4000.0, "do not add up"),
        (0.0, 2000.0, "not telling the truth"),
    ],
)
def test_a_counter_that_counts_self_hits_is_told_apart_from_reuse(own: float, counted: float, says: str) -> None:
    """100 requests found nothing of others and 20 tokens of their own each: 2,000 hits by the counter are no reuse."""
    known = plain(
        100, cached_tokens=[0.0] * 100, self_hit_tokens=[own] * 100, samples={"prefix_hits_tokens_total": counted}
    )
    (told,) = [found for found in check(known) if found.check == "cached_tokens"]
    assert says in told.statement


@pytest.mark.parametrize(
    ("counted", "expected"), [(5000.0, "ok"), (9000.0, "ok"), (4000.0, "warning"), (0.0, "contradiction")]
)
def test_workers_that_share_a_request_both_count_what_they_found(counted: float, expected: str) -> None:
    """100 requests of 50 cached tokens, each decoded by a second worker, which finds its own: more than they tell is no wonder, less is."""
    known = replace(
        plain(N, cached_tokens=[5000.0 / N] * N, samples={"prefix_hits_tokens_total": counted}), handover=handover()
    )
    assert status(known, "cached_tokens") == expected


@pytest.mark.parametrize(
    ("times", "is_split", "expected"), [(2.0, True, "ok"), (2.0, False, "warning"), (2.5, True, "warning")]
)
def test_a_request_that_was_handed_over_is_finished_twice(times: float, is_split: bool, expected: str) -> None:
    """By the worker that prefilled it and by the one that decoded it; not more often, and not where nothing is handed over."""
    known = plain(N, samples={"requests_finished_total": times * N})
    assert status(replace(known, handover=handover()) if is_split else known, "requests") == expected


def test_almost_nothing_cached_is_no_contradiction() -> None:
    """Below 1,000 tokens a difference says nothing."""
    known = plain(10, cached_tokens=[1.0] * 10, samples={"prefix_hits_tokens_total": 0.0})
    assert status(known, "cached_tokens") == "ok"


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.0, 1.0, "ok"), (-0.1, 0.5, "contradiction"), (0.0, 1.5, "contradiction")]
)
def test_kv_usage_is_a_ratio(low: float, high: float, expected: str) -> None:
    """Usage below 0 or above 1 cannot be."""
    assert status(plain(samples={"kv_usage_ratio:min": low, "kv_usage_ratio:max": high}), "kv_usage") == expected


@pytest.mark.parametrize(("counted", "expected"), [(10.0, "ok"), (13.0, "ok"), (14.0, "warning")])
def test_preemptions_by_request_and_by_counter(counted: float, expected: str) -> None:
    """Ten by request: three more or less are what scraping explains."""
    assert status(plain(num_preemptions=[1.0] * 10, samples={"preemptions_total": counted}), "preemptions") == expected


@pytest.mark.parametrize(("counted", "expected"), [(100.0, "ok"), (111.0, "ok"), (120.0, "warning")])
def test_evictions_by_event_and_by_counter(counted: float, expected: str) -> None:
    """100 events; 10 % more or less are what scraping explains."""
    known = plain(samples={"blocks_evicted_total": counted}, blocks=BlockTotals(500, 100, None, 0))
    assert status(known, "evictions") == expected


@pytest.mark.parametrize(("counted", "expected"), [(100.0, "ok"), (50.0, "ok"), (120.0, "warning")])
def test_requests_that_nobody_recorded(counted: float, expected: str) -> None:
    """The engine finished more than are stored: some were missed. Fewer is a scrape that began late."""
    assert status(plain(90, num_warmup=10, samples={"requests_finished_total": counted}), "requests") == expected


@pytest.mark.parametrize(("unfinished", "expected"), [(0, None), (1, "ok"), (2, "warning")])
def test_unfinished_requests(unfinished: int, expected: str | None) -> None:
    """More than one in a hundred is a warning."""
    assert status(plain(100, num_unfinished=unfinished), "unfinished") == expected


def test_several_tokens_in_a_chunk_are_said() -> None:
    """Two chunks for ten tokens: single gaps are an average."""
    gaps = Gaps(np.arange(10), np.arange(10) + 0.3, np.full(10, 0.1), np.full(10, 9.0))
    known = plain(output_tokens=[10.0] * 10)
    made = found(replace(known, requests=replace(known.requests, gaps=gaps)), "chunks")
    assert made is not None
    assert "100 % of requests got several tokens" in made.statement


def test_estimated_computed_tokens_are_said() -> None:
    """No request says what was cached, yet computed tokens are known: they come from the engine's counters."""
    assert status(plain(computed_tokens=[50.0] * 10), "computed_tokens") == "ok"
    assert status(plain(computed_tokens=[50.0] * 10, cached_tokens=[50.0] * 10), "computed_tokens") is None


@pytest.mark.parametrize(("probe", "expected"), [(0.005, "ok"), (0.02, "warning")])
def test_the_probe_itself(probe: float, expected: str) -> None:
    """More than 1 % of step time is too much."""
    assert status(plain(steps=steps([probe] * 4, [1.0] * 4)), "probe") == expected


def test_unknown_probe_times_say_nothing() -> None:
    """Null is not 0 %."""
    assert status(plain(steps=steps([np.nan] * 4, [1.0] * 4)), "probe") is None


def test_ten_warnings_are_not_ten_times_as_bad() -> None:
    """The worst check counts once."""
    warning, contradiction = Check("a", "warning", ""), Check("b", "contradiction", "")
    assert penalty([warning] * 10) == 0.95
    assert penalty([warning, contradiction, contradiction]) == 0.7
    assert penalty([]) == 1.0


def test_identical_counters_with_opposite_truth() -> None:
    """Hits 0 of 0 lookups in both windows. Where requests say 0 cached tokens too, caching was off; where they say 50 each,
    the counter is not telling the truth: the same counters, a cause in one window and a contradiction in the other."""
    counters = {"prefix_queries_tokens_total": 0.0, "prefix_hits_tokens_total": 0.0}
    off = plain(100, cached_tokens=[0.0] * 100, samples=counters)
    lying = plain(100, cached_tokens=[50.0] * 100, samples=counters)
    assert caching_is_off(off) == (
        True,
        "0 lookups in the prefix cache were counted, and no request had a cached token",
    )
    assert caching_is_off(lying) == (False, "5,000 prompt tokens were served from the cache")
    assert status(off, "cached_tokens") == "ok"
    assert status(lying, "cached_tokens") == "contradiction"


@pytest.mark.parametrize(
    ("caching", "off"),
    [([False], True), ([False, False], True), ([True], False), ([True, False], False), ([None], False)],
)
def test_the_workers_word_on_caching(caching: list[bool | None], off: bool) -> None:
    """Only where all workers that say so say off; the reason holds a number."""
    workers = [WorkerFacts(f"w{i}", prefix_caching=value) for i, value in enumerate(caching)]
    told, why = caching_is_off(plain(workers=workers))
    assert told is off
    assert any(c.isdigit() for c in why)
