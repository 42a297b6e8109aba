"""Detection and kinds on small simulated fleets: what fires, what stays quiet, and what cannot be told."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.hotspots.detection import detect
from diagnosis.hotspots.excess import excess_p
from diagnosis.hotspots.intervals import INTERVAL_S, LONG
from diagnosis.hotspots.judge import find
from diagnosis.hotspots.pace import t_limit
from diagnosis.hotspots.regret import regret_of
from diagnosis.hotspots.text import render
from tests.simulated_routing import LENGTHS, POLICIES, Fleet, simulate


def mostly_first(number: int, busy: np.ndarray, has: np.ndarray, random: np.random.Generator) -> int:
    """Half of all to w0, the rest by turns."""
    return 0 if number % 2 else number // 2 % len(busy)


def test_bound_by_hand() -> None:
    """Ten equal weights of 1, all at one of two workers: chance 2 * 2^-10 = 0.00195, which the bound reaches for large tilts."""
    p = excess_p(np.zeros(10, dtype=np.int64), np.zeros(10, dtype=np.int64), np.ones(10), 1, 2)
    assert p[0, 0] == pytest.approx(2 * 0.5**10, rel=1e-6)
    assert p[0, 1] == 1.0


def test_limit_of_t_by_hand() -> None:
    """Three values (two degrees of freedom): P(T >= t) = 0.002 for t = 0.996 / sqrt(2 * 0.002 * 0.998) = 15.76."""
    assert t_limit(3, 2) == pytest.approx(15.76, abs=0.01)
    assert t_limit(2, 2) == math.inf


def test_worker_with_half_of_all_requests_is_found_at_once() -> None:
    """One of eight gets nine sixteenths: told by the first interval, with a cost, the reason unknown."""
    found = find(simulate(Fleet(8, mostly_first, use=0.3)))
    [spot] = found.hotspots
    assert spot.subject == {"kind": "worker", "id": "w0"}
    assert spot.kind is None
    assert spot.detected_ns == round(INTERVAL_S * 1e9)
    assert spot.regret_s is not None
    assert spot.regret_s > 0


def test_small_excess_that_stays_is_found_in_a_minute() -> None:
    """16 of 100 requests to one of eight with 40 requests an interval: no interval alone tells it, six together do."""

    def pick(number: int, busy: np.ndarray, has: np.ndarray, random: np.random.Generator) -> int:
        return 0 if random.random() < 0.2 else int(random.integers(8))

    seen = simulate(Fleet(8, pick, LENGTHS["equal"], intervals=LONG, per_interval=40, use=0.5), seed=1)
    detected = detect(seen, regret_of(seen))
    assert not detected.load_at_once[:, 0].all()
    assert detected.load[:, 0].all()


@pytest.mark.parametrize("tells_routes", [True, False])
@pytest.mark.parametrize("tells_steps", [True, False])
def test_straggler_is_found_from_steps_and_from_requests(tells_steps: bool, tells_routes: bool) -> None:
    """w2 takes twice as long under a router that goes by turns; nobody else is named."""
    fleet = Fleet(
        4,
        POLICIES["round_robin"],
        LENGTHS["equal"],
        per_interval=200,
        use=0.3,
        slow=((2, 2.0),),
        tells_steps=tells_steps,
        tells_routes=tells_routes,
    )
    found = find(simulate(fleet))
    assert [(spot.kind, spot.subject["id"]) for spot in found.hotspots] == [("straggler", "w2")]


def test_worker_a_tenth_slower_is_no_straggler() -> None:
    """However certain: below what is material nothing is told."""
    fleet = Fleet(4, POLICIES["round_robin"], LENGTHS["equal"], per_interval=200, use=0.3, slow=((2, 1.1),), noise=0.0)
    assert find(simulate(fleet)).status == "none"


def test_constant_load_is_dead_only_where_engines_queue() -> None:
    """All loads read 0 while w0 queues: dead signal. The same excess with loads that move is not."""
    seen = simulate(Fleet(8, mostly_first, use=0.5))
    alive = find(seen).hotspots[0]
    assert alive.kind != "dead_signal"
    dead = replace(seen, decisions=replace(seen.decisions, load=np.zeros_like(seen.decisions.load)))
    assert find(dead).hotspots[0].kind == "dead_signal"
    idle = replace(dead, steps=None, served=replace(dead.served, first_scheduled_s=dead.served.arrival_s))
    assert all(spot.kind != "dead_signal" for spot in find(idle).hotspots)


def test_one_worker_is_not_observable() -> None:
    """There is no alternative to compare with."""
    found = find(simulate(Fleet(1, POLICIES["round_robin"])))
    assert (found.status, found.hotspots) == ("not_observable", ())


def test_one_request_is_no_hotspot() -> None:
    """Nothing can be told of one decision, and nothing is."""
    assert find(simulate(Fleet(4, POLICIES["random"], intervals=1, per_interval=1))).status == "none"


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)), st.sampled_from(sorted(LENGTHS)), st.integers(2, 9), st.booleans(), st.booleans()
)
def test_document_is_sound_whatever_was_seen(
    policy: str, lengths: str, workers: int, tells_steps: bool, tells_routes: bool
) -> None:
    """Regret is never negative and adds up over workers; each line of the text fits; the same facts give the same answer."""
    fleet = Fleet(
        workers,
        POLICIES[policy],
        LENGTHS[lengths],
        intervals=2,
        per_interval=30,
        tells_steps=tells_steps,
        tells_routes=tells_routes,
    )
    seen = simulate(fleet, seed=workers)
    document = find(seen).to_dict()
    assert document == find(seen).to_dict()
    lost = regret_of(seen).seconds
    assert (lost[np.isfinite(lost)] >= 0).all()
    parts = [row["regret_s"] or 0.0 for row in document["regret"]["by_worker"]]
    assert math.fsum(parts) == pytest.approx(document["regret"]["total_s"] or 0.0)
    assert all(len(line) <= 80 for line in render(document, sql=False).splitlines())
