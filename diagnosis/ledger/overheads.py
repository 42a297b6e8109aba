"""Bookkeeping that takes time inside a worker's steps: looking prompts up, evicting blocks, recording what was done.

Idea: it lengthens the step for everybody in it, so it is passed on like prefill is. The probe tells its own time. A look-up is told
by the request that was admitted by it: what it takes as a rule is the look-up's own cost, what it takes beyond that is waiting for
others who hold the cache. Allocating is told by the engine, or it is what the scheduler took more in a step that
evicted than in a usual one. Swapping adapters in and compiling are found by comparing windows (`step_reasons.py`).

A step that stands still for a load from a slower tier tells its seconds; one that goes on meanwhile tells them too, so whether it stands
still is read off the steps: they have to be as much longer.

Invariant: a step's overheads are not more than its duration. Where no column tells there is none: unknown is not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from diagnosis.facts import F64, Facts, RequestFacts, StepFacts
from diagnosis.ledger.rows import OVERHEADS
from diagnosis.ledger.step_costs import MIN_LEVEL, designed, fit_nonnegative
from diagnosis.sampled import beside_rate

LOOKUP, LOCK, EVICTION, PROBE = OVERHEADS[:4]
USUAL = 0.25
"""Quantile of the look-ups of a window that is taken for what a look-up costs as a rule: more than half may wait for a lock."""
BEYOND = 2.0
"""Times that usual cost from which on the rest of a look-up is a wait."""
STANDS_STILL = 0.5
"""Seconds that steps are longer by for one of loading from which on they stand still for it: most of it."""
STRETCHES, FEWEST = 10, 40
"""Stretches of a window in which that usual cost may grow, and look-ups that each has at least."""


def overheads(facts: Facts) -> dict[str, F64]:
    """Seconds of each step that went into each of OVERHEADS, [m]; without those that nobody tells."""
    steps = facts.steps
    if steps is None:
        return {}
    found: dict[str, F64] = {}
    own, waited = lookup_parts(facts.requests)
    lookups = _by_step(facts, steps, own + waited)
    if lookups is not None:
        waits = _by_step(facts, steps, waited) if waited.any() else None
        found[LOOKUP] = lookups if waits is None else lookups - waits
        if waits is not None:
            found[LOCK] = waits
    evictions = evicting(steps, lookups)
    if evictions is not None:
        found[EVICTION] = evictions
    if np.isfinite(steps.get("probe_s")).any():
        found[PROBE] = np.nan_to_num(steps.get("probe_s"))
    loads = standing_for_loads(facts)
    if loads is not None:
        found["tier_load"] = loads
    found |= facts.step_extras
    return _within(found, steps)


def of_requests(facts: Facts) -> dict[str, F64]:
    """Seconds of each request's own look-up, wait for the cache and allocation, [n] by row, where no step tells: who is served or waits
    meanwhile pays. Empty where steps tell, or no request does."""
    return {} if facts.steps is not None else of_each(facts.requests)


def of_each(requests: RequestFacts) -> dict[str, F64]:
    """Seconds of each request's own look-up, wait for the cache and allocation, [n] by row; without those that no request tells."""
    looked, locked = lookup_parts(requests)
    told = {LOOKUP: looked, LOCK: locked, EVICTION: requests.get("alloc_s")}
    return {name: np.nan_to_num(seconds) for name, seconds in told.items() if np.nansum(seconds) > 0}


def lookup_parts(requests: RequestFacts) -> tuple[F64, F64]:
    """Seconds of each look-up that it takes as a rule at the prompt's length, and that it waited beside, [n] each; NaN unknown.

    A look-up may get dearer with what the cache holds: what all stretches from one on take at least is the rule there.
    """
    looked = requests.get("cache_lookup_s")
    known = np.isfinite(looked)
    if not known.any():
        return looked, np.zeros(len(looked))
    tokens = requests.get("prompt_tokens")
    rate = np.divide(looked, tokens, out=np.full(len(looked), np.nan), where=tokens > 0)
    usual = np.maximum(_usual(looked, requests.arrival_s), np.nan_to_num(_usual(rate, requests.arrival_s) * tokens))
    waited = np.where(known & (looked > BEYOND * usual), looked - usual, 0.0)
    return looked - waited, waited


def _usual(values: F64, at_s: F64) -> F64:
    """[n] what `values` are as a rule at their instants: the quantile of all, or that of every stretch from theirs on, if it is more.

    A wait that comes and goes leaves quick ones behind it, so it raises nothing; what only grows does.
    """
    known = np.flatnonzero(np.isfinite(values))
    out = np.zeros(len(values))
    if len(known) == 0:
        return out
    out[:] = np.quantile(values[known], USUAL)
    num = min(STRETCHES, len(known) // FEWEST)
    if num > 1:
        parts = np.array_split(known[np.argsort(at_s[known], kind="stable")], num)
        least = [float(np.quantile(values[part], USUAL)) for part in parts]
        for part, floor in zip(parts, np.minimum.accumulate(least[::-1])[::-1], strict=True):
            out[part] = np.maximum(out[part], floor)
    return out


def without_overheads(facts: Facts) -> Facts:
    """The facts with steps as long as they were but for their overheads: what the model's own work took."""
    told = overheads(facts)
    if not told or facts.steps is None:
        return facts
    net = facts.steps.duration_s - sum(told.values())
    return replace(facts, steps=replace(facts.steps, duration_s=net))


def evicting(steps: StepFacts, lookups: F64 | None = None) -> F64 | None:
    """Seconds of each step spent on making room, [m]; None where neither the engine nor its scheduler tells."""
    told = steps.get("alloc_s")
    if np.isfinite(told).any():
        return np.nan_to_num(told)
    scheduling, evicted = steps.get("schedule_s"), steps.get("blocks_evicted")
    if not np.isfinite(scheduling).any() or not np.isfinite(evicted).any():
        return None
    scheduling = scheduling - (0.0 if lookups is None else lookups)
    quiet = scheduling[np.isfinite(scheduling) & (evicted == 0)]
    usual = float(np.median(quiet)) if len(quiet) else 0.0
    more = np.where((evicted > 0) & np.isfinite(scheduling), scheduling - max(usual, 0.0), 0.0)
    return np.maximum(more, 0.0)


def standing_for_loads(facts: Facts) -> F64 | None:
    """Seconds of each step that it stood still for loads from a slower tier, [m]; None where it goes on meanwhile, or nobody tells.

    What moves where no request tells of a load is no tier's: the blocks of who was preempted.
    """
    steps = facts.steps
    if steps is None or not (facts.requests.get("kv_load_s") > 0).any():
        return None
    loads, known = np.nan_to_num(steps.get("kv_load_s")), designed(steps)
    if int((loads[known] > 0).sum()) < MIN_LEVEL:
        return None
    columns = [np.ones(len(loads)), steps.get("prefill_tokens"), steps.get("decode_tokens"), loads]
    longer_by = float(fit_nonnegative(np.stack(columns, axis=1)[known], steps.duration_s[known])[-1])
    return loads * min(longer_by, 1.0) if longer_by >= STANDS_STILL else None


def share_of_loading(facts: Facts) -> float:
    """Share of the steps' time in which they stood still for such loads; 0 where they did not, or nobody tells."""
    loads = standing_for_loads(facts)
    return 0.0 if loads is None or facts.steps is None else float(loads.sum() / np.nansum(facts.steps.duration_s))


def _by_step(facts: Facts, steps: StepFacts, looked: F64) -> F64 | None:
    """Seconds of each step [m] by those [n] of the requests that were first scheduled in it; None where no request tells."""
    r = facts.requests
    if not np.isfinite(looked).any():
        return None
    out = np.zeros(len(steps))
    for code, rows in enumerate(r.by_worker()):
        name = r.worker_names[code]
        if name not in steps.worker_names:
            continue
        mine = np.flatnonzero(steps.worker == list(steps.worker_names).index(name))
        asked = rows[np.isfinite(looked[rows]) & np.isfinite(r.scheduled_s[rows])]
        if len(mine) == 0 or len(asked) == 0:
            continue
        # a request is looked up as soon as the step before is over: that instant is the next step's
        at = np.searchsorted(steps.at_s[mine], r.scheduled_s[asked], "right")
        inside = at < len(mine)
        # of a sample of the requests each stands for others beside it
        np.add.at(out, mine[at[inside]], looked[asked[inside]] / beside_rate(r))
    return out


def _within(found: Mapping[str, F64], steps: StepFacts) -> dict[str, F64]:
    """At most what the step has: the overheads shrink together where they say more."""
    total = np.zeros(len(steps))
    for seconds in found.values():
        total += seconds
    room = np.where(np.isfinite(steps.duration_s), np.maximum(steps.duration_s, 0.0), 0.0)
    fits = np.divide(room, total, out=np.ones(len(steps)), where=total > room)
    return {name: seconds * fits for name, seconds in found.items()}
