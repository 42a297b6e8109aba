"""What real engines tell a little crookedly is no contradiction: stop watches at two places, and counters that were hardly read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diagnosis.checks.clocks import durations
from diagnosis.checks.reuse import cached_tokens, hit_counter
from diagnosis.facts import F64, Facts
from tests.factories import facts, request_facts

N = 400
QUERIES, HITS = "prefix_queries_tokens_total", "prefix_hits_tokens_total"


def _decoded(apart: F64) -> Facts:
    """20 requests a second that decode for a second by their own watch, and `apart` [n] s longer by their instants."""
    requests = request_facts(np.arange(N) * 0.05, queue=[0.0] * N, prefill=[0.1] * N, decode=1.0 + apart)
    return facts(replace(requests, numbers={**requests.numbers, "decode_s": np.ones(N), "stalled_s": np.zeros(N)}))


@pytest.mark.parametrize("amount", [0.15, -0.15])
def test_durations_that_part_now_and_then_are_no_clock_that_was_set(amount: float) -> None:
    """One request in twenty is 150 ms off, all over the window: as vLLM on two busy cores tells it."""
    made = durations(_decoded(np.where(np.arange(N) % 20 == 0, amount, 0.0)))
    assert made is not None
    assert made.status == "warning"


@pytest.mark.parametrize("apart", [0.5, -0.5])
def test_durations_that_part_by_one_amount_at_one_moment_are_one(apart: float) -> None:
    """The clock was set by half a second while ten requests decoded."""
    among = (np.arange(N) >= 100) & (np.arange(N) < 110)
    made = durations(_decoded(np.where(among, apart, 0.0)))
    assert made is not None
    assert made.contradicts


def test_durations_that_mostly_part_are_not_true() -> None:
    """However they scatter: more than half of the requests."""
    made = durations(_decoded(np.where(np.arange(N) % 2 == 0, 0.4, -0.4)))
    assert made is not None
    assert made.contradicts


@pytest.mark.parametrize(("span_s", "is_asked"), [(0.0, False), (100.0, False), (390.0, True)])
def test_a_counter_that_was_hardly_read_contradicts_nobody(span_s: float, is_asked: bool) -> None:
    """It rose by 0 between two scrapes that lie next to each other in 400 s; requests found 20,000 tokens in all of them."""
    requests = request_facts(np.arange(N) * 1.0, queue=[0.0] * N, prefill=[0.1] * N, prompt_tokens=[100.0] * N)
    samples = {QUERIES: 40_000.0, HITS: 0.0, f"{HITS}:span_s": span_s}
    telling = replace(requests, numbers={**requests.numbers, "cached_tokens": np.full(N, 50.0)})
    made = cached_tokens(facts(telling, samples=samples))
    assert (made is not None and made.contradicts) == is_asked
    counted = {**samples, "prompt_tokens_cached_total": 20_000.0}
    made = hit_counter(facts(requests, samples=counted))
    assert (made is not None and made.contradicts) == is_asked
