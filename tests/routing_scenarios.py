"""Hand-made pairs of windows, as in `cause_scenarios.py`, for hotspots: what a worker got too much of, and what an index did not know.

Every request of the suspect window went to w0, which the hotspot is about; what each lost stands in the routing's facts. The
arithmetic stands beside each pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from diagnosis.facts import Facts, HostMeasure, RequestFacts, RoutingFacts, Unattached
from diagnosis.hotspots.finding import Advice, Evidence, Hotspot
from tests.cause_scenarios import N, Pair, Scenarios, bare_pair, pair, plain, worker
from tests.factories import facts

ORIGIN_NS = 1_780_000_000_000_000_000
SEES = frozenset(("route.chosen", "route.candidates_load", "route.candidates_score", "route.candidates_matched_tokens"))


def spot(cause: str, lost_s: float | None, first: float = 1.0) -> Hotspot:
    """A hotspot of this cause from 10 s to 100 s; `first`: the value of its first evidence."""
    of_fleet = cause in ("hotspot_stale_index", "hotspot_unreachable_threshold")
    facts_of = (
        Evidence("the first number", first, "ratio", None, ("r1",)),
        Evidence("the second", 0.0, "requests", None),
    )
    return Hotspot(
        cause.removeprefix("hotspot_"),
        cause,
        {"kind": "fleet", "id": None} if of_fleet else {"kind": "worker", "id": "w0"},
        {"start_ns": ORIGIN_NS + 10 * 10**9, "end_ns": ORIGIN_NS + 100 * 10**9},
        ORIGIN_NS + 20 * 10**9,
        lost_s,
        1.0,
        45,
        f"{cause} was found",
        None,
        facts_of,
        Advice("Spill above 3 waiting.", None, 3),
    )


def routing(
    spots: Sequence[Hotspot] = (),
    *,
    lost_s: dict[str, Any] | None = None,
    lost_tokens: dict[str, Any] | None = None,
    amiss: Sequence[str] = (),
    slow: float = 0.0,
    **more: Any,
) -> RoutingFacts:
    spread = [{name: np.full(N, float(each)) for name, each in (lost or {}).items()} for lost in (lost_s, lost_tokens)]
    of_index = {name: np.ones(N, dtype=bool) for name in amiss}
    return RoutingFacts(spots, spread[0], spread[1], of_index, np.full(N, slow), 2 * N, 2, 12, True, SEES, **more)


def routed(requests: Any, found: RoutingFacts) -> Facts:
    made = facts(requests, workers=[worker(500)])
    return replace(made, routing=found, visible=made.visible | found.visible)


# hotspots of a worker: requests wait where another worker had time


def too_much(cause: str) -> Callable[[], Pair]:
    """Every request waits 0.2 s at the hotspot that the best worker would not have cost: all of the change."""

    def made() -> Pair:
        found = routing([spot(cause, 0.2 * N)], lost_s={cause: 0.2})
        return pair(routed(plain(), routing()), routed(plain(queue=0.2), found))

    return made


def nothing_found(cause: str) -> Callable[[], Pair]:
    """The same windows without a hotspot."""

    def made() -> Pair:
        return pair(routed(plain(), routing()), routed(plain(), routing()))

    return made


def a_little_too_much(cause: str) -> Callable[[], Pair]:
    """5 ms were lost there, and prefill takes 300 ms longer: 2 % of the change."""

    def made() -> Pair:
        found = routing([spot(cause, 0.005 * N)], lost_s={cause: 0.005})
        return pair(routed(plain(), routing()), routed(plain(0.4, queue=0.005), found))

    return made


def of_worker(cause: str) -> Scenarios:
    return Scenarios(too_much(cause), nothing_found(cause), a_little_too_much(cause), bare_pair)


def slow_worker() -> Pair:
    """w0 took twice as long as the others for the same steps: half of 0.2 s of prefill, all of the change."""
    found = routing(
        [spot("hotspot_straggler", 6.0, first=2.0)], lost_s={"hotspot_straggler": 0.0}, slow=0.5, hosts=measured()
    )
    return pair(routed(plain(), routing()), routed(plain(0.2), found))


def slow_worker_beside_long_prompts() -> Pair:
    """1 % slower steps beside 300 ms more of prefill: 1 % of 0.4 s is 1.3 % of the change."""
    found = routing([spot("hotspot_straggler", 0.2, first=1.01)], lost_s={"hotspot_straggler": 0.0}, slow=0.01)
    return pair(routed(plain(), routing()), routed(plain(0.4), found))


def measured() -> list[HostMeasure]:
    """The GPU's clock fell to two thirds, the host's CPU did as much as the others'."""
    return [
        HostMeasure("w0", "gpu_clock_hertz", None, 1.2e9, 1.8e9, "SELECT 1.2e9"),
        HostMeasure("w0", "cpu_util", None, 0.12, 0.11, "SELECT 0.12"),
    ]


# hotspots of the index: 60 tokens are computed in 60 ms; 100 that another worker held take 100 ms more


def held_elsewhere(cause: str, **more: Any) -> Callable[[], Pair]:
    """Of 160 computed tokens another worker held 100: 100 ms at 1 ms a token, all of the change."""

    def made() -> Pair:
        found = routing([spot(cause, 0.1 * N)], lost_tokens={cause: 100.0}, **more)
        return pair(
            routed(plain(0.06, computed_tokens=60.0, cached_tokens=100.0), routing()),
            routed(plain(0.16, computed_tokens=160.0, cached_tokens=0.0), found),
        )

    return made


def a_little_held_elsewhere(cause: str) -> Callable[[], Pair]:
    """5 tokens (5 ms) that another worker held beside 300 ms more before the engine: 2 % of the change."""

    def made() -> Pair:
        found = routing([spot(cause, 0.005 * N)], lost_tokens={cause: 5.0})
        return pair(
            routed(plain(0.06, computed_tokens=60.0, cached_tokens=100.0), routing()),
            routed(_later(plain(0.065, computed_tokens=65.0, cached_tokens=95.0), 0.3), found),
        )

    return made


def _later(requests: RequestFacts, front: float) -> RequestFacts:
    requests.first_token_s[:] += front
    return replace(requests, numbers={**requests.numbers, "frontend_s": np.full(N, front)})


def of_index(cause: str, **more: Any) -> Scenarios:
    return Scenarios(held_elsewhere(cause, **more), nothing_found(cause), a_little_held_elsewhere(cause), bare_pair)


ROUTING: dict[str, Scenarios] = {
    "hotspot_affinity": of_worker("hotspot_affinity"),
    "hotspot_dead_signal": of_worker("hotspot_dead_signal"),
    "hotspot_tie_breaking": of_worker("hotspot_tie_breaking"),
    "hotspot_straggler": Scenarios(
        slow_worker, nothing_found("hotspot_straggler"), slow_worker_beside_long_prompts, bare_pair
    ),
    "hotspot_stale_index": of_index("hotspot_stale_index", unattached=Unattached(700, 1000)),
    "hotspot_unreachable_threshold": of_index("hotspot_unreachable_threshold"),
}
