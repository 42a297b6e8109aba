"""The stated rate of false alarms is met: routing that favours nobody, over any lengths of prompts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.hotspots.detection import detect
from diagnosis.hotspots.excess import excess_p
from diagnosis.hotspots.intervals import BY_TEST, FALSE_ALARMS
from diagnosis.hotspots.kinds import chances, dead, ignored
from diagnosis.hotspots.regret import regret_of
from tests.simulated_routing import LENGTHS, POLICIES, Fleet, simulate

PER_INTERVAL = {2: 40, 8: 60, 64: 130}
"""About one to twenty requests a worker and interval."""


@pytest.mark.parametrize("workers", [2, 8, 64])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_at_most_one_null_interval_in_a_hundred_tells_a_hotspot(policy: str, workers: int) -> None:
    """1,000 intervals without a hotspot, 200 for each skew of lengths, with step rows and without."""
    alarms, raw, intervals = 0, 0, 0
    for number, name in enumerate(sorted(LENGTHS)):
        for tells_steps in (True, False):
            fleet = Fleet(
                workers,
                POLICIES[policy],
                LENGTHS[name],
                intervals=100,
                per_interval=PER_INTERVAL[workers],
                tells_steps=tells_steps,
                noise=0.3,
            )
            seen = simulate(fleet, seed=100 * number + workers + tells_steps)
            regret = regret_of(seen)
            found = detect(seen, regret)
            told = found.load.any(axis=1) | found.slow.any(axis=1) | found.wrong
            told |= ignored(regret, found, chances(seen)) | dead(seen, regret, found)
            alarms += int(told.sum())
            raw += int((found.p_load <= FALSE_ALARMS).any(axis=1).sum())
            intervals += found.num
    assert intervals == 1000
    assert alarms <= FALSE_ALARMS * intervals
    # the test of the load alone keeps to its part also where its cost is not asked for
    assert raw <= FALSE_ALARMS * intervals


def test_the_tests_share_the_stated_rate() -> None:
    """What the single tests may err adds up to what is stated."""
    assert sum(BY_TEST.values()) == pytest.approx(FALSE_ALARMS)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.0, 1e5), min_size=2, max_size=8),
    st.integers(2, 3),
)
def test_the_bound_is_never_below_the_probability(weights: list[float], workers: int) -> None:
    """Against every way in which the decisions can fall: the share of ways as uneven as this one is at most the bound."""
    given_weights = np.array(weights)
    num = len(weights)
    ways = np.array(np.meshgrid(*[range(workers)] * num)).reshape(num, -1).T
    loads = np.stack([(given_weights * (ways == worker)).sum(axis=1) for worker in range(workers)], axis=1)
    of = np.zeros(num, dtype=np.int64)
    for way in ways[:: max(1, len(ways) // 12)]:
        p = excess_p(of, way, given_weights, 1, workers)[0]
        for worker in range(workers):
            own = float((given_weights * (way == worker)).sum())
            as_much = float((loads.max(axis=1) >= own * (1 - 1e-9)).mean())
            assert p[worker] >= min(as_much, 1.0) - 1e-9
