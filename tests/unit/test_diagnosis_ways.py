"""Ways between caller and engine, worked by hand: in, back, and what may be either."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diagnosis.facts import Facts
from diagnosis.ledger.ways import Ways, ways
from tests.cause_scenarios import N, plain
from tests.factories import facts

RAMP = np.arange(N) / (N - 1.0)
"""0 to 1, one request after the other."""


def linked(into: Any = 0.001, back: Any = 0.001, ahead_s: Any = 0.0, moved_s: float = 0.0) -> Facts:
    """Callers `into` and `back` s away from an engine whose clock is `ahead_s` ahead; their instants were moved by `moved_s`."""
    r = plain()
    into, back, ahead = (np.broadcast_to(np.asarray(value, dtype=float), N) for value in (into, back, ahead_s))
    told = replace(
        r,
        vantage="client",
        arrival_s=r.arrival_s - into + moved_s,
        first_token_s=r.first_token_s + back + moved_s,
        engine_arrival_s=r.engine_arrival_s + ahead,
        engine_first_s=r.engine_first_s + ahead,
        numbers={**r.numbers, "network_s": into + back},
        engine_ahead_ns=round(moved_s * 1e9),
    )
    return facts(told)


def means(found: Ways) -> tuple[float, float, float]:
    return float(found.in_s.mean()), float(found.back_s.mean()), float(found.either_s.mean())


@pytest.mark.parametrize("ahead_s", [-7.0, 0.0, 0.4])
def test_what_a_way_takes_beyond_its_least_is_its_own(ahead_s: float) -> None:
    """0 to 0.2 s more on the way in, 0 to 0.6 s on the way back, whatever the clock; 2 ms are on either."""
    made = linked(0.001 + 0.2 * RAMP, 0.001 + 0.6 * RAMP, ahead_s)
    assert means(ways(made)) == pytest.approx((0.1, 0.3, 0.002), abs=1e-9)


def test_the_parts_sum_to_what_lies_between() -> None:
    """Request by request."""
    made = linked(0.001 + 0.2 * RAMP, 0.001 + 0.6 * RAMP[::-1], 3.0)
    found = ways(made, linked())
    between = made.requests.get("network_s")
    assert found.in_s + found.back_s + found.either_s == pytest.approx(between, abs=1e-12)


@pytest.mark.parametrize(
    ("into", "back", "expected"),
    [(0.001, 0.3, (0.0, 0.299, 0.002)), (0.3, 0.001, (0.299, 0.0, 0.002)), (0.2, 0.1, (0.0, 0.0, 0.3))],
    ids=["the way in is as before", "the way back is as before", "both moved"],
)
def test_a_least_way_as_before_leaves_the_other(into: float, back: float, expected: tuple[float, ...]) -> None:
    """Even the quickest requests take 0.3 s longer; clocks are half a second apart in both windows."""
    assert means(ways(linked(into, back, 0.5), linked(ahead_s=0.5))) == pytest.approx(expected, abs=1e-9)


def test_instants_that_were_moved_are_compared_as_they_were_told() -> None:
    """40 s apart in both windows; by its late tokens the suspect window's callers were moved by 0.3 s less."""
    base, suspect = linked(ahead_s=40.0, moved_s=40.0), linked(back=0.301, ahead_s=40.0, moved_s=39.7)
    assert means(ways(suspect, base)) == pytest.approx((0.0, 0.3, 0.002), abs=1e-9)


def test_a_clock_set_within_the_window_tells_no_way() -> None:
    """Half a second in the middle: the least of both ways sums to less than nothing."""
    made = linked(back=0.001 + 0.6 * RAMP, ahead_s=np.where(np.arange(N) < N // 2, 0.0, 0.5))
    assert means(ways(made)) == pytest.approx((0.0, 0.0, 0.302), abs=1e-9)


def test_workers_have_clocks_of_their_own() -> None:
    """Two workers a second apart: neither way is a second long."""
    made = linked(ahead_s=np.arange(N) % 2)
    requests = replace(made.requests, worker=np.arange(N) % 2, worker_names=("w0", "w1"))
    assert means(ways(replace(made, requests=requests))) == pytest.approx((0.0, 0.0, 0.002), abs=1e-9)


def test_nothing_lies_between_where_nobody_links() -> None:
    """The engine's own rows."""
    assert means(ways(facts(plain()))) == (0.0, 0.0, 0.0)
