"""`find`: a window of a fleet in, its hotspots out, ranked by the seconds that they lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from diagnosis.hotspots.at_worker import at_worker
from diagnosis.hotspots.detection import Detected, detect
from diagnosis.hotspots.finding import Hotspot, Hotspots
from diagnosis.hotspots.holders import informed
from diagnosis.hotspots.intervals import FALSE_ALARMS, INTERVAL_S
from diagnosis.hotspots.kinds import Named, chances, dead, ignored, name_load
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.of_fleet import dead_signal, stale_index, unreachable_threshold
from diagnosis.hotspots.reading import read
from diagnosis.hotspots.regret import Regret, regret_of
from diagnosis.hotspots.spans import rows_in, runs
from diagnosis.hotspots.summary import cannot_tell, totals, verdict
from store.interface import Store, Window


def hotspots(store: Store, window: Window, baseline: Window | None = None) -> Hotspots:
    """Hotspots of a stored window, beside those of a baseline. Raises BadWindow where a window holds nothing to judge."""
    found, *before = (find(informed(store, each, read(store, each))) for each in (window, baseline) if each is not None)
    return found.beside(before[0]) if before else found


def find(seen: Observed) -> Hotspots:
    """The same from facts at hand."""
    return judged(seen)[0]


def judged(seen: Observed) -> tuple[Hotspots, Regret]:
    """Hotspots, and the regret of every decision that they rest on."""
    regret = regret_of(seen)
    detected = detect(seen, regret)
    spots = [] if seen.num_workers < 2 else sorted(_all(seen, regret, detected), key=_rank)
    status = "not_observable" if seen.num_workers < 2 else "hotspots" if spots else "none"
    start_ns, end_ns = seen.origin_ns, seen.origin_ns + round(seen.end_s * 1e9)
    found = Hotspots(
        status,
        verdict(seen, regret, detected, spots, status),
        {"text": str(seen.window), "run_id": seen.window.run_id, "start_ns": start_ns, "end_ns": end_ns},
        None,
        INTERVAL_S,
        detected.num,
        FALSE_ALARMS,
        len(seen.decisions),
        seen.has_routes,
        seen.policies,
        totals(seen, regret),
        tuple(spots),
        tuple(cannot_tell(seen, regret, detected)),
    )
    return found, regret


def _rank(spot: Hotspot) -> tuple[float, int]:
    return -(spot.regret_s or 0.0), spot.interval["start_ns"]


def _all(seen: Observed, regret: Regret, detected: Detected) -> Iterator[Hotspot]:
    spots = list(_at_workers(seen, regret, detected))
    yield from spots
    if not any(spot.kind == "dead_signal" for spot in spots):
        for first, last in runs(dead(seen, regret, detected)):
            yield dead_signal(seen, regret, detected, first, last)
    for first, last in runs(detected.wrong):
        yield stale_index(seen, regret, detected, first, last)
    found = chances(seen)
    for first, last in runs(ignored(regret, detected, found)):
        yield unreachable_threshold(seen, regret, detected, first, last, found)


def _at_workers(seen: Observed, regret: Regret, detected: Detected) -> Iterator[Hotspot]:
    for worker in range(seen.num_workers):
        for first, last in runs(detected.slow[:, worker]):
            slowness = detected.slowness[first : last + 1, worker]
            named = Named("straggler", {"slowness": float(np.nanmedian(slowness))})
            yield at_worker(seen, regret, detected, worker, first, last, named)
        for first, last in runs(detected.load[:, worker]):
            rows = rows_in(detected, first, last)
            yield at_worker(seen, regret, detected, worker, first, last, name_load(seen, regret, rows, worker))
