"""Do counters, events, client and engine agree? A contradiction is a finding, and lowers confidence in all that rests on it.

The checks themselves are in `checks/`, a family a module.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diagnosis.checks import between as pairs
from diagnosis.checks import clocks, counters, delivery, integrity, overlap, reuse
from diagnosis.checks.check import Check
from diagnosis.facts import Facts
from diagnosis.sampled import total
from diagnosis.telling.wording import number, percent

PENALTY = {"ok": 1.0, "warning": 0.95, "contradiction": 0.7}
"""What a check's outcome does to the confidence of the causes that rest on it."""
CHECKS = (
    delivery.gaps,
    delivery.holes,
    overlap.overlapping_steps,
    delivery.covered,
    clocks.clocks,
    delivery.invalid,
    delivery.duplicates,
    delivery.shared_ids,
    delivery.arrivals,
    clocks.instants,
    clocks.token_times,
    clocks.durations,
    clocks.phases,
    delivery.joined,
    clocks.client_ttft,
    clocks.client_e2e,
    reuse.cached_tokens,
    reuse.hit_counter,
    reuse.unsaid_reuse,
    reuse.caching_flag,
    reuse.lookups,
    reuse.token_sums,
    reuse.client_tokens,
    counters.usage_range,
    counters.blocks_in_use,
    counters.negative,
    counters.running,
    counters.still_counters,
    counters.preemptions,
    counters.evictions,
    delivery.finished,
    delivery.unfinished,
    delivery.chunks,
    delivery.estimated,
    delivery.probe,
    integrity.integrity,
)


def check(facts: Facts) -> list[Check]:
    """All checks of one window that can be made with what was seen."""
    made = [one(facts) for one in CHECKS]
    return [c for c in made if c is not None]


def between(base: Facts, suspect: Facts) -> list[Check]:
    """The checks that need both windows."""
    made = (pairs.hits_against_times(suspect, base), pairs.hits_against_times(base, suspect))
    return [c for c in made if c is not None]


def penalty(checks: Sequence[Check], needs: tuple[str, ...] | None = None) -> float:
    """Factor on the confidence of a cause with these needs (None: of one that rests on everything).

    The worst check counts once, so ten warnings are not ten times as bad.
    """
    under = [c for c in checks if needs is None or c.is_under(needs)]
    return min((PENALTY[c.status] for c in under), default=1.0)


def caching_is_off(facts: Facts) -> tuple[bool, str]:
    """Whether prefix caching was off in the window, and how we know.

    A worker's word does not make it so where much is found all the same: in a connector's cache, or because the word is wrong.
    """
    told = [w.prefix_caching for w in facts.workers if w.prefix_caching is not None]
    says = f"{number(len(told))} worker says" if len(told) == 1 else f"{number(len(told))} workers say"
    if reuse.says_off(facts):
        share = _found_share(facts)
        if share >= reuse.MUCH_OF:
            return (
                False,
                f"{percent(share)} of the prompts' tokens came from a cache, though {says} that prefix caching is off",
            )
        return True, f"{says} that prefix caching is off"
    cached = facts.requests.get("cached_tokens")
    hits = float(np.nansum(cached)) if np.isfinite(cached).any() else None
    if hits is not None and hits > 0:
        return False, f"{number(hits)} prompt tokens were served from the cache"
    queries = facts.samples.get(reuse.COUNTERS[1])
    if queries == 0 and hits == 0 and reuse.was_read(facts, reuse.COUNTERS[1]):
        return True, "0 lookups in the prefix cache were counted, and no request had a cached token"
    if told and all(told):
        return False, f"{says} that prefix caching is on"
    return False, f"{number(told.count(False))} of {number(len(facts.workers))} known workers say that it was off"


def workers_off(facts: Facts) -> tuple[str | None, ...]:
    """Workers that say that prefix caching is off at them, and find little, where others say that it is on; by name."""
    told = {w.prefix_caching for w in facts.workers}
    if not {True, False} <= told:
        return ()
    off = [w.worker for w in facts.workers if w.prefix_caching is False]
    return tuple(name for name in off if _found_by_requests(facts, name) < reuse.MUCH_OF)


def _found_share(facts: Facts) -> float:
    """Share of the prompts' tokens that came from any cache but the engine's own counted one; 0 where nobody tells."""
    asked = total(facts.requests, "prompt_tokens")
    outside = counters.rise(facts, reuse.OUTSIDE) or 0.0
    return max(_found_by_requests(facts), outside / asked if asked else 0.0)


def _found_by_requests(facts: Facts, worker: str | None = None) -> float:
    """Share of the prompts' tokens that requests found cached, those of one worker alone where it is named; 0 where none tells."""
    r = facts.requests
    cached, prompt = r.get("cached_tokens"), r.get("prompt_tokens")
    known = np.isfinite(cached) & np.isfinite(prompt)
    if worker is not None:
        known &= np.isin(r.worker, [code for code, name in enumerate(r.worker_names) if name == worker])
    asked = float(prompt[known].sum())
    return float(cached[known].sum()) / asked if asked > 0 else 0.0
