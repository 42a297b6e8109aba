"""Hand-made pairs of windows for the causes that are about what is told: they fire, are quiet, and are close to firing.

As in `cause_scenarios.py`: (baseline, suspect, metric), 60 requests a window. No latency moves where they fire.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diagnosis.facts import Facts
from tests.cause_scenarios import N, Pair, Scenarios, pair, plain, worker
from tests.factories import facts

QUERIES, HITS = "prefix_queries_tokens_total", "prefix_hits_tokens_total"


def _counted(cached: float, hits: float) -> Facts:
    """Each of the 60 requests says that it found `cached` of 160 prompt tokens; the counters say 9,600 looked up, `hits` found."""
    requests = plain(0.16 - cached * 0.001, cached_tokens=cached, computed_tokens=160.0 - cached)
    return facts(requests, workers=[worker(500, caching=True)], samples={QUERIES: 9600.0, HITS: hits})


def lying() -> Pair:
    """6,000 tokens were found in both windows by the requests; the counter of one says 0 of 9,600."""
    return pair(_counted(100.0, 6000.0), _counted(100.0, 0.0))


def agreeing() -> Pair:
    """6,000 by the requests and by the counter."""
    return pair(_counted(100.0, 6000.0), _counted(100.0, 6000.0))


def truly_nothing() -> Pair:
    """The same counters as where they lie, and no request found anything either: they tell the truth."""
    return pair(_counted(100.0, 6000.0), _counted(0.0, 0.0))


def _seen_by_callers(ahead_s: float, network_s: float = 0.001) -> Facts:
    """Callers `network_s` away on each side of a worker whose clock is `ahead_s` ahead of theirs."""
    requests = plain()
    engine_ttft = requests.first_token_s - requests.arrival_s
    seen = replace(
        requests,
        vantage="client",
        arrival_s=requests.arrival_s - network_s,
        first_token_s=requests.first_token_s + network_s,
        last_token_s=requests.last_token_s + network_s,
        end_s=requests.end_s + network_s,
        engine_arrival_s=requests.engine_arrival_s + ahead_s,
        scheduled_s=requests.scheduled_s + ahead_s,
        engine_first_s=requests.engine_first_s + ahead_s,
        engine_last_s=requests.engine_last_s + ahead_s,
        numbers={**requests.numbers, "engine_ttft_s": engine_ttft, "network_s": np.full(N, 2 * network_s)},
    )
    return facts(seen)


def ahead() -> Pair:
    """Half a second ahead: first tokens are seen 0.499 s before they were made."""
    return pair(_seen_by_callers(0.0), _seen_by_callers(0.5))


def in_time() -> Pair:
    """The same clocks."""
    return pair(_seen_by_callers(0.0), _seen_by_callers(0.0))


def far_away() -> Pair:
    """The way takes 0.3 s each way, and a clock 0.2 s ahead is possible with it: nothing is proven, the front end is slower."""
    return pair(_seen_by_callers(0.0), _seen_by_callers(0.2, network_s=0.3))


TOLD: dict[str, Scenarios] = {
    "telemetry_contradiction": Scenarios(lying, agreeing, truly_nothing, None),
    "clock_skew": Scenarios(ahead, in_time, far_away, None),
}
